"""A tokenizer, and a street of doubles and gateways for each test."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from tests.gateway.house import Street

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of some 300 tokens with a chat template."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = Decoder()
    texts = ["the engine loads a block of the prefix from the pool", "a gateway tells the story, policies think"]
    backend.train_from_iterator(
        texts, BpeTrainer(vocab_size=300, initial_alphabet=ByteLevel.alphabet(), special_tokens=["<|end|>"])
    )
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")  # type: ignore[no-untyped-call]
    fast.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
async def street() -> AsyncIterator[Street]:
    async with AsyncExitStack() as stack:
        yield Street(stack)
