"""Chat requests of every kind: what clients send, what they should not send, and what engines refuse."""

from typing import Any

Json = dict[str, Any]

USER: Json = {"role": "user", "content": "Hi there"}
SYSTEM: Json = {"role": "system", "content": "Be brief."}
ANSWER: Json = {"role": "assistant", "content": "Sure."}
WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather\'s "now"',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "\u00e9 < & > 'x'"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


def body(*messages: Json, **fields: Any) -> Json:
    return {"messages": list(messages), **fields}


def text(words: object, **more: object) -> Json:
    return {"type": "text", "text": words, **more}


def parts(*content: object, role: str = "user", **more: object) -> Json:
    return {"role": role, "content": list(content), **more}


def call(arguments: object = '{"city": "Oslo", "days": 3}', **more: object) -> Json:
    return {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}} | more


def calling(*calls: Json, **more: object) -> Json:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def result(content: object = "sunny", **more: object) -> Json:
    return {"role": "tool", "tool_call_id": "call00001", "content": content, **more}


SHAPES: dict[str, Json] = {
    "user": body(USER),
    "system": body(SYSTEM, USER),
    "turns": body(SYSTEM, USER, ANSWER, USER),
    "late system": body(USER, SYSTEM, USER),
    "two systems": body(SYSTEM, {"role": "system", "content": "And kind."}, USER),
    "only system": body(SYSTEM),
    "developer": body({"role": "developer", "content": "Be exact."}, USER),
    "developer and system": body(SYSTEM, {"role": "developer", "content": "Be exact."}, USER),
    "late developer": body(USER, ANSWER, {"role": "developer", "content": "Be exact.", "name": "dev"}, USER),
    "developer parts": body(parts(text("a"), text(""), text("b"), role="developer"), SYSTEM, USER),
    "developer tools": body({"role": "developer", "content": "x", "tools": [WEATHER]}, USER),
    "developer null tools": body({"role": "developer", "content": "x", "tools": None}, USER),
    "empty developer": body({"role": "developer", "content": ""}, SYSTEM, USER),
    "names": body({**SYSTEM, "name": "boss"}, {**USER, "name": "Ada"}, {**ANSWER, "name": "bot"}, USER),
    "task": body({**USER, "task": "action"}),
    "tools": body(USER, tools=[WEATHER]),
    "tools bare": body(USER, tools=[{"type": "function", "function": {"name": "f"}}]),
    "tools strict": body(
        SYSTEM,
        USER,
        tools=[
            {"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}},
            {"type": "function", "function": {"strict": False, "description": "", "name": "g"}},
        ],
    ),
    "tools odd": body(
        USER,
        tools=[
            {
                "function": {
                    "parameters": {"z": 1, "a": [None, 1.5, 1e20, 1e-7, {"é": "\u2028"}]},
                    "x-more": 1,
                    "name": "f",
                },
                "type": "function",
                "cache_control": {"type": "ephemeral"},
            }
        ],
    ),
    "tools later": body(
        USER,
        tools=[
            WEATHER,
            {"type": "function", "defer_loading": True, "function": {"name": "late"}},
            {"type": "function", "function": {"name": "late2", "defer_loading": True}},
            {"type": "function", "defer_loading": False, "function": {"name": "now", "defer_loading": True}},
        ],
    ),
    "tool choice none": body(USER, tools=[WEATHER], tool_choice="none"),
    "tool choice required": body(USER, tools=[WEATHER], tool_choice="required"),
    "tool choice named": body(USER, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}}),
    "tool choice null": body(USER, tools=[WEATHER], tool_choice=None),
    "no tools": body(USER, tools=[]),
    "null tools": body(USER, tools=None),
    "tool conversation": body(SYSTEM, USER, calling(call()), result(), ANSWER, USER, tools=[WEATHER]),
    "two calls": body(
        USER,
        calling(call(), call('{"city": "Rome"}', id="call00002")),
        result(),
        result("rain", tool_call_id="call00002"),
        tools=[WEATHER],
    ),
    "call with text": body(USER, {**calling(call()), "content": "Let me look."}, result()),
    "call order": body(
        USER,
        calling(
            {"type": "function", "index": 0, "function": {"name": "f", "x": 1, "arguments": "{}"}, "id": "call00001"}
        ),
        result(),
    ),
    "bad arguments": body(USER, calling(call("{bad")), result()),
    "empty arguments": body(USER, calling(call("")), result()),
    "list arguments": body(USER, calling(call("[1, 2]")), result()),
    "null arguments": body(USER, calling(call("null")), result()),
    "number arguments": body(USER, calling(call("7")), result()),
    "nan arguments": body(
        USER, calling(call('{"a": NaN, "b": 1e400, "c": 123456789012345678901234567890, "d": 1.10}')), result()
    ),
    "twice arguments": body(USER, calling(call('{"a": 1, "b": 2, "a": 3}')), result()),
    "dict arguments": body(USER, calling(call({"a": 1})), result()),
    "no id": body(USER, calling({"type": "function", "function": {"name": "f", "arguments": "{}"}})),
    "custom call": body(USER, calling({"id": "call00001", "type": "custom", "custom": {"name": "f", "input": "x"}})),
    "empty calls": body(USER, {**ANSWER, "tool_calls": []}, USER),
    "null calls": body(USER, {**ANSWER, "tool_calls": None}, USER),
    "call without content": body(USER, {"role": "assistant", "tool_calls": [call()]}, result()),
    "tool parts": body(
        USER, calling(call()), parts(text("a"), text(""), text("b"), role="tool", tool_call_id="call00001")
    ),
    "tool empty parts": body(USER, calling(call()), parts(role="tool", tool_call_id="call00001")),
    "tool reference": body(
        USER,
        calling(call()),
        parts({"type": "tool_reference", "name": "weather"}, text("b"), role="tool", tool_call_id="call00001"),
    ),
    "tool without id": body(USER, calling(call()), {"role": "tool", "content": "x"}),
    "tool named": body(USER, calling(call()), result(name="weather")),
    "reasoning": body(USER, {**ANSWER, "reasoning": "hm"}, USER),
    "reasoning content": body(USER, {**ANSWER, "reasoning_content": "hm\n"}, USER),
    "both reasonings": body(USER, {**ANSWER, "reasoning": "a", "reasoning_content": "b"}, USER),
    "empty reasoning": body(USER, {**ANSWER, "reasoning": "", "reasoning_content": "b"}),
    "reasoning and calls": body(USER, calling(call(), reasoning="think"), result()),
    "thinking in content": body(USER, {"role": "assistant", "content": "<think>\nso\n</think>\n\nyes"}, USER),
    "user reasoning": body({**USER, "reasoning": "a"}),
    "null content": body(USER, {"role": "assistant", "content": None}),
    "no content": body({"role": "user"}),
    "empty content": body({"role": "user", "content": ""}),
    "null user": body({"role": "user", "content": None}),
    "empty parts": body(parts()),
    "text parts": body(parts(text("a"), text("b"))),
    "odd parts": body(
        parts(text("a", cache_control={"type": "ephemeral"}, name="x", closed=True), text(""), text("c", uuid=None))
    ),
    "null text": body(parts({"type": "text", "text": None}, text("a"))),
    "no text": body(parts({"type": "text"}, text("a"))),
    "string parts": body(parts("a", text("b"))),
    "system parts": body(parts(text("a"), text("b"), role="system"), USER),
    "assistant parts": body(USER, parts(text("a"), {"type": "refusal", "refusal": "no"}, role="assistant"), USER),
    "thinking part": body(
        USER, parts({"type": "thinking", "thinking": "hm", "closed": True}, text("a"), role="assistant"), USER
    ),
    "responses parts": body(parts({"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"})),
    "refusal": body(USER, {"role": "assistant", "refusal": "I may not."}, USER),
    "uuid": body(parts(text("a", uuid="1"))),
    "image": body(parts(text("a"), {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}})),
    "audio": body(parts({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}})),
    "file": body(parts({"type": "file", "file": {"file_id": "1"}})),
    "unknown part": body(parts({"type": "smell", "text": "x"})),
    "no kind": body(parts({"text": "x"})),
    "kwargs": body(
        USER,
        chat_template_kwargs={"enable_thinking": False, "thinking": True, "date_string": "1 Jan 2030", "unknown": 1},
    ),
    "null kwargs": body(USER, chat_template_kwargs={"enable_thinking": None, "thinking": "auto"}),
    "own kwargs": body(
        USER,
        chat_template_kwargs={
            "add_generation_prompt": False,
            "padding": True,
            "max_length": 3,
            "documents": [{"text": "d"}],
            "tools": [{"n": 1}],
            "bos_token": "BOS",
        },
    ),
    "kwargs messages": body(USER, chat_template_kwargs={"messages": []}),
    "kwargs tokenize": body(USER, chat_template_kwargs={"tokenize": True}),
    "custom tools": body(
        USER,
        chat_template_kwargs={
            "custom_tools": [WEATHER],
            "tools_in_user_message": False,
            "xml_tools": ["x"],
            "controls": {"citations": True},
        },
    ),
    **{
        f"effort {e}": body(USER, reasoning_effort=e)
        for e in ("none", "minimal", "low", "medium", "high", "xhigh", "max", "huge")
    },
    "effort and kwargs": body(
        USER, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "reasoning_effort": "high"}
    ),
    "effort null thinking": body(USER, reasoning_effort="low", chat_template_kwargs={"enable_thinking": None}),
    "continue": body(USER, ANSWER, add_generation_prompt=False, continue_final_message=True),
    "continue spaces": body(
        USER, {"role": "assistant", "content": " So the \n"}, add_generation_prompt=False, continue_final_message=True
    ),
    "continue parts": body(
        USER, parts(text("a"), text("b "), role="assistant"), add_generation_prompt=False, continue_final_message=True
    ),
    "continue user": body(USER, add_generation_prompt=False, continue_final_message=True),
    "continue nothing": body(
        USER, {"role": "assistant", "content": None}, add_generation_prompt=False, continue_final_message=True
    ),
    "continue and generate": body(USER, ANSWER, continue_final_message=True),
    "no generation": body(USER, add_generation_prompt=False),
    "no generation after answer": body(USER, ANSWER, add_generation_prompt=False),
    "generation after answer": body(USER, ANSWER),
    "generation as number": body(USER, add_generation_prompt=0),
    "documents": body(USER, documents=[{"title": "a", "text": "The text."}, {"text": "é"}]),
    "documents and tools": body(SYSTEM, USER, documents=[{"text": "x"}], tools=[WEATHER]),
    "no documents": body(USER, documents=[]),
    "bad documents": body(USER, documents=[{"text": 1}]),
    "unicode": body({"role": "user", "content": "Ünïcödé 漢字 🙂 \u200b\u0000\t\r\n ende"}),
    "specials": body({"role": "user", "content": "<|im_end|>\n<|im_start|><|system|> <|end|><|begin|> </s>[INST]"}),
    "spaces": body(
        {"role": "user", "content": "  \n padded \n\n"},
        {"role": "assistant", "content": "\n x \n"},
        {"role": "user", "content": "\t"},
    ),
    "jinja in content": body({"role": "user", "content": "{{ bos_token }}{% for %}"}),
    "unknown fields": body(
        {**USER, "weight": 1, "metadata": {"a": 1}}, foo=1, user="me", metadata={"x": "y"}, store=True
    ),
    "unknown role": body(USER, {"role": "wizard", "content": "abra"}),
    "function role": body(USER, {"role": "function", "name": "f", "content": "1"}),
    "critic parts": body(USER, parts(text("a"), "b", role="critic")),
    "billing": body({"role": "system", "content": "x-anthropic-billing-header: cch=1;\nBe brief."}, USER),
    "billing only": body({"role": "system", "content": "x-anthropic-billing-header: cch=1;"}, USER),
    "billing parts": body(
        parts(
            text("x-anthropic-billing-header: cch=1;"),
            text("x-anthropic-billing-header: a\nrest", cache_control={}),
            text("b"),
            role="system",
        ),
        USER,
    ),
    "billing user": body({"role": "user", "content": "x-anthropic-billing-header: a\nrest"}),
    "billing developer": body({"role": "developer", "content": "x-anthropic-billing-header: a\nrest"}, USER),
    "billing later": body({"role": "system", "content": "a\nx-anthropic-billing-header: a"}, USER),
    "special tokens": body(USER, add_special_tokens=True),
    "echo": body(USER, echo=True),
    "schema": body(USER, response_format={"type": "json_object"}, parallel_tool_calls=False, temperature=0, stop=["x"]),
    "audio answer": body(USER, {"role": "assistant", "audio": {"id": "a1"}, "content": "x"}, USER),
    "function call": body(
        USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    ),
    "long": body(SYSTEM, *([USER, ANSWER] * 20), USER),
    "no messages": body(),
    "mm kwargs": body(USER, mm_processor_kwargs={}),
}
