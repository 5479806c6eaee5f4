"""Text to token ids, with the model's own tokenizer, in this process.

A chat's text is encoded without special tokens (its template writes them), a completion's prompt
with them, as vLLM does. Ids that a client sends are taken as they are.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from connector.errors import ConnectorError, Inexact
from connector.render import NO_FLAGS, Rules, chat_text, renderer_of_its_own


class NoTokenizer(ConnectorError):
    """The folder holds no fast tokenizer."""


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
        self._template: Any = loaded
        self._rules = rules
        self._rendered_elsewhere = renderer_of_its_own(folder) is not None
        self._backend: Backend = loaded.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()

    def chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        """The ids of a /v1/chat/completions body. Raises `Inexact`."""
        if self._rendered_elsewhere:
            raise Inexact("renderer")
        text = chat_text(body, self._template, self._rules)
        return self._encode(text, special=body.get("add_special_tokens", False) is True)

    def completion(self, body: Mapping[str, Any]) -> Sequence[int]:
        """The ids of a /v1/completions body with one prompt, as text or as ids. Raises `Inexact`."""
        if body.get("prompt_embeds") is not None or body.get("truncate_prompt_tokens") is not None:
            raise Inexact("prompt_form")
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._encode(prompt, special=body.get("add_special_tokens", True) is not False)
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return prompt
        if isinstance(prompt, list) and len(prompt) > 1 and all(isinstance(one, str | list) for one in prompt):
            raise Inexact("several_prompts")
        raise Inexact("prompt_form")

    def text(self, ids: Sequence[int]) -> str:
        """What ids stand for, special tokens included."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def _encode(self, text: str, *, special: bool) -> Sequence[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate, out of a tool call's arguments
            raise Inexact("surrogate") from error
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids
