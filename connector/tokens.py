"""Text to token ids, with the model's own tokenizer, in this process.

A chat's text is encoded without special tokens (its template writes them), a completion's prompt
with them, as vLLM does. Ids that a client sends are taken as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from connector.cuts import cuts_of
from connector.errors import ConnectorError, Inexact
from connector.render import NO_FLAGS, Rules, chat_text, renderer_of_its_own


class NoTokenizer(ConnectorError):
    """The folder holds no fast tokenizer."""


Kind = Literal["chat", "completion"]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt as text, in UTF-8, and whether special tokens are put around it."""

    data: bytes
    special: bool


@dataclass(frozen=True, slots=True)
class Frame:
    """The token ids that are put before and after any text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chats:
    """A model's chats to texts. It can be pickled, without a vocabulary."""

    template: Any
    rules: Rules
    elsewhere: bool
    """Whether engines render them in Python, without a template."""

    def __call__(self, body: Mapping[str, Any]) -> Text:
        """The text of a /v1/chat/completions body. Raises `Inexact`."""
        if self.elsewhere:
            raise Inexact("renderer")
        return _text(chat_text(body, self.template, self.rules), special=_special(body, default=False))


class Tokenizer:
    """One model's tokenizer and chat template, from a folder with tokenizer.json."""

    def __init__(self, folder: Path, rules: Rules = NO_FLAGS) -> None:
        """Raises `NoTokenizer` with what is missing. Nothing is fetched and no code of the model's is run."""
        if not (folder / "tokenizer.json").is_file():
            raise NoTokenizer(f"{folder} has no tokenizer.json (a fast tokenizer is needed)")
        try:
            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a broken file makes tokenizers raise Exception itself
            raise NoTokenizer(f"no tokenizer could be loaded from {folder}: {error}") from error
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise NoTokenizer(f"{folder} has no fast tokenizer")
        pickled = replace(rules, kwargs=dict(rules.kwargs))
        self.chats = Chats(_bare(loaded), pickled, renderer_of_its_own(folder) is not None)
        self._backend: Backend = loaded.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.cuts = cuts_of(self._backend)
        self._frame = _frame_of(self._backend)
        self._random = _draws(self._backend)

    def prompt(self, kind: Kind, body: Mapping[str, Any]) -> Text | Sequence[int]:
        """The text of a body's prompt, or the ids that it has instead. Raises `Inexact`."""
        if kind == "chat":
            self.check()
            return self.chats(body)
        if body.get("prompt_embeds") is not None or body.get("truncate_prompt_tokens") is not None:
            raise Inexact("prompt_form")
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            self.check()
            return _text(prompt, special=_special(body, default=True))
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return prompt
        if isinstance(prompt, list) and len(prompt) > 1 and all(isinstance(one, str | list) for one in prompt):
            raise Inexact("several_prompts")
        raise Inexact("prompt_form")

    def chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        """The ids of a /v1/chat/completions body. Raises `Inexact`."""
        return self.ids("chat", body)

    def completion(self, body: Mapping[str, Any]) -> Sequence[int]:
        """The ids of a /v1/completions body with one prompt, as text or as ids. Raises `Inexact`."""
        return self.ids("completion", body)

    def ids(self, kind: Kind, body: Mapping[str, Any]) -> Sequence[int]:
        """The ids of a body's prompt, all encoded at once. Raises `Inexact`."""
        prompt = self.prompt(kind, body)
        return self.encode(prompt) if isinstance(prompt, Text) else prompt

    def text(self, ids: Sequence[int]) -> str:
        """What ids stand for, special tokens included."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def check(self) -> None:
        """Raises `Inexact` where texts have no ids of their own."""
        if self._random:
            raise Inexact("dropout")

    def encode(self, text: Text) -> list[int]:
        """The ids of a whole text. It lets other threads run. Raises `Inexact`."""
        [ids] = self._encoded([text.data.decode()], special=text.special)
        return ids

    def encode_pieces(self, pieces: Sequence[bytes]) -> Iterator[list[int]]:
        """The ids of each of several texts, without special tokens. It lets other threads run. Raises `Inexact`."""
        return self._encoded([piece.decode() for piece in pieces], special=False)

    def _encoded(self, texts: list[str], *, special: bool) -> Iterator[list[int]]:
        try:
            found = self._backend.encode_batch_fast(texts, add_special_tokens=special)
        except BaseException as error:  # whose own kinds are Exception, and for a panic one beside it
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise Inexact("tokenizer") from error
            raise
        return (each.ids for each in found)

    def frame(self, text: Text) -> Frame | None:
        """What its special tokens are. None: they depend on the text."""
        return self._frame if text.special else Frame()


def _special(body: Mapping[str, Any], *, default: bool) -> bool:
    """Whether special tokens are put around a prompt. vLLM takes "yes" and 1 for a yes as well. Raises `Inexact`."""
    wanted = body.get("add_special_tokens")
    if not isinstance(wanted, bool | None):
        raise Inexact("add_special_tokens")
    return default if wanted is None else wanted


def _text(text: str, *, special: bool) -> Text:
    try:
        return Text(text.encode(), special)
    except UnicodeEncodeError as error:  # a lone surrogate, out of a tool call's arguments
        raise Inexact("surrogate") from error


def _bare(loaded: PreTrainedTokenizerFast) -> Any:
    """What renders as a tokenizer does and has no vocabulary, or the tokenizer itself where that may differ."""
    special = loaded.special_tokens_map
    bare: Any = PreTrainedTokenizerFast(tokenizer_object=Backend(BPE()), **special)  # type: ignore[no-untyped-call]
    bare.chat_template = loaded.chat_template
    same = type(loaded).get_chat_template is PreTrainedTokenizerFast.get_chat_template
    return bare if same and bare.special_tokens_map == special else loaded


def _frame_of(backend: Backend) -> Frame | None:
    """What a tokenizer puts around texts, as a few texts show; None where it is not the same around all."""
    plain, framed = (
        [encoded.ids for encoded in backend.encode_batch_fast(list(_SAMPLES), add_special_tokens=special)]
        for special in (False, True)
    )
    for before in range(len(framed[0]) + 1):
        frame = Frame(tuple(framed[0][:before]), tuple(framed[0][before:]))
        if all(whole == [*frame.before, *ids, *frame.after] for ids, whole in zip(plain, framed, strict=True)):
            return frame
    return None


_SAMPLES = ("", "a", "the engine loads", " 1\n", "<", "\u6f22", "A block in the pool. " * 9)


def _draws(backend: Backend) -> bool:
    """Whether a tokenizer draws lots, so that a text has no ids of its own (BPE dropout, Unigram sampling)."""
    return bool(getattr(backend.model, "dropout", None) or getattr(backend.model, "alpha", None))
