"""How much memory this process takes at its worst: the gateway, its clients and its engines run in it."""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Growth:
    """What a block took, in bytes; known when it has ended."""

    grown: int = 0


@contextmanager
def peak() -> Iterator[Growth]:
    """The highest resident memory while the block runs, above what there was at its start."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the highest so far: proc(5)
    start, growth = _resident("VmRSS"), Growth()
    yield growth
    growth.grown = _resident("VmHWM") - start


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
