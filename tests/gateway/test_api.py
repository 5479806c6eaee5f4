"""The surface as a client sees it: which routes there are, and what each error looks like."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from gateway.trace import CONTENT_TYPE
from tests.double import CHAT, COMPLETIONS, Engine
from tests.gateway.house import KEY, House, Street, chat

LORA = {"id": "lora-a", "object": "model", "root": "/adapters/a", "parent": "tiny"}


@pytest.fixture
async def engine(street: Street) -> Engine:
    return await street.engine()


@pytest.fixture
async def house(street: Street, engine: Engine) -> AsyncIterator[House]:
    """A gateway that must still serve when the test has ended."""
    house = await street.house(engine, listen={"port": 0, "max_body_bytes": 100_000})
    yield house
    assert (await house.client.get("/health")).json() == {"status": "ok"}
    await house.idle()


def error(answer: httpx.Response, status: int, kind: str = "invalid_request_error") -> Any:
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    assert answer.json().keys() == {"error"}
    told = answer.json()["error"]
    assert told.keys() == {"message", "type", "param", "code"}
    assert told["type"] == kind
    assert told["message"]
    return told


# Routes


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_hot_routes_take_post_only(house: House, engine: Engine, path: str, method: str) -> None:
    answer = await house.client.request(method, path)
    assert answer.headers["allow"] == "POST"
    if method != "HEAD":
        error(answer, 405)
    assert answer.status_code == 405
    assert not engine.asked


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics"])
async def test_cold_routes_take_get_only(house: House, path: str) -> None:
    answer = await house.client.post(path)
    error(answer, 405)
    assert answer.headers["allow"] == "GET"


@pytest.mark.parametrize(
    "path",
    [
        "/", "/docs", "/redoc", "/openapi.json", "/v1", "/v1/", "/v1/chat", "/v1/chat/completions/", "/v1/model",
        "/health/", "/V1/models", "/v1/chat/completions/x", "//v1/chat/completions", "/tokenize/",
        "/invocations", "/pooling", "/score", "/load_lora_adapter", "/sleep", "/reset_prefix_cache", "/server_info",
        "/admin", "/debug", "/workers", "/.env", "/v1/../metrics/x", "/%2e%2e/metrics",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_any_other_path_is_refused_and_never_proxied(
    house: House, engine: Engine, path: str, method: str
) -> None:
    seen = len(engine.calls)
    error(await house.client.request(method, house.url + path, content=orjson.dumps(chat())), 404)
    assert len(engine.calls) == seen


async def test_no_websocket_is_spoken(street: Street, house: House) -> None:
    client = await street.raw(house)
    upgrade = ["connection: upgrade", "upgrade: websocket", "sec-websocket-key: x", "sec-websocket-version: 13"]
    client.ask(b"", *upgrade, method="GET")
    assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("first", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET /\r\n\r\n"])
async def test_another_protocol_is_refused(street: Street, house: House, first: bytes) -> None:
    client = await street.raw(house)
    client.send(first)
    answer = await client.rest()
    assert not answer or b" 400 " in answer.split(b"\r\n")[0] or b" 404 " in answer.split(b"\r\n")[0]


@pytest.mark.parametrize(
    "framing",
    [
        "content-length: 5\r\ncontent-length: 6", "content-length: 5\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked, identity", "content-length: +5", "content-length: 5, 6", "content-length: -1",
    ],
)  # fmt: skip
async def test_ambiguous_framing_reaches_no_engine(street: Street, house: House, engine: Engine, framing: str) -> None:
    client = await street.raw(house)
    client.send(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n{framing}\r\n\r\n".encode())
    client.send(b"0\r\n\r\nGET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 400")
    assert not engine.asked


# Who is it


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer nobody"}, {"authorization": "Basic abc"}, {"x-api-key": "nobody"}],
)
@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models")])
async def test_nobody_gets_401(house: House, engine: Engine, headers: dict[str, str], method: str, path: str) -> None:
    async with httpx.AsyncClient(base_url=house.url, trust_env=False, verify=False) as nobody:
        answer = await nobody.request(method, path, headers=headers, content=b"not read")
    error(answer, 401, "authentication_error")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert not engine.asked


async def test_a_key_in_the_query_is_no_key(house: House) -> None:
    async with httpx.AsyncClient(base_url=house.url, trust_env=False, verify=False) as nobody:
        error(await nobody.get(f"/v1/models?key={KEY}&api_key={KEY}"), 401, "authentication_error")


async def test_401_comes_before_the_body(street: Street, house: House) -> None:
    client = await street.raw(house)
    client.send(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\nexpect: 100-continue\r\n\r\n".encode())
    assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 401")


async def test_expect_is_answered_for_those_who_may(street: Street, house: House, engine: Engine) -> None:
    client, body = await street.raw(house), orjson.dumps(chat())
    client.send(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        f"content-length: {len(body)}\r\nexpect: 100-continue\r\n\r\n".encode()
    )
    assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    client.send(body)
    assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert engine.asked[0].header("expect") is None


# Bodies

MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "text": b'"x"',
    "number": b"5",
    "no model": b"{}",
    "cut": b'{"model":"tiny"',
    "tail": b'{"model":"tiny"} x',
    "two": b'{"model":"tiny"}{"model":"tiny"}',
    "ff": b"\xff",
    "bom": b"\xef\xbb\xbf" + orjson.dumps(chat()),
    "utf-16": '{"model":"tiny"}'.encode("utf-16"),
    "not utf-8": b'{"model":"tiny","x":"\xff"}',
    "surrogate": b'{"model":"tiny","x":"\\ud800"}',
    "2000 arrays": b"[" * 2000 + b"]" * 2000,
    "40000 arrays": b"[" * 40_000 + b"]" * 40_000,
    "2000 objects": b'{"model":"tiny","tools":' + b'{"a":' * 2000 + b"1" + b"}" * 2001,
    "5000 digits": b'{"model":"tiny","seed":' + b"9" * 5000 + b"}",
    "nan": b'{"model":"tiny","temperature":NaN}',
    "zstd": b"\x28\xb5\x2f\xfd\x00\x00",
    "gzip": gzip.compress(orjson.dumps(chat())),
    "spaces": b" " * 90_000,
    "form": b"model=tiny&stream=true",
    "model null": b'{"model":null}',
    "model empty": b'{"model":""}',
    "model list": b'{"model":["tiny"]}',
    "model number": b'{"model":5}',
    "stream text": b'{"model":"tiny","stream":"true"}',
    "stream list": b'{"model":"tiny","stream":[]}',
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_body_is_400_and_reaches_nobody(
    house: House, engine: Engine, path: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await house.client.post(path, content=MALFORMED[name])
    error(answer, 400)
    assert not engine.asked
    assert not caplog.records


@pytest.mark.parametrize("null", ["stream", "stream_options", "tools", "stop", "max_tokens", "logprobs"])
async def test_null_is_absent(house: House, engine: Engine, null: str) -> None:
    answer = await house.client.post(CHAT, json=chat() | {null: None})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert engine.asked[0].json()[null] is None


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"]
)
async def test_json_is_json_whatever_it_is_called(house: House, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    answer = await house.client.post(CHAT, content=orjson.dumps(chat()), headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("model", ["nothing", "TINY", "tiny ", "../tiny", "tiny\n", "x" * 50_000])
async def test_an_unknown_model_is_404(house: House, engine: Engine, model: str) -> None:
    told = error(await house.chat(model=model), 404)
    assert (told["param"], told["code"]) == ("model", "model_not_found")
    assert model not in told["message"]
    assert not engine.asked


async def test_a_body_that_is_declared_too_large_is_413_unread(street: Street, house: House) -> None:
    client = await street.raw(house)
    client.send(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 100001\r\n\r\n".encode()
    )
    got = await client.until(b"}}")
    assert got.startswith(b"HTTP/1.1 413")
    assert b"larger than 100000 bytes" in got


async def test_a_chunked_body_is_413_where_it_gets_too_large(house: House, engine: Engine) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model": "tiny", "messages": "'
        for _ in range(11):
            yield b"x" * 10_000
        yield b'"}'

    error(await house.client.post(CHAT, content=pieces()), 413)
    assert not engine.asked


async def test_a_chunked_body_is_taken(street: Street, house: House, engine: Engine) -> None:
    client, body = await street.raw(house), orjson.dumps(chat())
    client.send(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    )
    for at in range(len(body)):
        client.send(b"1;ext=1\r\n%b\r\n" % body[at : at + 1])
    client.send(b"0\r\nx-trailer: 1\r\n\r\n")
    assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200")
    (call,) = engine.asked
    assert call.body.endswith(body[1:])
    assert call.header("content-length") == str(len(call.body))
    assert call.header("transfer-encoding") is None
    assert call.header("x-trailer") is None


async def test_a_slow_body_is_408(street: Street, engine: Engine) -> None:
    house = await street.house(engine, timeouts={"body": 0.05})
    client = await street.raw(house)
    client.send(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 9\r\n\r\n{{".encode()
    )
    assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 408")
    await house.until("requests_total", 1, status="408")


async def test_a_client_that_leaves_in_its_body(street: Street, house: House, engine: Engine) -> None:
    client = await street.raw(house)
    client.send(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 9\r\n\r\n{{".encode()
    )
    await asyncio.sleep(0.02)
    client.leave()
    await house.until("requests_total", 1, status="client_left")
    assert not engine.asked


# Request ids


@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("GET", "/health"), ("GET", "/nowhere"), ("GET", CHAT)])
async def test_a_request_id_is_echoed_on_every_answer(house: House, method: str, path: str) -> None:
    answer = await house.client.request(method, path, headers={"x-request-id": "mine-1.a:b_c"}, json=chat())
    assert answer.headers.get_list("x-request-id") == ["mine-1.a:b_c"]


@pytest.mark.parametrize("name", ['{"level":"error"}', "a b", "x" * 129, "é"])
async def test_an_ill_formed_one_is_replaced(house: House, name: str) -> None:
    answer = await house.client.get("/health", headers=[(b"x-request-id", name.encode())])
    assert len(answer.headers["x-request-id"]) == 32


# The operator's side


async def test_ready_says_for_which_model_not(street: Street, engine: Engine) -> None:
    other = await street.engine("big")
    other.health = 503
    house = await street.house(
        engine,
        models=[{"name": "tiny"}, {"name": "big"}, {"name": "none"}],
        engines={
            "static": [{"url": engine.url, "model": "tiny"}, {"url": other.url, "model": "big"}],
            "poll_seconds": 60,
        },
    )
    answer = await house.client.get("/ready")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "engines": {"tiny": 1, "big": 0, "none": 0}}


async def test_one_model(house: House) -> None:
    answer = await house.client.get("/v1/models/tiny")
    assert (answer.status_code, answer.json()["id"], answer.json()["max_model_len"]) == (200, "tiny", 4096)
    error(await house.client.get("/v1/models/no/such"), 404, "invalid_request_error")
    error(await house.client.get("/v1/models/"), 404, "invalid_request_error")
    async with httpx.AsyncClient(base_url=house.url, trust_env=False) as nobody:
        error(await nobody.get("/v1/models/tiny"), 401, "authentication_error")


async def test_ready(house: House, street: Street, engine: Engine) -> None:
    assert (await house.client.get("/ready")).json() == {"ready": True, "engines": {"tiny": 1}}
    prefill_only = await street.house({"url": engine.url, "model": "tiny", "role": "prefill"})
    answer = await prefill_only.client.get("/ready")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "engines": {"tiny": 0}}


async def test_models_are_those_of_living_engines_each_once_with_every_field(street: Street, engine: Engine) -> None:
    second, dead, big = await street.engine(), await street.engine(), await street.engine("big")
    engine.cards.append(LORA)
    second.cards.append({"id": "another name", "object": "model", "root": "/models/tiny", "parent": None})
    dead.cards.append(LORA | {"id": "lora-dead"})
    dead.health = 500
    static = [{"url": e.url, "model": "tiny"} for e in (engine, second, dead)] + [{"url": big.url, "model": "big"}]
    house = await street.house(
        models=[{"name": "tiny"}, {"name": "big"}], engines={"static": static, "poll_seconds": 60}
    )
    listed = (await house.client.get("/v1/models")).json()
    assert listed == {"object": "list", "data": [engine.cards[0], LORA, big.cards[0]]}


async def test_metrics_without_an_admin_key_are_for_loopback(house: House) -> None:
    answer = await house.client.get("/metrics", headers={"authorization": ""})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == CONTENT_TYPE
    assert "moongate_engine_up" in answer.text


@pytest.mark.parametrize(("host", "status"), [("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:8000", 200),
                                              ("evil.example", 403), ("localhost.evil.example:80", 403)])  # fmt: skip
async def test_a_web_pages_name_that_leads_here_is_refused(house: House, host: str, status: int) -> None:
    for method, path in (("GET", "/metrics"), ("POST", "/admin/explain")):
        answer = await house.client.request(method, path, headers={"host": host}, json={"body": {}})
        assert (answer.status_code == 403) is (status == 403), answer.text


async def test_metrics_with_an_admin_key(street: Street, engine: Engine) -> None:
    house = await street.house(engine, admin={"key": "operator"})
    right = await house.client.get("/metrics", headers={"authorization": "Bearer operator"})
    assert right.status_code == 200
    for wrong in ("", f"Bearer {KEY}", "Bearer operato", "Bearer operator2", "Basic operator"):
        error(await house.client.get("/metrics", headers={"authorization": wrong}), 403, "permission_error")


async def test_a_clients_words_make_no_series(house: House) -> None:
    before = (await house.metrics()).count("\n")
    for number in range(30):
        await house.chat(model=f"model-{number}")
        await house.client.get(f"/path-{number}", headers={"user-agent": f"agent-{number}"})
        await house.client.post(CHAT, json=chat(), headers={"authorization": f"Bearer key-{number}"})
    assert (await house.metrics()).count("\n") - before < 60
