"""Make a tiny Llama-shaped model and its tokenizer, without any download.

    .venv-vllm/bin/python tests/real/make_model.py FOLDER [--template chatml|headers]

The weights are random, so the text is nonsense; but greedy nonsense is the same every time, which
is all that a test of caches and bytes needs. The tokenizer is a byte-level BPE trained on Python's
own standard library. Same Python, same files: the text is read in a fixed order and the weights
come from a fixed seed.

Both templates know system, user, assistant and tool messages, tools and tool calls. `chatml` takes
message content as a string; `headers` loops over content parts, which makes vLLM choose its
"openai" content format instead of "string".
"""

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
TEXT_BYTES = 2_000_000
BOS, EOS = "<|begin|>", "<|end|>"
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIAL = (BOS, EOS, TURN, TURN_END, *ROLES)

CHATML = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|><|system|>\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'Call one with {"name": ..., "arguments": ...} between <tool_call> and </tool_call>.' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|><|' + message.role + '|>\\n' }}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": ' + call.function.name | tojson }}
            {{- ', "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|><|assistant|>\\n' }}{%- endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- for tool in tools or [] %}
    {%- if loop.first %}{{- '<|system|>Tools:\\n' }}{%- endif %}
    {{- tool | tojson + '\\n' }}
    {%- if loop.last %}{{- '<|im_end|>' }}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content or [] %}
            {%- if part.type == 'text' %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + ' ' }}
        {{- call.function.arguments | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS}


def library_text() -> Iterator[str]:
    """The standard library's top-level modules, in order, up to TEXT_BYTES."""
    left = TEXT_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(library_text(), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        additional_special_tokens=[TURN, TURN_END, *ROLES],
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


def model(bos: int, eos: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        bos_token_id=bos,
        eos_token_id=eos,
        dtype=torch.float32,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--template", choices=TEMPLATES, default="chatml")
    arguments = parser.parse_args()
    words = tokenizer(TEMPLATES[arguments.template])
    words.save_pretrained(arguments.folder)
    weights = model(words.convert_tokens_to_ids(BOS), words.convert_tokens_to_ids(EOS))
    weights.save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
