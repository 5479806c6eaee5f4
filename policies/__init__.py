"""Where a request goes. Thinks, never acts: no I/O, no clock, no unseeded randomness."""
