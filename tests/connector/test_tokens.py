"""Text to token ids with a small model's own tokenizer."""

import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from connector.errors import ConnectorError, Inexact
from connector.render import Rules
from connector.tokens import NoTokenizer, Tokenizer

TEXT = "A block in the pool is usable only if the object of every rank is there. " * 20
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


@pytest.fixture(scope="module")
def backend(model_folder: Path) -> Backend:
    """The tokenizer itself, without what its folder says of length."""
    backend = Backend.from_file(str(model_folder / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    return backend


def ids(backend: Backend, text: str, *, special: bool) -> list[int]:
    found: list[int] = backend.encode(text, add_special_tokens=special).ids
    return found


def refused(tokenizer: Tokenizer, body: dict[str, Any]) -> str:
    with pytest.raises(Inexact) as caught:
        tokenizer.completion(body)
    return caught.value.reason


# completions


def test_a_text_gets_its_special_tokens(tokenizer: Tokenizer, backend: Backend) -> None:
    expected = ids(backend, TEXT, special=True)

    assert tokenizer.completion({"prompt": TEXT}) == expected
    assert tokenizer.completion({"prompt": [TEXT]}) == expected
    assert tokenizer.completion({"prompt": TEXT, "add_special_tokens": True}) == expected
    assert expected[0] == backend.token_to_id("<|begin|>")
    assert len(expected) > 64, "neither the folder's truncation nor its model_max_length counts"


def test_or_none_where_it_says_so(tokenizer: Tokenizer, backend: Backend) -> None:
    assert tokenizer.completion({"prompt": TEXT, "add_special_tokens": False}) == ids(backend, TEXT, special=False)


def test_a_short_text_is_not_padded(tokenizer: Tokenizer, backend: Backend) -> None:
    assert tokenizer.completion({"prompt": ""}) == [backend.token_to_id("<|begin|>")]


@pytest.mark.parametrize("special", [True, False])
def test_ids_are_taken_as_they_are(tokenizer: Tokenizer, special: bool) -> None:
    for prompt in ([1, 2, 3], [[1, 2, 3]]):
        assert tokenizer.completion({"prompt": prompt, "add_special_tokens": special}) == [1, 2, 3]
    assert tokenizer.completion({"prompt": [7]}) == [7]
    assert tokenizer.completion({"prompt": [-1, 2**40]}) == [-1, 2**40], "which of them exist is the engine's to say"


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], ["a", [1]], [[], []]])
def test_several_prompts(tokenizer: Tokenizer, prompt: object) -> None:
    assert refused(tokenizer, {"prompt": prompt}) == "several_prompts"


@pytest.mark.parametrize(
    "prompt",
    [None, [], [[]], {}, 7, 1.5, True, [True], [1, True], [[1, False]], [1.0], [1, 2.5], [None], [1, None], [1, "a"],
     [[["a"]]], [["a"]], [{}], {"prompt": "a"}],
    ids=repr,
)  # fmt: skip
def test_prompts_that_are_none(tokenizer: Tokenizer, prompt: object) -> None:
    assert refused(tokenizer, {"prompt": prompt}) == "prompt_form"


@pytest.mark.parametrize("field", ["prompt_embeds", "truncate_prompt_tokens"])
def test_fields_that_change_the_prompt(tokenizer: Tokenizer, field: str) -> None:
    assert refused(tokenizer, {"prompt": "hi", field: 1}) == "prompt_form"
    assert tokenizer.completion({"prompt": "hi", field: None})


def test_no_prompt(tokenizer: Tokenizer) -> None:
    assert refused(tokenizer, {}) == "prompt_form"


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
def test_any_text_has_ids_that_give_it_back(tokenizer: Tokenizer, backend: Backend, text: str) -> None:
    found = tokenizer.completion({"prompt": text})

    assert found == ids(backend, text, special=True)
    assert "<|" in text or backend.decode(list(found), skip_special_tokens=True) == text


# chats


def test_a_chats_template_writes_its_special_tokens(tokenizer: Tokenizer, backend: Backend) -> None:
    text = "<|begin|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    [begin] = ids(backend, "<|begin|>", special=False)

    found = list(tokenizer.chat({"messages": [USER]}))

    assert found == ids(backend, text, special=False)
    assert found.count(begin) == 1
    assert found[:2] == [begin, backend.token_to_id("<|im_start|>")], "one token each, not its letters"


