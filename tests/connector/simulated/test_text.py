"""Answers are the same for the same prompt, and their text gives back the very ids."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from connector.simulated.model import make
from connector.simulated.serving import Model
from connector.simulated.text import LONGEST, SHORTEST, NoWords, Voice


def test_text_encodes_to_the_ids_that_were_said(sim_model: Model) -> None:
    for prompt in ([1], [2, 3], list(range(300))):
        answer = sim_model.voice.answer(prompt)
        assert SHORTEST <= answer.length <= LONGEST
        words = [answer.word(position) for position in range(answer.length)]
        text = "".join(word.text for word in words)
        ids = [word.token for word in words]
        assert sim_model.backend.encode(text, add_special_tokens=False).ids == ids
        assert sim_model.backend.decode(ids) == text


def test_the_next_turns_prompt_continues_what_was_computed(sim_model: Model) -> None:
    asked = {"role": "user", "content": "what is a block?"}
    first = list(sim_model.tokenizer.chat({"messages": [asked]}))
    answer = sim_model.voice.answer(first)
    words = [answer.word(position) for position in range(20)]
    said = {"role": "assistant", "content": "".join(word.text for word in words)}
    then = sim_model.tokenizer.chat({"messages": [asked, said, {"role": "user", "content": "and a pool?"}]})
    assert list(then[: len(first) + 20]) == first + [word.token for word in words]


def test_the_same_prompt_gets_the_same_answer_and_another_choice_another(sim_model: Model) -> None:
    def said(prompt: list[int], choice: int = 0) -> list[int]:
        answer = sim_model.voice.answer(prompt, choice)
        return [answer.word(position).token for position in range(12)]

    assert said([5, 6, 7]) == said([5, 6, 7])
    assert said([5, 6, 7]) != said([5, 6, 8])
    assert said([5, 6, 7]) != said([5, 6, 7], choice=1)


def test_a_tokenizer_without_words_is_refused() -> None:
    with pytest.raises(NoWords):
        Voice(Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])))


def test_the_model_is_the_same_every_time(sim_folder: Path, tmp_path: Path) -> None:
    again = make(tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
        assert (again / name).read_bytes() == (sim_folder / name).read_bytes()


def test_the_template_knows_tools_and_their_calls(sim_model: Model) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "pool"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "a body of water"},
    ]
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    tokens = list(sim_model.tokenizer.chat({"messages": messages, "tools": tools}))
    text = sim_model.backend.decode(tokens, skip_special_tokens=False)
    assert text.count("Be brief.") == 1
    assert '{"name": "look_up", "arguments": {"word": "pool"}}' in text
    assert text.endswith("a body of water<|im_end|>\n<|im_start|>assistant\n")
