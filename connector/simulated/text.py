"""What a simulated engine says: words, the same for the same prompt.

Each word is one token, and the text of any row of words encodes to the very ids that were
"generated". So the next turn's prompt, which holds the answer as text, continues the blocks that the
engine has computed, as a real model's answer mostly does.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

from connector.errors import ConnectorError

VOCABULARY = 256
"""Words that an engine knows, at most."""
REMEMBERED = 64
"""How many of the prompt's last tokens shape the answer."""
SHORTEST, LONGEST = 24, 400
"""Tokens after which an answer ends of its own, unless it is told not to."""


class NoWords(ConnectorError):
    """The tokenizer has no words that survive a round trip."""


@dataclass(frozen=True, slots=True)
class Word:
    token: int
    text: str


class Saying(Protocol):
    """An answer, word by word."""

    @property
    def length(self) -> int:
        """Words before the end."""

    def word(self, position: int) -> Word: ...


class Voice:
    """The words of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, seed: int = 0) -> None:
        """Raises `NoWords`."""
        self._seed = seed
        first = _words(tokenizer, r"[A-Za-z]{2,}", None)
        if not first:
            raise NoWords("no token of this tokenizer is a word that begins a text")
        self._rest = _words(tokenizer, r" [A-Za-z]{2,}", first[0])
        if not self._rest:
            raise NoWords("no token of this tokenizer is a word that goes on")
        self._first = tuple(word for word in first if _faithful(tokenizer, (word, self._rest[0])))
        if not self._first or not _faithful(tokenizer, (self._first[0], *self._rest)):
            raise NoWords("this tokenizer joins words across the space between them")

    def answer(self, prompt: Sequence[int], choice: int = 0) -> "Answer":
        """What is said to this prompt; another `choice` is another answer."""
        tail = ",".join(map(str, prompt[-REMEMBERED:]))
        return Answer(self._first, self._rest, f"{self._seed}/{choice}/{tail}".encode())


class Answer:
    """One answer, word by word."""

    def __init__(self, first: Sequence[Word], rest: Sequence[Word], origin: bytes) -> None:
        self._first = first
        self._rest = rest
        self._origin = hashlib.blake2b(origin, digest_size=16)
        self.length = SHORTEST + self._draw(b"length") % (LONGEST - SHORTEST + 1)
        """Words before the end."""

    def word(self, position: int) -> Word:
        known = self._rest if position else self._first
        return known[self._draw(position.to_bytes(8, "big")) % len(known)]

    def _draw(self, what: bytes) -> int:
        drawn = self._origin.copy()
        drawn.update(what)
        return int.from_bytes(drawn.digest()[:8], "big")


def _words(tokenizer: Tokenizer, shape: str, before: Word | None) -> tuple[Word, ...]:
    """The tokens of a shape that come back as themselves, alone or behind a word and behind one another."""
    found: list[Word] = []
    for token in range(tokenizer.get_vocab_size()):
        said: str = tokenizer.decode([token] if before is None else [before.token, token])
        word = Word(token, said if before is None else said.removeprefix(before.text))
        row = (word,) if before is None else (before, word, word)
        if re.fullmatch(shape, word.text) and _faithful(tokenizer, row):
            found.append(word)
        if len(found) == VOCABULARY:
            break
    return tuple(found)


def _faithful(tokenizer: Tokenizer, row: Sequence[Word]) -> bool:
    """Whether the text of these words encodes to their ids."""
    ids: list[int] = tokenizer.encode("".join(word.text for word in row), add_special_tokens=False).ids
    return ids == [word.token for word in row]
