r"""Where a text can be cut so that its token ids are those of its pieces, one after the other.

Two kinds of places are certain from what a tokenizer is made of. Sources are those of the tokenizers
library (added_vocabulary.rs, pre_tokenizers) and its documentation.

Before a token. Added tokens that are not normalized are found first, in the raw text, leftmost and
longest; all else happens within what lies between them. So a text can be cut where one begins, if
nothing that is found before it can reach into it, and if it takes no part of what stands before it:
`_apart` says it exactly.

Within a text, for byte-level BPE only. Merges stay within words, and words come from a regular
expression. A word that holds a letter or a digit ends before a space, line break, comma or double quote,
whatever stands around, if every alternative of the expression is one of `_ALTERNATIVES`: none matches a
letter or a digit with one of these behind it, none looks back, and none looks ahead but from white
space. NFC changes nothing across such a place. The same is true between a Chinese, Japanese or Korean
letter and a full stop or comma of theirs.

A tokenizer may still hold what was not thought of: `tried` cuts random texts and compares. What fails
there is not used, which costs time and never exactness.
"""

import json
import logging
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

log = logging.getLogger("moongate")

STRIDE = 256
"""Bytes between two cuts at least: encoding begins again at most so far, and one clause, before what is new."""
REACH = 1024 * 1024
"""Bytes in which a cut is looked for; a text with none in so many is encoded to its end."""
LONGEST = 128
"""Bytes of a token that is cut before; longer ones are not."""


_WEST = rb"[A-Za-z0-9]"
_NEAR = (
    rb"\xc3[\x80-\x96\x98-\xb6\xb8-\xbf]|\xce[\x91-\xa1\xa3-\xbf]|\xcf[\x80-\xb5]|[\xd0-\xd1][\x80-\xbf]|"
    rb"\xd7[\x90-\xaa]|\xd8[\xa7-\xba]|\xd9[\x81-\x8a]"
)
"""Letters of two bytes in UTF-8: Latin, Greek, Cyrillic, Hebrew, Arabic."""
_EAST = rb"[\xe5-\xe8][\x80-\xbf][\x80-\xbf]|[\xeb-\xec][\x80-\xbf][\x80-\xbf]|\xe3\x81[\x82-\xbf]|\xe3\x83[\x80-\xba]"
"""Letters of three: most ideographs and Hangul syllables, kana."""
_BEHIND = {
    " ": (_WEST, _NEAR, _EAST),
    "\n": (_WEST, _NEAR, _EAST),
    ",": (_WEST,),
    '"': (_WEST,),
    "。": (_EAST,),
    "\uff0c": (_EAST,),
}
"""What stands behind a cut, and before it."""
_WITHIN = tuple(
    b"%b(?<=(?:%b)%b)" % (mark.encode(), letters, b"." * len(mark.encode()))
    for mark, before in _BEHIND.items()
    for letters in before
)
"""Literals come first in each: they are searched for fast."""

