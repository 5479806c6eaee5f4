"""Both event loops for every test that awaits, and a small model's tokenizer.

uvloop's transports are no asyncio.Transport: what works on one loop need not work on the other.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


BEGIN, END, TURN, TURN_END = "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = """\
{{- bos_token }}
{%- if tools %}{{- '# Tools' }}{% for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}{{- '\\n' }}{%- endif %}
{%- if effort is defined %}{{- 'effort=' + effort + '\\n' }}{%- endif %}
{%- if reasoning_effort is defined %}{{- 'reasoning_effort=' + reasoning_effort + '\\n' }}{%- endif %}
{%- if enable_thinking is defined %}{{- 'thinking=' + enable_thinking | string + '\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.name is defined %}{{- ' name=' + message.name }}{%- endif %}
    {%- if message.tool_call_id is defined %}{{- ' id=' + message.tool_call_id | string }}{%- endif %}
    {{- '\\n' }}
    {%- if message.reasoning is defined %}{{- '<think>' + message.reasoning + '</think>' }}{%- endif %}
    {%- if message.reasoning_content is defined %}{{- '<same>' + message.reasoning_content + '</same>' }}{%- endif %}
    {{- message.content }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- '<call>' + call.function.name }}
            {%- for name, value in call.function.arguments.items() %}
                {{- ' ' + name + '=' + value | string }}
            {%- endfor %}
            {{- '</call>' }}
        {%- else %}
            {{- '<no calls>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
SENTENCES = (
    "Moongate places each request on the engine that will answer soonest for the least work.",
    "A block in the pool is usable only if the object of every rank is there.",
    "assistant user system tool name content arguments function parameters description",
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a tokenizer: a small byte-level BPE that begins texts with a token of its own."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=[BEGIN, END, TURN, TURN_END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    tokenizer.enable_truncation(8)  # a folder may bring either along; the engine heeds neither
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "model_max_length": 64,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
