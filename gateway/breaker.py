"""A circuit breaker: an engine that fails again and again is left alone for a while.

    closed     it gets work
    open       it failed `FAILURES` times in a row, before any byte of an answer: it gets none for a while
    half open  the while is over: one request tries it; an answer closes the circuit, a failure opens it again

The while doubles with each failed try, from `FIRST_SECONDS` to `MOST_SECONDS`. Health checks do not see an
engine that answers them and fails its requests; its answers do.
"""

from collections.abc import Callable

FAILURES = 5
FIRST_SECONDS = 1.0
MOST_SECONDS = 30.0

CLOSED, HALF_OPEN, OPEN = 0, 1, 2


class Breaker:
    """The circuit of one engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._until = 0.0
        self._pause = FIRST_SECONDS
        self._trying = False

    @property
    def state(self) -> int:
        """CLOSED, HALF_OPEN or OPEN, as numbers for a metric."""
        if self._failures < FAILURES:
            return CLOSED
        return OPEN if self._clock() < self._until else HALF_OPEN

    @property
    def lets_through(self) -> bool:
        """Whether a request may go to the engine now."""
        if self._failures < FAILURES:
            return True
        return self._clock() >= self._until and not self._trying

    def trying(self) -> None:
        """A request goes there; half open, it is the only one until it is known how it went."""
        self._trying = self._failures >= FAILURES

    def answered(self) -> None:
        """The engine answered, whatever it said."""
        self._failures = 0
        self._pause = FIRST_SECONDS
        self._trying = False

    def failed(self) -> None:
        """The engine failed before the first byte of an answer."""
        self._failures += 1
        if self._failures >= FAILURES:
            if self._trying or self._failures == FAILURES:
                self._until = self._clock() + self._pause
                self._pause = min(MOST_SECONDS, self._pause * 2)
            self._trying = False

    def gave_no_sign(self) -> None:
        """The try ended without telling anything of the engine: its client left."""
        self._trying = False
