"""Chat requests: which requests have the same prompt, which do not, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ApiError
from tests.gateway.prompt.reading import CHAT, chat, read, user


def call(arguments: Any, **other: Any) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function, **other}]}


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"b": 1, "a": 2}}}
TOOL_REORDERED = {"function": {"parameters": {"b": 1, "a": 2}, "description": "d", "name": "f"}, "type": "function"}
EMBEDS = {"type": "prompt_embeds", "data": "AAAA"}
SDK_ECHO = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": []}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chat(user("hi")), chat(user([{"type": "text", "text": "hi"}]))),
        (chat(user("hi")), chat(user(["hi"]))),
        (chat(user("hi")), chat(user([{"type": "text", "text": "hi", "uuid": "x"}]))),
        (chat(user("hi")), chat(user([{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]))),
        (chat(user("hi")), chat(user("hi", cache_control={"type": "ephemeral"}))),
        (chat({"role": "assistant", "content": "a"}), chat({"role": "assistant", "content": "a", **SDK_ECHO})),
        (chat({"role": "assistant"}), chat({"role": "assistant", "content": None})),
        (chat({"role": "assistant", "content": []}), chat({"role": "assistant", "content": None})),
        (chat(user("a", reasoning="r")), chat(user("a", reasoning_content="r"))),
        (chat(user("a", reasoning="r")), chat(user("a", reasoning="r", reasoning_content="other"))),
        (chat(user("a", reasoning=EMBEDS)), chat(user("a", reasoning_content=EMBEDS))),
        (chat(user("a", reasoning=EMBEDS)), chat(user("a", reasoning={**EMBEDS, "uuid": "x"}))),
        (chat(call('{"city": "Paris"}')), chat(call({"city": "Paris"}))),
        (chat(call('{"city": "Paris"}')), chat(call('{"city":"\\u0050aris"}'))),
        (chat(call("")), chat(call(None))),
        (chat(call("{}")), chat(call("[]"))),
        (chat(user("hi"), tools=[TOOL]), chat(user("hi"), tools=[TOOL_REORDERED])),
        (chat(user("hi"), tools=[TOOL]), chat(user("hi"), tools=[{**TOOL, "cache_control": {}}])),
        *(
            (chat(user("hi"), tools=[TOOL]), chat(user("hi"), tools=[TOOL], tool_choice=choice))
            for choice in ("auto", "none", "required", {"type": "function", "function": {"name": "f"}})
        ),
        (chat(user("hi"), tools=[TOOL]), chat(user("hi"), tools=[TOOL], parallel_tool_calls=False)),
        (chat(user("hi")), chat(user("hi"), response_format={"type": "json_object"})),
        (chat(user("hi")), chat(user("hi"), tools=[])),
        (chat(user("hi")), chat(user("hi"), tool_choice="none")),
        (chat(user("hi")), chat(user("hi"), add_generation_prompt=True, add_special_tokens=False)),
        (chat(user("hi")), chat(user("hi"), continue_final_message=None, documents=None)),
        (chat(user("hi")), chat(user("hi"), temperature=0.1, max_tokens=5, stream=True, user="u", seed=1)),
        (chat(chat_template_kwargs={"a": 1, "b": 2}), chat(chat_template_kwargs={"b": 2, "a": 1})),
        (
            chat({"role": "system", "content": "x-anthropic-billing-header: cch=1;\nYou are"}),
            chat({"role": "system", "content": "x-anthropic-billing-header: cch=2;\nYou are"}),
        ),
        (
            chat({"role": "system", "content": [{"type": "text", "text": "x-anthropic-billing-header: a"}, "b"]}),
            chat({"role": "system", "content": "b"}),
        ),
    ],
)  # fmt: skip
def test_requests_that_render_alike_are_the_same_prompt(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert read(one).keys == read(other).keys


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chat(user("hi")), chat({"role": "system", "content": "hi"})),
        (chat(user("ab")), chat(user(["a", "b"]))),
        (chat(user("")), chat(user(None))),
        (chat(user("a"), user("b")), chat(user("ab"))),
        (chat(user("a", name="b")), chat(user("a", name="c"))),
        (chat(user("a", name="b")), chat(user("a", tool_call_id="b"))),
        (chat(user("a", reasoning="r")), chat(user("ra"))),
        (chat(user("", reasoning=EMBEDS)), chat(user("", reasoning={**EMBEDS, "data": "BBBB"}))),
        (chat(user(None, reasoning=EMBEDS)), chat(user([EMBEDS], reasoning=""))),
        (chat(user(None, reasoning=EMBEDS)), chat(user([EMBEDS]))),
        (chat(user("a", task="x")), chat(user([{"type": "text", "text": "a", "task": "x"}]))),
        (chat(call('{"a":1}')), chat(call('{"a":2}'))),
        (chat(call('{"a":1,"b":2}')), chat(call('{"b":2,"a":1}'))),
        (chat(call("{}")), chat(call("not json"))),
        (chat(call("{}", index=0)), chat(call("{}", index=1))),
        (chat(call("{}", x=1)), chat({**call("{}"), "x": 1})),
        (chat(user("x-anthropic-billing-header: a")), chat(user("x-anthropic-billing-header: b"))),
        (chat(user("hi")), chat(user("hi"), tools=[TOOL])),
        (chat(user("hi"), tools=[TOOL]), chat(user("hi"), tools=[TOOL, TOOL])),
        (chat(user("hi")), chat(user("hi"), chat_template="{{ x }}")),
        (chat(user("hi")), chat(user("hi"), documents=[{"title": "t", "text": "x"}])),
        (chat(user("hi")), chat(user("hi"), reasoning_effort="low")),
        (chat(user("hi")), chat(user("hi"), mm_processor_kwargs={"num_crops": 4})),
        (chat(user("hi")), chat(user("hi"), media_io_kwargs={"image": {"image_mode": "L"}})),
        (chat(user("hi")), chat(user("hi"), add_generation_prompt=False)),
        (chat(user("hi")), chat(user("hi"), continue_final_message=True, add_generation_prompt=False)),
        (chat(user("hi")), chat(user("hi"), truncate_prompt_tokens=10)),
    ],
)  # fmt: skip
def test_requests_that_render_otherwise_are_not(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert read(one).keys[-1] != read(other).keys[-1]


def test_how_the_prompt_ends_changes_only_the_tip() -> None:
    plain = read(chat(user("hi"), user("go on")))
    for ending in ({"continue_final_message": True, "add_generation_prompt": False}, {"add_generation_prompt": False}):
        assert read(chat(user("hi"), user("go on"), **ending)).keys[:-1] == plain.keys


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("model", {"messages": []}),
        ("model", {"model": "", "messages": []}),
        ("model", {"model": 1, "messages": []}),
        ("messages", {"model": "m"}),
        ("messages", {"model": "m", "messages": {}}),
        ("messages[1]", chat(user("a"), "b")),
        ("messages[0].role", chat({"content": "a"})),
        ("messages[0].role", chat({"role": ["user"], "content": "a"})),
        ("messages[0].content", chat(user(5))),
        ("messages[0].content", chat(user({"type": "text"}))),
        ("messages[0].content", chat(user("\ud800"))),
        ("messages[1].content[1]", chat(user("a"), user(["a", 5]))),
        ("messages[0].content[0].text", chat(user([{"type": "text"}]))),
        ("messages[0].content[0].text", chat(user([{"type": "text", "text": 5}]))),
        ("messages[0].content[0].type", chat(user([{"text": "a"}]))),
        ("messages[0].content[0].type", chat(user([{"type": {}, "text": "a"}]))),
        ("messages[0].name", chat(user("a", name=5))),
        ("messages[0].tool_call_id", chat(user("a", tool_call_id=[]))),
        ("messages[0].reasoning_content", chat(user("a", reasoning_content=5))),
        ("messages[0].reasoning", chat(user("a", reasoning={"type": "text", "text": "r"}))),
        ("messages[0].reasoning.data", chat(user("a", reasoning={"type": "prompt_embeds"}))),
        ("messages[0].tool_calls", chat(user("a", tool_calls={}))),
        ("messages[0].tool_calls[0]", chat(user("a", tool_calls=["a"]))),
        ("messages[0].tool_calls[0].function", chat(user("a", tool_calls=[{"id": "x"}]))),
        ("messages[0].tool_calls[0].function.name", chat(user("a", tool_calls=[{"function": {}}]))),
        ("messages[0].tool_calls[0].function.arguments", chat(call(["a"]))),
        ("messages[0].tool_calls[0].id", chat(call("{}", id=5))),
        ("tools", chat(user("a"), tools={"a": 1})),
        ("tools[0]", chat(user("a"), tools=["a"])),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_type_is_refused_by_name(param: str, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        read(body)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert param in refused.value.message


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("tools[0]", chat(user("a"), tools=[nested(300)])),
        ("chat_template_kwargs", chat(user("a"), chat_template_kwargs=nested(300))),
        ("messages[0].task", chat(user("a", task=nested(300)))),
        ("messages[0].tool_calls[0].function.arguments", chat(call(nested(300)))),
        ("messages[0].content[0]", chat(user([{"type": "new", "data": nested(300)}]))),
    ],
)
def test_values_nested_too_deeply_are_refused_by_name(param: str, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        read(body)
    assert refused.value.param == param


def test_tokenize_of_messages_is_the_same_prompt_as_chat() -> None:
    body = chat(user("hi"), tools=[TOOL])
    assert read(body, "/tokenize").keys == read(body, CHAT).keys


def test_a_path_without_a_prompt_gives_no_keys_and_reads_nothing() -> None:
    prompt = read({"messages": 5}, "/v1/audio/speech")
    assert (prompt.model, prompt.keys, prompt.text_bytes, prompt.images) == ("", [], [], [])
    assert len(prompt.affinity) == 16


def test_an_untouched_body_needs_no_serialising() -> None:
    assert not read(chat(user([{"type": "text", "text": "hi"}]))).body_changed


def test_affinity_stays_with_a_conversation_whatever_its_system_prompt_and_later_turns() -> None:
    question = user("what is a prefix cache? " * 200)
    first = read(chat({"role": "system", "content": "a"}, question))
    later = read(chat({"role": "developer", "content": "b"}, question, user("and why?")))
    other = read(chat({"role": "system", "content": "a"}, user("something else")))
    assert first.affinity == later.affinity != other.affinity
    assert len(first.affinity) == 16


def test_affinity_looks_at_two_kilobytes_of_content() -> None:
    shared = "x" * 2048
    assert read(chat(user(shared + "a"))).affinity == read(chat(user(shared + "b"))).affinity
    assert read(chat(user(shared[1:] + "a"))).affinity != read(chat(user(shared[1:] + "b"))).affinity


def test_affinity_of_a_prompt_without_content_is_that_of_its_tip() -> None:
    one = read(chat({"role": "system", "content": "a"}))
    other = read(chat({"role": "system", "content": "b"}))
    assert one.affinity != other.affinity
