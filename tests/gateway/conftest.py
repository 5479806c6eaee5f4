"""A street of doubles and gateways for each test."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.gateway.house import Street


@pytest.fixture
async def street() -> AsyncIterator[Street]:
    async with AsyncExitStack() as stack:
        yield Street(stack)
