"""A sick pool or a lost engine: requests go on, and it is counted."""

import os
import signal
import threading
from pathlib import Path

import httpx

from .ask import CHAT, bearer, chat, eventually, metric, post, words
from .conftest import KEYS, Serve, settings
from .stack import Pool, free_port, start_engine, start_gateway, start_master


def test_a_pool_that_refuses_is_unknown_and_requests_go_on(serve: Serve) -> None:
    gateway = serve(pools={"main": {"admin": [f"http://127.0.0.1:{free_port()}"], "deadline_ms": 5}})
    body = chat(words(400))
    first, again = (post(gateway.url, CHAT, body, KEYS["team-a"]) for _ in range(2))
    assert first.status == again.status == httpx.codes.OK
    assert again.own == again.cached > 0
    assert metric(gateway.url, "moongate_lookups_total", result="open") == 2, "no master serves: none is asked"


def test_a_pool_that_hangs_costs_its_deadline_and_no_more(serve: Serve, tmp_path: Path) -> None:
    with start_master(tmp_path) as master:
        gateway = serve(pools={"main": {"admin": [master.admin], "deadline_ms": 20}})
        assert post(gateway.url, CHAT, chat(words(400)), KEYS["team-a"]).status == httpx.codes.OK
        os.kill(master.process.pid, signal.SIGSTOP)
        for _ in range(3):
            assert post(gateway.url, CHAT, chat(words(400)), KEYS["team-a"]).status == httpx.codes.OK
        late, not_asked = (metric(gateway.url, "moongate_lookups_total", result=each) for each in ("timeout", "open"))
        assert late + not_asked == 3, "until it is seen that the master does not serve, then at no cost"
        assert metric(gateway.url, "moongate_lookup_seconds_sum") < 1
        os.kill(master.process.pid, signal.SIGCONT)
        known = metric(gateway.url, "moongate_lookups_total", result="known")

        def asked_again() -> bool:
            assert post(gateway.url, CHAT, chat(words(400)), KEYS["team-a"]).status == httpx.codes.OK
            return metric(gateway.url, "moongate_lookups_total", result="known") > known

        eventually(asked_again, "the pool is known again")


def test_with_an_unknown_pool_nothing_is_handed_over(serve: Serve) -> None:
    gateway = serve(
        policy="disaggregated",
        roles=("prefill", "decode"),
        pools={"main": {"admin": [f"http://127.0.0.1:{free_port()}"], "deadline_ms": 5}},
    )
    answer = post(gateway.url, CHAT, chat(words(800)), KEYS["team-a"])
    assert answer.status == httpx.codes.OK
    assert answer.route["reason"] == "pool unknown, prefill where it decodes"


def test_an_engine_that_was_never_there_does_not_hinder_the_others(
    pool: Pool, model_folder: Path, tmp_path: Path
) -> None:
    config = settings(pool, model_folder)
    here = [{"url": url, "model": "tiny"} for url in pool.urls]
    config["engines"] = {"static": [{"url": f"http://127.0.0.1:{free_port()}", "model": "tiny"}, *here]}
    with start_gateway(config, tmp_path) as gateway:
        for _ in range(6):
            assert post(gateway.url, CHAT, chat(words(50)), KEYS["team-a"]).status == httpx.codes.OK


def test_an_engine_that_dies_breaks_its_stream_and_the_others_serve(
    pool: Pool, model_folder: Path, tmp_path: Path
) -> None:
    # A store of its own: the pool would miss the segment that dies with this engine for 10 s.
    with (
        start_master(tmp_path) as master,
        start_engine(model_folder, "doomed", master, folder=tmp_path).ready() as doomed,
    ):
        config = settings(pool, model_folder, policy="round_robin")
        urls = (doomed.url, *pool.urls)
        config["engines"] = {"static": [{"url": url, "model": "tiny"} for url in urls], "poll_seconds": 0.5}
        with start_gateway(config, tmp_path) as gateway:
            name = f"127.0.0.1:{doomed.port}"
            headers = bearer(KEYS["team-a"])
            body = chat(words(50), max_tokens=4000, stream=True, ignore_eos=True)
            events = b""
            for _ in urls:
                with httpx.stream("POST", gateway.url + CHAT, json=body, headers=headers, timeout=60) as answer:
                    if f"engine={name};" not in answer.headers["x-moongate-route"]:
                        continue
                    threading.Timer(0.3, doomed.kill).start()
                    events = answer.read()
                    break
            assert events.endswith(b"data: [DONE]\n\n")
            assert b'"error"' in events.split(b"\n\n")[-3]
            for _ in range(6):
                assert post(gateway.url, CHAT, chat(words(50)), KEYS["team-a"]).status == httpx.codes.OK
            eventually(lambda: metric(gateway.url, "moongate_engine_up", engine=name) == 0, "it is out")
            eventually(lambda: metric(gateway.url, "moongate_engine_requests") == 0, "no request is left")
