"""What is known of a prompt: the same ids and hashes as without any memory, for less work."""

import asyncio
import gc
import random
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.blocks import Adapter, Algorithm, HashScheme, hash_prompt
from connector.cuts import _FRAGMENTS
from connector.errors import Inexact
from connector.prompts import INLINE_BYTES, Known, Prompts
from connector.render import Rules
from connector.rendering import Rendering
from connector.tokens import Kind, Tokenizer
from tests.connector.families import BYTE_LEVEL, CHATML, OTHERS, PLAIN, TEXTS, TOKENS, folder

SCHEME = HashScheme(Algorithm.SHA256_CBOR, 4)
WORDS = " ".join(TEXTS).split()
ROLES = ("user", "assistant")


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


@pytest.fixture
def prompts(tokenizer: Tokenizer) -> Iterator[Prompts]:
    with closing(Prompts(tokenizer, max_bytes=2**24)) as prompts:
        yield prompts


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": ROLES[at % 2], "content": text} for at, text in enumerate(texts)]}


def sentence(words: int, chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=words))


async def known(
    prompts: Prompts,
    body: Mapping[str, Any],
    *,
    kind: Kind = "chat",
    domain: str | None = "a",
    scheme: HashScheme | None = SCHEME,
    salt: str | None = "salt",
    adapter: Adapter | None = None,
) -> Known:
    """What is known of a body, once it was compared with what is computed from nothing."""
    found = await prompts.know(kind, orjson.dumps(body), body, domain=domain, scheme=scheme, salt=salt, adapter=adapter)
    expected = prompts.full(kind, body)
    assert found.ids() == expected
    assert found.tokens == len(expected)
    whole = hash_prompt(expected, scheme, salt=salt, adapter=adapter) if scheme is not None else None
    assert found.prefix == whole
    return found


# every tokenizer


@cache
def of_family(family: str, tokens: str, template: str = CHATML) -> Tokenizer:
    """A tokenizer whose texts are cut as often as they can be."""
    with TemporaryDirectory() as made:
        found = Tokenizer(folder(Path(made), family, tokens, template))
    found.cuts = replace(found.cuts, stride=8)
    return found


fragments = st.sampled_from([*_FRAGMENTS, *WORDS, *(token.content for token in TOKENS["odd"]), " ", "\n"])
texts = st.lists(fragments, max_size=24).map("".join)
edits = st.tuples(
    st.integers(0, 9), st.floats(0, 1), st.floats(0, 1), texts, st.sampled_from("aab"), st.sampled_from("xxy")
)


def edited(text: str, begin: float, end: float, new: str) -> str:
    """A text with something new in it: at its end, from a place on, or in its middle."""
    at = int(begin * (len(text) + 1))
    return text[:at] + new + text[max(at, int(end * 1.5 * (len(text) + 1))) :]


@contextmanager
def suppress_failures() -> Iterator[None]:
    """Bear that the tokenizers library cannot encode a text, as where two odd tokens want the same white space."""
    try:
        yield
    except Inexact as error:
        if error.reason != "tokenizer":
            raise


@settings(max_examples=150, deadline=None)
@given(
    family=st.sampled_from([*BYTE_LEVEL, *OTHERS]),
    tokens=st.sampled_from(list(TOKENS)),
    steps=st.lists(edits, min_size=2, max_size=8),
    special=st.booleans(),
    max_bytes=st.sampled_from([0, 4_000, 2**24]),
)
def test_what_is_remembered_changes_nothing(
    family: str, tokens: str, steps: Sequence[Any], special: bool, max_bytes: int
) -> None:
    async def run() -> None:
        seen = [""]
        with closing(Prompts(of_family(family, tokens), max_bytes=max_bytes)) as prompts:
            for source, begin, end, new, domain, salt in steps:
                text = edited(seen[source % len(seen)], begin, end, new)
                seen.append(text)
                body = {"prompt": text, "add_special_tokens": special}
                with suppress_failures():
                    await known(prompts, body, kind="completion", domain=domain, salt=salt)
                assert prompts.held_bytes <= max_bytes

    asyncio.run(run())


@settings(max_examples=30, deadline=None)
@given(
    family=st.sampled_from([*BYTE_LEVEL, *OTHERS]),
    template=st.sampled_from([CHATML, PLAIN]),
    conversation=st.lists(texts, min_size=1, max_size=8),
)
def test_conversations_that_grow(family: str, template: str, conversation: Sequence[str]) -> None:
    async def run() -> None:
        with closing(Prompts(of_family(family, "plain", template), max_bytes=2**24)) as prompts:
            for turn in range(len(conversation)):
                await known(prompts, chat(*conversation[: turn + 1]))

    asyncio.run(run())


