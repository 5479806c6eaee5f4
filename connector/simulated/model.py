"""A model folder without weights, for engines that compute nothing.

Its tokenizer is a byte-level BPE, trained in about a second on the text of this project's own
modules and of those of the standard library that it uses most; the same Python and the same project
give the same files.
"""

import argparse
import asyncio
import collections
import dataclasses
import hashlib
import json
import logging
import pathlib
import typing
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

NAME = "moongate-sim"
VOCABULARY = 4096
CONTEXT = 32_768
BEGIN, END, TURN, TURN_END = "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"
_TEXT_BYTES = 600_000
_SOURCES = (argparse, asyncio, collections, dataclasses, hashlib, json, logging, pathlib, typing)

TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'Call one with {"name": ..., "arguments": ...} between <tool_call> and </tool_call>.' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": ' + call.function.name | tojson }}
            {{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make(folder: Path) -> Path:
    """Write the model's files into a folder, which is made; answer it. Files that are there are replaced.

    The folder's name is part of every key in the pool: engines that shall share blocks need the
    same one, `NAME` by custom.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _trained()
    tokenizer.save(str(folder / "tokenizer.json"))
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": END,
            "additional_special_tokens": [TURN, TURN_END],
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
        },
    )
    _write(
        folder / "config.json",
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCABULARY,
            "max_position_embeddings": CONTEXT,
            "bos_token_id": begin,
            "eos_token_id": end,
        },
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END, TURN, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def _texts() -> Iterator[str]:
    """The project's own connectors, then pieces of the standard library, in a fixed order."""
    left = _TEXT_BYTES
    own = sorted(Path(__file__).parents[1].rglob("*.py"))
    library = [path for module in _SOURCES for path in sorted(Path(module.__file__ or "").parent.glob("*.py"))]
    for path in dict.fromkeys(own + library):
        text = path.read_text(encoding="utf-8", errors="replace")[:left]
        left -= len(text)
        yield text
        if left <= 0:
            return


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
