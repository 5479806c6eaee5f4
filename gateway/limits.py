"""Rate, token and concurrency limits of each tenant, in this process.

A rate is a bucket that holds one minute's worth and fills evenly. Tokens are charged when the
prompt has been counted and once more when the answer's length is known; the second charge may take
the bucket below zero, which the next request pays for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.errors import RateLimited
from gateway.tenants import Tenant


class Bucket:
    """`per_minute` units, filled evenly. The clock is in seconds and only runs forward."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._size = float(per_minute)
        self._rate = per_minute / 60
        self._level = self._size
        self._at = now

    def take(self, amount: float, now: float) -> float:
        """Take `amount` and return 0, or take nothing and return the seconds until it is there.

        What is larger than the whole bucket is taken from a full one.
        """
        self._fill(now)
        needed = min(amount, self._size)
        if self._level < needed:
            return (needed - self._level) / self._rate
        self._level -= amount
        return 0.0

    def owe(self, amount: float, now: float) -> None:
        """Take `amount` even if it is not there."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self._size, self._level + (now - self._at) * self._rate)
        self._at = now


class Bytes:
    """A number of bytes that may be held at once, by all requests together."""

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self, size: int) -> bool:
        """Hold `size` bytes more; False, and nothing is held, where they are not free."""
        if size > self._left:
            return False
        self._left -= size
        return True

    def has(self, size: int) -> bool:
        """Whether so many are free."""
        return size <= self._left

    def give(self, size: int) -> None:
        """Hold them no more."""
        self._left += size


class Budget:
    """How often something may be done as a share of something else, with a little in hand.

    Each `earn` adds `share`, each `spend` takes one. What is in hand is bounded, so that a long quiet time
    does not pay for a storm.
    """

    def __init__(self, share: float, *, first: float = 10.0, most: float = 100.0) -> None:
        self._share = share
        self._most = most
        self._left = first if share else 0.0

    def earn(self) -> None:
        self._left = min(self._most, self._left + self._share)

    def spend(self) -> bool:
        """Whether there is one to spend; it is then spent."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(slots=True)
class _State:
    requests: Bucket | None
    tokens: Bucket | None
    running: int = field(default=0)


class Slot:
    """A tenant's request under way. A plain class: contextlib's takes three times as long."""

    __slots__ = ("_state",)

    def __init__(self, state: _State) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._state.running += 1

    def __exit__(self, *_: object) -> None:
        self._state.running -= 1


class Limits:
    """What each tenant may still do. Tenants come from the configuration, so their number is bounded."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: dict[str, _State] = {}

    def admit(self, tenant: Tenant) -> "Slot":
        """One of the tenant's slots, to be held in a `with`. Raises `RateLimited`."""
        state = self._state(tenant)
        if tenant.concurrent is not None and state.running >= tenant.concurrent:
            raise RateLimited(
                f"{tenant.concurrent} requests of yours are under way, which is your limit; wait for one to end.",
                code="concurrency_limit",
            )
        if state.requests is not None and (wait := state.requests.take(1, self._clock())):
            raise RateLimited(
                f"Your limit is {tenant.requests_per_minute} requests a minute; try again in {math.ceil(wait)} s.",
                retry_after=wait,
                code="request_limit",
            )
        return Slot(state)

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Take a prompt's tokens from the tenant's budget. Raises `RateLimited`."""
        bucket = self._state(tenant).tokens
        if bucket is not None and (wait := bucket.take(tokens, self._clock())):
            raise RateLimited(
                f"Your limit is {tenant.tokens_per_minute} tokens a minute; try again in {math.ceil(wait)} s.",
                retry_after=wait,
                code="token_limit",
            )

    def settle(self, tenant: Tenant, tokens: int) -> None:
        """Take tokens that are only known now; the budget may go below zero."""
        bucket = self._state(tenant).tokens
        if bucket is not None:
            bucket.owe(tokens, self._clock())

    def running(self, tenant: Tenant) -> int:
        return self._state(tenant).running

    def _state(self, tenant: Tenant) -> _State:
        state = self._states.get(tenant.name)
        if state is None:
            now = self._clock()
            state = self._states[tenant.name] = _State(
                requests=Bucket(tenant.requests_per_minute, now) if tenant.requests_per_minute else None,
                tokens=Bucket(tenant.tokens_per_minute, now) if tenant.tokens_per_minute else None,
            )
        return state