@pytest.mark.parametrize("template", [CHATML, PLAIN], ids=["chatml", "plain"])
@pytest.mark.parametrize("family", BYTE_LEVEL)
async def test_little_more_than_the_new_turn_is_encoded(family: str, template: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder(tmp_path, family, "plain", template))
    assert tokenizer.cuts.within
    chance = random.Random(1)
    with closing(Prompts(tokenizer, max_bytes=2**24)) as prompts:
        conversation: list[str] = []
        before = 0
        for _ in range(6):
            conversation.append(sentence(chance.choice([3, 100, 700]), chance))
            found = await known(prompts, chat(*conversation))
            assert found.encoded <= found.tokens - before + 512
            before = found.tokens


@pytest.mark.parametrize("family", BYTE_LEVEL)
async def test_also_where_one_message_grows(family: str, tmp_path: Path) -> None:
    chance = random.Random(2)
    with closing(Prompts(Tokenizer(folder(tmp_path, family, "plain")), max_bytes=2**24)) as prompts:
        message = ""
        before = 0
        for _ in range(6):
            message += sentence(300, chance) + "  \n"
            found = await known(prompts, chat(message))
            assert found.encoded <= found.tokens - before + 512
            before = found.tokens


@pytest.mark.parametrize("family", ["llama-2", "metaspace first", "unigram", "wordpiece"])
async def test_others_go_on_at_the_last_turn(family: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder(tmp_path, family, "plain"))
    assert (tokenizer.cuts.before, tokenizer.cuts.within) == (True, False)
    chance = random.Random(3)
    with closing(Prompts(tokenizer, max_bytes=2**24)) as prompts:
        conversation = [sentence(200, chance) for _ in range(10)]
        whole = await known(prompts, chat(*conversation))
        found = await known(prompts, chat(*conversation, "and?"))
    assert whole.encoded == whole.tokens
    assert found.encoded < whole.tokens / 8


# what is shared, and what is not


async def test_a_prompt_that_is_known_is_hardly_encoded(prompts: Prompts) -> None:
    body = chat(*(sentence(500, random.Random(turn)) for turn in range(8)))

    first, again = await known(prompts, body), await known(prompts, body)

    assert first.encoded == first.tokens > 4000
    assert again.encoded < 512


@pytest.mark.parametrize(
    "other",
    [{"domain": "b"}, {"domain": None}, {"salt": "another"}, {"salt": None}, {"adapter": Adapter("l", "/l")},
     {"scheme": None}, {"scheme": replace(SCHEME, block_size=8)}],
    ids=repr,
)  # fmt: skip
async def test_nothing_is_shared_between_chains(prompts: Prompts, other: dict[str, Any]) -> None:
    body = chat(sentence(2000, random.Random(4)))
    await known(prompts, body)

    found = await known(prompts, body, **other)

    assert found.encoded == found.tokens


async def test_special_tokens_are_part_of_the_chain(prompts: Prompts) -> None:
    text = sentence(500, random.Random(5))
    for special in (True, False, True, False):
        await known(prompts, {"prompt": text, "add_special_tokens": special}, kind="completion")


async def test_blocks_of_one_token(prompts: Prompts) -> None:
    scheme = replace(SCHEME, block_size=1)
    for words in (10, 300, 400):
        await known(prompts, {"prompt": sentence(words, random.Random(6))}, kind="completion", scheme=scheme)


# ids


async def test_ids_are_hashed_on_from_where_they_are_known(prompts: Prompts) -> None:
    ids = [random.Random(7).randrange(400) for _ in range(3000)]
    for end in (1000, 2000, 2100, 3000, 1500):
        body = {"prompt": [*ids[:end], 1, 2, 3]}
        found = await known(prompts, body, kind="completion")
        assert found.encoded == 0


@pytest.mark.parametrize("odd", [-1, 2**32, 2**70])
async def test_ids_that_cannot_be(prompts: Prompts, odd: int) -> None:
    body = {"prompt": [1, odd, 3]}
    found = await prompts.know("completion", b"", body, domain=None, scheme=SCHEME, salt=None, adapter=None)
    assert found.ids() == [1, odd, 3]


# what cannot be known


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        ("completion", {"prompt": ["a", "b"]}, "several_prompts"),
        ("completion", {"prompt": "\ud800"}, "surrogate"),
        ("chat", {"messages": []}, "messages"),
    ],
)
async def test_what_cannot_be_known_says_why(prompts: Prompts, kind: Kind, body: dict[str, Any], reason: str) -> None:
    with pytest.raises(Inexact, match=reason):
        await prompts.know(kind, b"", body, domain=None, scheme=None, salt=None, adapter=None)


async def test_a_tokenizer_that_draws_lots_is_not_believed(tmp_path: Path) -> None:
    path = folder(tmp_path, "gpt-2", "plain") / "tokenizer.json"
    file = orjson.loads(path.read_bytes())
    file["model"]["dropout"] = 0.1
    path.write_bytes(orjson.dumps(file))
    with closing(Prompts(Tokenizer(tmp_path), max_bytes=2**20)) as prompts:
        for body in (chat("hi"), chat("hi" * INLINE_BYTES)):
            with pytest.raises(Inexact, match="dropout"):
                await prompts.know("chat", orjson.dumps(body), body, domain=None, scheme=None, salt=None, adapter=None)
        assert await known(prompts, {"prompt": [1, 2, 3]}, kind="completion")


