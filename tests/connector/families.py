"""Small tokenizers of every family, trained here in a moment, each with a chat template."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

BEGIN, END, TURN, TURN_END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.values() | join }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A template without special tokens."""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = TEKKEN.replace(r"\p{M}]+|", r"\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|", 1)
O200K = O200K.replace(r"\p{M}]*|", r"\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|", 1).replace(r"|\p{N}|", r"|\p{N}{1,3}|")
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+".replace('\\"', '"'),
)

TEXTS = (
    "Moongate places each request on the engine that will answer soonest for the least work.",
    "A block in the pool is usable only if the object of every rank is there. 12345 tokens, it's 3.14 or so!",
    "assistant user system tool name content arguments function parameters description\n\n    return value",
    "漢字とかな、カナ。한국어 русский naïve café l'été",
)


def _split(*patterns: str, behavior: str = "isolated", invert: bool = False) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior, invert) for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _bytes(pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre
    if normalizer is not None:
        made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def _pieces(kind: str, pre: pre_tokenizers.PreTokenizer | None, normalizer: normalizers.Normalizer | None) -> Tokenizer:
    """SentencePiece's way: a space is a letter, and what is not in the vocabulary goes by bytes."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    learning = Tokenizer(models.BPE() if kind == "bpe" else models.Unigram())
    learning.pre_tokenizer = pre if pre is not None else pre_tokenizers.Metaspace(prepend_scheme="first")
    if kind == "unigram":
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
        learning.train_from_iterator(TEXTS * 3, trainer)
        made = learning
    else:
        learning.train_from_iterator(
            TEXTS * 3, trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *fallback], show_progress=False)
        )
        learned = json.loads(learning.to_str())["model"]
        merges = [(a, b) for a, b in learned["merges"]]
        made = Tokenizer(models.BPE(learned["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        if pre is not None:
            made.pre_tokenizer = pre
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def _words() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(
        TEXTS * 3, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    made.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return made


_LEGACY = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])

BYTE_LEVEL: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: _bytes(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama-3": lambda: _bytes(_split(LLAMA3)),
    "qwen-2": lambda: _bytes(_split(QWEN), normalizers.NFC()),
    "qwen-3.5": lambda: _bytes(_split(QWEN3_5), normalizers.NFC()),
    "tekken": lambda: _bytes(_split(TEKKEN)),
    "o200k": lambda: _bytes(_split(O200K, behavior="removed", invert=True)),
    "deepseek": lambda: _bytes(_split(*DEEPSEEK), normalizers.Sequence([])),
    "starcoder": lambda: _bytes(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
}
"""Those whose texts can be cut anywhere between words."""
OTHERS: dict[str, Callable[[], Tokenizer]] = {
    "llama-2": lambda: _pieces("bpe", None, _LEGACY),
    "metaspace first": lambda: _pieces("bpe", pre_tokenizers.Metaspace(prepend_scheme="first"), None),
    "metaspace first, whole": lambda: _pieces(
        "bpe", pre_tokenizers.Metaspace(prepend_scheme="first", split=False), None
    ),
    "metaspace always": lambda: _pieces("bpe", pre_tokenizers.Metaspace(prepend_scheme="always"), None),
    "metaspace never": lambda: _pieces("bpe", pre_tokenizers.Metaspace(prepend_scheme="never"), None),
    "unigram": lambda: _pieces("unigram", pre_tokenizers.Metaspace(prepend_scheme="always"), normalizers.NFKC()),
    "wordpiece": _words,
    "a space before": lambda: _bytes(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "unknown words": lambda: _bytes(_split(r"\w+ \w+|\s+|.")),
    "lower case": lambda: _bytes(_split(LLAMA3), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
}

_FLAGS = list(product((False, True), repeat=5))
PLAIN_TOKENS = (
    *(AddedToken(content, normalized=False, special=True) for content in (BEGIN, END, TURN, TURN_END)),
    AddedToken("<tool_call>", normalized=False),
)
ODD_TOKENS = (
    *PLAIN_TOKENS,
    *(
        AddedToken(
            content + "".join("lrnws"[at] if flag else "-" for at, flag in enumerate(flags)) + end,
            lstrip=flags[0], rstrip=flags[1], normalized=flags[2], single_word=flags[3], special=flags[4],
        )
        for content, end in (("<", ">"), ("a", "b"))
        for flags in _FLAGS
    ),
    *(AddedToken(content, normalized=False) for content in ("<|", "<|im", "|im_end|", "|><", "<aa", "aa<aa")),
    *(AddedToken(content, normalized=False) for content in ("b c", "\n\n")),
    *(AddedToken(content, normalized=True) for content in ("<|x", "engine loads", "é", "\u212a k")),
    *(AddedToken(content, normalized=False, single_word=True) for content in (" solo", "<|im_st", "。", "solo")),
    *(AddedToken(content, normalized=False, rstrip=True) for content in ("keep", "<keep>", "漢")),
    *(AddedToken(content, normalized=False, lstrip=True) for content in (" <l>", "<|im_start|>x")),
)  # fmt: skip
"""Every combination of what an added token can be, and some that reach into each other."""
TOKENS: dict[str, Sequence[AddedToken]] = {
    "none": (),
    "plain": PLAIN_TOKENS,
    "odd": ODD_TOKENS,
    "of words": (*PLAIN_TOKENS, AddedToken("solo", normalized=False, single_word=True)),
    "greedy": (
        *PLAIN_TOKENS,
        *(AddedToken(f"<{n}>", lstrip=n % 2 == 0, rstrip=n > 1, normalized=False) for n in range(4)),
    ),
}


@cache
def made(family: str, tokens: str) -> str:
    """A tokenizer's file."""
    backend = (BYTE_LEVEL | OTHERS)[family]()
    plain = [token for token in TOKENS[tokens] if not token.special]
    backend.add_tokens(plain)
    backend.add_special_tokens([token for token in TOKENS[tokens] if token.special])
    begin = backend.token_to_id(BEGIN)
    if begin is not None and family != "wordpiece":
        backend.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)])
    file: str = backend.to_str()
    return file


def folder(at: Path, family: str, tokens: str, template: str = CHATML) -> Path:
    """A model's folder with such a tokenizer."""
    at.mkdir(parents=True, exist_ok=True)
    (at / "tokenizer.json").write_text(made(family, tokens))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN if tokens != "none" else None}
    (at / "tokenizer_config.json").write_text(json.dumps(config))
    (at / "chat_template.jinja").write_text(template)
    return at