@pytest.mark.parametrize("special", [1, 0, "true", "no", 1.0])
def test_what_engines_take_for_a_yes_or_a_no_is_not_guessed(tokenizer: Tokenizer, special: object) -> None:
    with pytest.raises(Inexact, match="add_special_tokens"):
        tokenizer.chat({"messages": [USER], "add_special_tokens": special})
    assert refused(tokenizer, {"prompt": "x", "add_special_tokens": special}) == "add_special_tokens"


@pytest.mark.parametrize("special", [None, False])
def test_a_chat_gets_no_others(tokenizer: Tokenizer, special: object) -> None:
    plain = tokenizer.chat({"messages": [USER]})

    assert tokenizer.chat({"messages": [USER], "add_special_tokens": special}) == plain


def test_unless_it_asks_for_them(tokenizer: Tokenizer, backend: Backend) -> None:
    plain = tokenizer.chat({"messages": [USER]})

    asked = tokenizer.chat({"messages": [USER], "add_special_tokens": True})

    assert list(asked) == [backend.token_to_id("<|begin|>"), *plain]


def test_a_long_chat_is_whole(tokenizer: Tokenizer, backend: Backend) -> None:
    found = tokenizer.chat({"messages": [{"role": "user", "content": TEXT}]})

    assert TEXT in backend.decode(list(found), skip_special_tokens=True)


def test_a_chat_that_cannot_be_known(tokenizer: Tokenizer) -> None:
    with pytest.raises(Inexact, match="media"):
        tokenizer.chat({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]})


def test_a_chat_of_a_model_that_the_engine_renders_in_python(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    with pytest.raises(Inexact, match="renderer"):
        Tokenizer(tmp_path).chat({"messages": [{"role": "user", "content": TEXT}]})


def test_chats_follow_what_engines_are_told_of_them(model_folder: Path, backend: Backend) -> None:
    told = Tokenizer(model_folder, Rules(template="{{ messages[0].content }}"))
    assert backend.decode(list(told.chat({"messages": [{"role": "user", "content": TEXT}]}))) == TEXT


def test_a_folder_without_a_template_has_completions_only(model_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, tmp_path)
    bare = Tokenizer(tmp_path)

    assert bare.completion({"prompt": "hi"})
    with pytest.raises(Inexact, match="template"):
        bare.chat({"messages": [USER]})


# folders


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


CONFIG = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
BROKEN = {
    "empty": {},
    "only a configuration": {"tokenizer_config.json": CONFIG, "config.json": '{"model_type": "llama"}'},
    "no JSON": {"tokenizer.json": "{", "tokenizer_config.json": CONFIG},
    "another JSON": {"tokenizer.json": "[]", "tokenizer_config.json": CONFIG},
    "an object of another kind": {"tokenizer.json": '{"added_tokens": []}', "tokenizer_config.json": CONFIG},
    "no configuration": {"tokenizer.json": "{}"},
    "a configuration that is no JSON": {"tokenizer.json": "{}", "tokenizer_config.json": "x"},
}


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("files", BROKEN.values(), ids=BROKEN)
def test_a_folder_that_has_no_tokenizer_is_named(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    with pytest.raises(NoTokenizer) as caught:
        Tokenizer(tmp_path)

    assert str(tmp_path) in str(caught.value)
    assert "tokenizer" in str(caught.value)
    assert isinstance(caught.value, ConnectorError)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("folder", ["no/such/folder", "gpt2", "Qwen/Qwen3-8B"])
def test_a_folder_that_is_missing_is_not_fetched(folder: str) -> None:
    with pytest.raises(NoTokenizer, match=rf"{folder} has no tokenizer\.json"):
        Tokenizer(Path(folder))


def test_no_code_of_the_models_is_run(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    (tmp_path / "config.json").write_text('{"model_type": "x", "auto_map": {"AutoConfig": "evil.Config"}}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Slow", "evil.Fast"]}}'
    )

    with suppress(NoTokenizer):
        Tokenizer(tmp_path)