# large ones


async def test_large_chats_are_rendered_elsewhere_once_that_is_ready(prompts: Prompts) -> None:
    bodies = [chat("\u00e9 " + sentence(5000, random.Random(seed)), "yes", "go on") for seed in range(3)]
    await known(prompts, bodies[0])
    while not prompts._rendering.ready:  # noqa: ASYNC110 - it is another process that is waited for
        await asyncio.sleep(0.05)
    for body in bodies:
        await known(prompts, body)


async def test_a_clients_own_template_runs_elsewhere_and_not_for_ever(model_folder: Path) -> None:
    tokenizer = Tokenizer(model_folder, Rules(trust_request_template=True))
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with closing(Prompts(tokenizer, max_bytes=2**20)) as prompts:
        prompts._rendering = Rendering(tokenizer.chats, seconds=0.5)

        async def asked(template: str) -> Known:
            body = chat("hi") | {"chat_template": template}
            return await prompts.know(
                "chat", orjson.dumps(body), body, domain=None, scheme=SCHEME, salt=None, adapter=None
            )

        with pytest.raises(Inexact, match="chat_template"):
            await asked("hello")
        while not prompts._rendering.ready:  # noqa: ASYNC110 - it is another process that is waited for
            await asyncio.sleep(0.05)
        assert (await asked("hello")).ids() == tokenizer.completion({"prompt": "hello", "add_special_tokens": False})
        with pytest.raises(Inexact, match="renderer_died"):
            await asked(endless)
        assert (await known(prompts, chat("hi"))).tokens > 1


async def test_equal_prompts_at_the_same_time(prompts: Prompts) -> None:
    body = {"prompt": sentence(6000, random.Random(8))}
    found = await asyncio.gather(*(known(prompts, body, kind="completion") for _ in range(3)))
    assert [each.encoded for each in found] == [found[0].tokens] * 3
    assert (await known(prompts, body, kind="completion")).encoded < 512


async def test_what_was_known_stays_true_while_others_go_on(prompts: Prompts) -> None:
    chance = random.Random(9)
    parts = [sentence(400, chance) for _ in range(4)]
    first = await known(prompts, {"prompt": parts[0] + " " + parts[1]}, kind="completion")
    again = await known(prompts, {"prompt": parts[0] + " " + parts[1]}, kind="completion")
    ids = first.ids()
    for text in (f"{parts[0]} {parts[1]} {parts[2]}", f"{parts[0]} {parts[3]}"):
        await known(prompts, {"prompt": text}, kind="completion")
    assert first.ids() == again.ids() == ids


# the bound


async def distinct(prompts: Prompts, count: int, bound: int) -> None:
    """So many conversations of several tenants, each with two turns, and nothing in common."""
    chance = random.Random(10)
    for number in range(count):
        body = {"prompt": f"{number} {sentence(25, chance)}"}
        for _ in range(2):
            body["prompt"] += " " + sentence(25, chance)
            await prompts.know("completion", b"", body, domain=str(number % 7), scheme=SCHEME, salt=None, adapter=None)
            assert prompts.held_bytes <= bound


def test_what_is_remembered_stays_within_its_bound(tokenizer: Tokenizer) -> None:
    bound = 500_000
    with closing(Prompts(tokenizer, max_bytes=bound)) as prompts:
        asyncio.run(distinct(prompts, 100, bound))
        gc.collect()
        tracemalloc.start()
        asyncio.run(distinct(prompts, 3000, bound))
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert prompts.held_bytes > 0.9 * bound
        assert 0.75 < prompts.held_bytes / taken < 1.3


@pytest.mark.long
def test_so_does_the_process(tokenizer: Tokenizer) -> None:
    bound = 50_000_000
    with closing(Prompts(tokenizer, max_bytes=bound)) as prompts:
        before = resident()
        asyncio.run(distinct(prompts, 20_000, bound))
        filled = resident()
        asyncio.run(distinct(prompts, 80_000, bound))
        assert prompts.held_bytes > 0.9 * bound
        assert filled - before < 1.5 * bound
        assert resident() - filled < 0.3 * bound


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("kwargs", [{"chat_template": "x"}, {"chat_template": None}, None, 1], ids=repr)
def test_a_template_among_the_variables_is_a_clients_too(model_folder: Path, kwargs: object) -> None:
    brings = isinstance(kwargs, dict) and kwargs["chat_template"] is not None
    for trusted in (True, False):
        with closing(Prompts(Tokenizer(model_folder, Rules(trust_request_template=trusted)), max_bytes=0)) as prompts:
            body = chat("hi") | {"chat_template_kwargs": kwargs}
            assert prompts._brings_template("chat", body) is (trusted and brings)
