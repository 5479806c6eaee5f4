"""Traces are read as they are written, and agents' prompts grow as agents' prompts do."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from gateway.traffic import Agents, BadTraffic, read


def line(at: float, tokens: int, output: int, *ids: int) -> str:
    return json.dumps({"timestamp": at, "input_length": tokens, "output_length": output, "hash_ids": ids})


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_trace_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    traffic = read(written(tmp_path, line(1500, 1030, 9, 0, 1, 2), line(250, 512, 5, 0)))
    first, second = traffic.asks
    assert (traffic.name, traffic.block_size) == ("trace", 512)
    assert (first.at, first.tokens, first.output, second.at, second.tokens) == (0.25, 512, 5, 1.5, 1030)
    assert len(second.chain) == 2  # the third block is not full
    assert second.chain[:1] == first.chain[:1]


def test_an_answer_has_the_blocks_that_the_next_turn_has_there(tmp_path: Path) -> None:
    turn = line(0, 700, 900, 0, 1)
    other = line(1, 2100, 10, 0, 5, 6, 7, 8)
    follow = line(2, 2100, 10, 0, 2, 3, 4, 9)
    traffic = read(written(tmp_path, turn, other, follow))
    asked, stranger, next_turn = (ask.chain for ask in traffic.asks)
    assert len(asked) == 3
    assert asked[1:] == stranger[1:3]  # the first that begins so counts
    assert asked[2] != next_turn[2]


def test_an_answer_that_nobody_goes_on_from_is_found_by_nobody(tmp_path: Path) -> None:
    shared = line(0, 512, 2000, 0)
    short = line(1, 1024, 2000, 0, 1)
    again = line(2, 1024, 600, 0, 1)
    traffic = read(written(tmp_path, shared, short, again))
    names = [block for ask in traffic.asks for block in ask.chain[ask.tokens // 512 :]]
    assert len(names) == len(set(names)) == 3 + 3 + 1
    assert not {block for ask in traffic.asks for block in ask.chain[: ask.tokens // 512]} & set(names)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "line 2"),
        ('{"timestamp": 1}', "input_length"),
        (line(0, 513, 1, 0), "need 2 hash_ids"),
        (line(0, 0, 1), "1 or more"),
        (line(0, 512, 1, -1), "hash_ids must be"),
    ],
)
def test_what_cannot_be_read_is_told_by_its_line(tmp_path: Path, bad: str, says: str) -> None:
    with pytest.raises(BadTraffic, match="line 2") as caught:
        read(written(tmp_path, line(0, 512, 1, 0), bad))
    assert says in str(caught.value)


def test_no_trace_and_an_empty_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTraffic, match="No such file"):
        read(tmp_path / "missing")
    with pytest.raises(BadTraffic, match="no requests"):
        read(written(tmp_path, ""))


def test_agents_go_on_from_what_was_said() -> None:
    agents = Agents(sessions=3, turns=4, system_tokens=256, block_size=64)
    traffic = agents.traffic(7)
    assert traffic == agents.traffic(7)
    assert traffic != agents.traffic(8)
    assert len(traffic.asks) == 12
    for session in range(3):
        turns = traffic.asks[session * 4 : session * 4 + 4]
        assert turns[0].follows is None
        assert turns[0].at <= agents.ramp
        for place, (earlier, later) in enumerate(pairwise(turns)):
            assert later.follows == session * 4 + place
            assert later.tokens > earlier.tokens + earlier.output
            assert later.session == earlier.session
            assert later.chain is earlier.chain
    heads = {ask.chain[:4] for ask in traffic.asks}
    assert len(heads) == 1
    assert len({ask.chain[4] for ask in traffic.asks}) == 3
