"""What is known of a prompt."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from connector.blocks import Algorithm, HashScheme, hash_prompt
from connector.errors import Inexact
from connector.prompts import Prompts
from connector.tokens import Tokenizer

SCHEME = HashScheme(Algorithm.SHA256_CBOR, 4)
TEXT = "A block in the pool is usable only if the object of every rank is there. "


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]}


@pytest.mark.parametrize("times", [1, 1000])
async def test_ids_and_hashes_are_those_of_the_whole(tokenizer: Tokenizer, times: int) -> None:
    prompts = Prompts(tokenizer, max_bytes=2**20)
    body = chat(TEXT * times, "and", "then")

    known = await prompts.know("chat", orjson.dumps(body), body, domain="a", scheme=SCHEME, salt="salt", adapter=None)

    assert known.ids() == prompts.full("chat", body)
    assert known.tokens == len(known.ids())
    assert known.prefix == hash_prompt(known.ids(), SCHEME, salt="salt")


async def test_without_a_scheme_there_are_no_hashes(tokenizer: Tokenizer) -> None:
    prompts = Prompts(tokenizer, max_bytes=2**20)
    body = {"prompt": TEXT}

    known = await prompts.know(
        "completion", orjson.dumps(body), body, domain=None, scheme=None, salt=None, adapter=None
    )

    assert known.prefix is None
    assert known.ids() == prompts.full("completion", body)


async def test_what_cannot_be_known_says_why(tokenizer: Tokenizer) -> None:
    prompts = Prompts(tokenizer, max_bytes=2**20)
    body = {"prompt": ["a", "b"]}

    with pytest.raises(Inexact, match="several_prompts"):
        await prompts.know("completion", orjson.dumps(body), body, domain=None, scheme=None, salt=None, adapter=None)
