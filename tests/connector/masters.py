"""Doubles of a Mooncake master's HTTP port, which decode and split as it does."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson

from connector.keys import KeyScheme
from tests.connector.peer import Line, Script, ok

EMPTY: dict[str, Any] = {
    "ok": False, "error": "OBJECT_NOT_FOUND",
    "values": None, "disk_values": None, "local_disk_values": None, "nof_values": None,
}  # fmt: skip
IN_MEMORY = EMPTY | {"ok": True, "error": None, "values": [{"size_": 1, "transport_endpoint_": "h:1"}]}


ON_DISK = EMPTY | {"ok": True, "error": None, "local_disk_values": [{"client_id": "c", "object_size": 1}]}


def keys_of(scheme: KeyScheme, blocks: Iterable[int]) -> set[str]:
    return {key for number in blocks for key in scheme.keys(number.to_bytes(32))}


def asked(target: str) -> list[str]:
    """The keys that the master understands: it decodes first and splits then."""
    parts = urlsplit(target)
    assert parts.path == "/batch_query_keys"
    [joined] = parse_qs(parts.query, strict_parsing=True)["keys"]
    return joined.split(",")


def master_with(entries: dict[str, dict[str, Any]]) -> Script:
    async def script(line: Line) -> None:
        while True:
            keys = asked((await line.request()).target)
            data = {key: entries.get(key, EMPTY) for key in sorted(set(keys))}
            await line.send(ok(orjson.dumps({"success": True, "data": data})))

    return script


def holding(keys: Iterable[str]) -> Script:
    return master_with(dict.fromkeys(keys, IN_MEMORY))


async def standby(line: Line) -> None:
    """A master that does not serve: it says so, and knows no key."""
    while True:
        target = (await line.request()).target
        if target == "/health":
            await line.send(ok(b'{"status":"ok","role":"standby","service_ready":false}'))
        else:
            await line.send(ok(orjson.dumps({"success": True, "data": dict.fromkeys(asked(target), EMPTY)})))
