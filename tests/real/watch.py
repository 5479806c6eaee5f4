"""Notices when the machine, not the software, fails a test on real engines.

Virtual machines sometimes stand still for half a minute, with one core or with all. An engine that
cannot answer /health for seconds, or whose Mooncake client gives a transfer up, proves nothing about
the gateway: such a test is run again, at most twice, and the run's summary says so. A gateway takes such
an engine out for a while, so that the next test waits until all have been well for that long.
"""

import threading
import time
from collections.abc import Sequence
from typing import Self

import httpx

from .stack import Engine

PAUSE = 0.5
LONG = 2.0
"""Seconds without an answer from /health that no idle engine needs."""
WELL = 5.0
"""Seconds of prompt answers after which every gateway has the engines in again."""


class Watch:
    """Looks after the engines, twice a second."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._stop = threading.Event()
        self._stood_still = 0
        self._well_since = time.monotonic()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def troubles(self) -> float:
        """A number that grows whenever an engine stood still or its store client gave a transfer up."""
        failed = "mooncake_store_operation_failed_keys_total"
        try:
            return self._stood_still + sum(engine.count(failed) for engine in self._engines)
        except httpx.TransportError:
            return self._stood_still + 0.5

    def grew(self, before: float, seconds: float = 45) -> bool:
        """Whether there is more trouble than before; a transfer is given up only after 30 s."""
        end = time.monotonic() + seconds
        while self.troubles() == before and time.monotonic() < end:
            time.sleep(PAUSE)
        return self.troubles() != before

    def wait_until_well(self, seconds: float = 120) -> None:
        """Wait until the engines have answered at once for a while, or give up waiting."""
        end = time.monotonic() + seconds
        while time.monotonic() - self._well_since < WELL and time.monotonic() < end:
            time.sleep(PAUSE)

    def _look(self) -> None:
        with httpx.Client(timeout=LONG, trust_env=False) as client:
            last = time.monotonic()
            while not self._stop.wait(PAUSE):
                well = time.monotonic() - last < PAUSE + LONG
                for engine in self._engines:
                    try:
                        well &= client.get(f"{engine.url}/health").status_code == httpx.codes.OK
                    except httpx.TransportError:
                        well = False
                last = time.monotonic()
                if not well:
                    self._stood_still += 1
                    self._well_since = last
