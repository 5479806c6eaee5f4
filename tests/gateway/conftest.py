"""A street of doubles and gateways for each test, and a log without tracebacks for those that ask for it."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from tests.gateway.house import Street


@pytest.fixture
async def street() -> AsyncIterator[Street]:
    async with AsyncExitStack() as stack:
        yield Street(stack)


@pytest.fixture
def calm(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that happens in the test may leave a traceback in the log."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info] == []
    assert "Traceback" not in caplog.text