_LETTERS = (
    (r" ?\p{L}+",),
    (r"[^\r\n\p{L}\p{N}]?\p{L}+",),
    (r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",),
    (r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    ),
)
"""Alternatives that together take every letter."""
_DIGITS = (r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r" ?\p{N}+")
"""Alternatives of which each takes every digit."""
_ALTERNATIVES = frozenset(
    {
        *(alternative for together in _LETTERS for alternative in together),
        *_DIGITS,
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'(?:[sdmt]|ll|ve|re)", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
        *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
    }
)
"""Of GPT-2, cl100k and Llama 3, o200k and Llama 4, Qwen, DeepSeek, tekken and the like."""


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """The places where one tokenizer's texts can be cut, in UTF-8."""

    before: bool
    """Whether they are cut before added tokens."""
    within: bool
    """Whether they are cut within what lies between."""
    places: re.Pattern[bytes]
    """Begins at each place, and ends where it is certain."""
    stride: int = STRIDE
    """Bytes between two of them at least, of those that are used."""

    def after(self, text: bytes, at: int) -> int | None:
        """The cut that follows another, or the text's beginning; None where the rest is one piece."""
        begin = at + self.stride
        found = self.places.search(text, begin, begin + REACH)
        return found.start() if found is not None else None

    def holds(self, text: bytes, at: int) -> bool:
        """Whether a text can be cut here."""
        return self.places.match(text, at) is not None


def cuts_of(backend: Backend) -> Cuts:
    """Where a tokenizer's texts can be cut, tried on random texts."""
    added = list(backend.get_added_tokens_decoder().values())
    apart = [] if backend.encode_special_tokens else _apart(added)
    within = _splits_words(backend) and _leaves_words(added, backend)
    for cuts in (_cuts(apart, within=within), _cuts(apart, within=False)):
        if tried(backend, cuts, added):
            return cuts
        log.debug("a tokenizer cannot be cut as it seemed: before tokens %s, within %s", cuts.before, cuts.within)
    return _cuts([], within=False)


def _cuts(apart: Sequence[str], *, within: bool) -> Cuts:
    alternatives = [*_any_of([token.encode() for token in apart]), *(_WITHIN if within else ())]
    return Cuts(bool(apart), within, re.compile(b"|".join(alternatives) or b"(?!)", re.DOTALL))


def _any_of(tokens: Sequence[bytes]) -> list[bytes]:
    """Regular expressions, each with a first byte of its own, that together find the shortest token at a place."""
    rests: dict[bytes, list[bytes]] = {}
    for token in tokens:
        rests.setdefault(token[:1], []).append(token[1:])
    return [
        re.escape(first) + (b"" if b"" in rest else b"(?:%b)" % b"|".join(_any_of(rest)))
        for first, rest in rests.items()
    ]


def _apart(added: Sequence[AddedToken]) -> list[str]:
    """The added tokens before which every text can be cut, whatever stands there."""
    raw = [token for token in added if not token.normalized and token.content]
    suffixes = {token.content[at:] for token in raw for at in range(1, len(token.content))}
    inner = "\0".join(token.content[1:] for token in raw)
    taking = [token.content for token in raw if token.lstrip or token.single_word]
    wordless = any(token.single_word for token in added)
    return [
        token.content
        for token in raw
        if not token.lstrip
        and not token.single_word
        and not token.content[0].isspace()
        and not (wordless and (token.content[0].isalnum() or token.content[0] == "_" or not token.content.isascii()))
        and "\0" not in token.content
        and len(token.content.encode()) <= LONGEST
        and token.content not in inner
        and suffixes.isdisjoint(token.content[:end] for end in range(1, len(token.content) + 1))
        and not any(content.startswith(token.content) for content in taking)
    ]


def _splits_words(backend: Backend) -> bool:
    """Whether a tokenizer is byte-level BPE whose words end between a letter and white space."""
    if not isinstance(backend.model, BPE):
        return False
    normalizer = _state(backend.normalizer)
    if any(part["type"] != "NFC" for part in _parts(normalizer, "normalizers")):
        return False
    parts = _parts(_state(backend.pre_tokenizer), "pretokenizers")
    if not parts or parts[-1]["type"] != "ByteLevel" or parts[-1]["add_prefix_space"]:
        return False
    found: set[str] = set()
    for part in parts[:-1]:
        if part["type"] == "Digits":
            found.add(r"\p{N}")
        elif part["type"] == "Split" and (part["behavior"], part["invert"]) in (("Isolated", False), ("Removed", True)):
            found |= set(_alternatives(part["pattern"].get("Regex", "")))
        else:
            return False
    if parts[-1]["use_regex"]:
        found |= {r" ?\p{L}+", r" ?\p{N}+"}
    letters = any(found.issuperset(together) for together in _LETTERS)
    return letters and not found.isdisjoint(_DIGITS) and found <= _ALTERNATIVES


def _alternatives(expression: str) -> list[str]:
    """The alternatives at the top of a regular expression."""
    found, depth, grouped, escaped = [""], 0, False, False
    for letter in expression:
        if letter == "|" and not depth and not grouped and not escaped:
            found.append("")
            continue
        found[-1] += letter
        if not escaped:
            depth += (letter == "(") - (letter == ")") if not grouped else 0
            grouped = letter == "[" or (grouped and letter != "]")
        escaped = letter == "\\" and not escaped
    return found


def _leaves_words(added: Sequence[AddedToken], backend: Backend) -> bool:
    """Whether no added token reaches over, or minds, the places within a text."""
    places = re.compile(b"|".join(_WITHIN), re.DOTALL)
    ends = re.compile(rb"(?:%b|%b|%b)\Z" % (_WEST, _NEAR, _EAST), re.DOTALL)
    for token in added:
        forms = {token.content}
        if backend.normalizer is not None:
            forms.add(backend.normalizer.normalize_str(token.content))
        for form in forms:
            raw = form.encode()
            if places.search(raw) or (token.rstrip and ends.search(raw)):
                return False
            if token.single_word and form.startswith(tuple(_BEHIND)):
                return False
    return True


def _state(component: Any) -> Mapping[str, Any] | None:
    """A part of a tokenizer as its file has it."""
    if component is None:
        return None
    state: Mapping[str, Any] = json.loads(component.__getstate__())
    return state


def _parts(state: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """A part, or the parts of a sequence, in order."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [part for each in state[inner] for part in _parts(each, inner)]


_FRAGMENTS = (
    *(" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", " \n ", "\u200d", "\u0301", "\u0338", "\u3099"),
    *("word", "Word", "WORDS", "naïve", "e\u0301", "I'll", "it's", "'s", "'", "’", "ſ", "x", "A"),  # noqa: RUF001
    *("1", "12", "12345", "½", "²", "٣", ".", ",", "!?", "...", "/", "_", "-", "(", "a/b", "#!"),
    *("漢字", "かな", "カナ", "が", "한국어", "\u1112\u1161\u11ab", "。", "，", "、", "русский", "العربية", "हिन्दी"),  # noqa: RUF001
    *(
        "a, b",
        '"a"',
        '{"a":1,"b":"c"}',
        '"',
        "1,2",
        "слово ",
        "λέξη\n",
        "كلمة ",
        "מילה ",
        "ÿ ",
        "\u00d7 ",
        "÷ ",
        "=\u0338",
        ",\u0338",
    ),
    *("🙂", "👩‍👩‍👧", "▁", "▁a", "<", "<|", "|>", "[", "\0", "\ufffd", "\u212a", "ﬁ"),
)
_TRIED = 300
"""Texts; some 30 ms."""


def tried(backend: Backend, cuts: Cuts, added: Sequence[AddedToken]) -> bool:
    """Whether random texts, cut at every place, have the ids of their pieces."""
    chance = random.Random(0)  # noqa: S311 - repeatable, not secret
    tokens = [token.content for token in added]
    texts = [_text(chance, tokens) for _ in range(_TRIED)]
    pieces = [list(_pieces(text, cuts)) for text in texts]
    try:
        wholes = backend.encode_batch_fast(texts, add_special_tokens=False)
        parts = iter(backend.encode_batch_fast([part for each in pieces for part in each], add_special_tokens=False))
    except BaseException as error:  # whose own kinds are Exception, and for a panic one beside it
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            return False
        raise
    return all(
        whole.ids == [token for _ in each for token in next(parts).ids]
        for whole, each in zip(wholes, pieces, strict=True)
    )


def _text(chance: random.Random, tokens: Sequence[str]) -> str:
    fragments = chance.choices(_FRAGMENTS, k=chance.randint(1, 16))
    if tokens:
        for token in chance.choices(tokens, k=chance.randint(0, 5)):
            fragments.insert(chance.randrange(len(fragments) + 1), chance.choice((token, token, token[:-1], token[1:])))
    return "".join(fragments)


def _pieces(text: str, cuts: Cuts) -> Iterator[str]:
    raw = text.encode()
    begin = 0
    for place in cuts.places.finditer(raw):
        if place.start():
            yield raw[begin : place.start()].decode()
            begin = place.start()
    yield raw[begin:].decode()
