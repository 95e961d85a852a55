"""The Messages API: its prompt is the same as that of the chat that vLLM makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.prompt import Prompt, PromptLimits, read_prompt

PIXELS = "iVBORw0KGgo="
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXELS}}
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXELS}"}}
SYSTEM = {"role": "system", "content": "be brief"}
HELLO = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "input_schema": SCHEMA, "description": "d"}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


def read(body: dict[str, Any], path: str = "/v1/messages") -> Prompt:
    body = {"model": "m", **body}
    return read_prompt(path, body, root_model="base", adapter=None, cache_salt=None, limits=PromptLimits(10**8))


def keys(*messages: dict[str, Any], **other: Any) -> list[str]:
    return read({"messages": list(messages), **other}).keys


def chat_keys(*messages: dict[str, Any], **other: Any) -> list[str]:
    return read({"messages": list(messages), **other}, "/v1/chat/completions").keys


def said(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(value: Any, **other: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **other}


def test_a_message_is_the_same_as_in_chat() -> None:
    assert keys(HELLO) == keys(said(text("hello"))) == chat_keys(HELLO)
    assert keys(said(text("a"), text(""), text("b"))) == chat_keys(said(text("a"), text("b")))


@pytest.mark.parametrize(
    "system",
    [
        "be brief",
        [text("be brief", cache_control={"type": "ephemeral"})],
        [text("be "), text("brief")],
        [text("x-anthropic-billing-header: cch=1"), text("be brief")],
        "x-anthropic-billing-header: cch=1\nbe brief",
    ],
)
def test_a_system_prompt_is_one_text(system: Any) -> None:
    assert keys(HELLO, system=system) == chat_keys(SYSTEM, HELLO)


@pytest.mark.parametrize("system", ["", [], None, [text("x-anthropic-billing-header: cch=1")]])
def test_no_system_prompt_is_no_message(system: Any) -> None:
    assert keys(HELLO, system=system) == chat_keys(HELLO)


def test_a_system_message_between_others_stays_there() -> None:
    assert keys(HELLO, said(text("be "), text("brief"), role="system")) == chat_keys(HELLO, SYSTEM)


def test_images_are_the_same_images_as_in_chat_and_leave_the_body_alone() -> None:
    assert keys(said(IMAGE)) == chat_keys(said(CHAT_IMAGE))
    url = "http://x/a"
    by_url = {"type": "image", "source": {"type": "url", "url": url}}
    assert keys(said(by_url)) == chat_keys(said({"type": "image_url", "image_url": {"url": url}}))
    assert not read({"messages": [said(IMAGE)]}).body_changed


def test_an_assistants_blocks_are_its_reasoning_content_and_calls() -> None:
    blocks = said(
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "sealed"},
        text("hi"),
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
        role="assistant",
    )
    message = {"role": "assistant", "reasoning": "hm", "content": "hi", "tool_calls": [CHAT_CALL]}
    assert keys(HELLO, blocks) == chat_keys(HELLO, message)


def test_tool_results_are_messages_in_front_of_what_the_user_says() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [text("rain"), IMAGE, text("wind")]}
    tool = {"role": "tool", "tool_call_id": "c1", "content": "rain\nwind"}
    assert keys(said(text("hello"), result)) == chat_keys(tool, said(CHAT_IMAGE), HELLO)
    plain = {"type": "tool_result", "tool_use_id": "c1", "content": "rain\nwind"}
    assert keys(said(plain)) == chat_keys(tool)


def test_tools_and_effort_are_those_of_chat() -> None:
    assert keys(HELLO, tools=[TOOL]) == chat_keys(HELLO, tools=[CHAT_TOOL])
    assert keys(HELLO, tools=[{**TOOL, "cache_control": {}, "type": "custom"}]) == chat_keys(HELLO, tools=[CHAT_TOOL])
    for choice in ({"type": "none"}, {"type": "any"}, {"type": "tool", "name": "f"}):
        assert keys(HELLO, tools=[TOOL], tool_choice=choice) == chat_keys(HELLO, tools=[CHAT_TOOL])
    assert keys(HELLO, output_config={"effort": "low"}) == chat_keys(HELLO, reasoning_effort="low")
    assert keys(HELLO, thinking={"type": "disabled"}) == chat_keys(HELLO, reasoning_effort="none")


def test_a_tool_that_is_added_or_removed_later_changes_the_beginning_of_the_prompt() -> None:
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOL}}
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": TOOL["name"]}}
    plain, with_added, with_removed = (
        set(keys(HELLO, {"role": "system", "content": [text("note"), *change]}, tools=[TOOL]))
        for change in ([], [added], [removed])
    )
    assert plain.isdisjoint(with_added | with_removed)
    assert with_added.isdisjoint(with_removed)


def test_a_schema_without_a_type_is_that_of_an_object() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert keys(HELLO, tools=[{"name": "f", "input_schema": {}}]) == chat_keys(HELLO, tools=[tool])


def image_from(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("system", {"system": 5, "messages": [HELLO]}),
        ("system[0].text", {"system": [text(5)], "messages": [HELLO]}),
        ("messages[0].content[0].text", {"messages": [said({"type": "text"})]}),
        ("messages[0].content[0].source", {"messages": [said({"type": "image"})]}),
        ("messages[0].content[0].source.data", {"messages": [said(image_from(data="@"))]}),
        ("messages[0].content[0].source.data", {"messages": [said(image_from(type="file", file_id="f"))]}),
        ("messages[0].content[0].source.url", {"messages": [said(image_from(type="url", url="file:///a"))]}),
        (
            "messages[0].content[1].content[0].source.data",
            {"messages": [said(text("a"), {"type": "tool_result", "content": [image_from()]})]},
        ),
        ("messages[0].content[0].input", {"messages": [said({"type": "tool_use", "name": "f", "input": 5})]}),
        ("tools[0]", {"messages": [HELLO], "tools": [5]}),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_the_name_the_client_gave_it(param: str, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        read(body)
    assert (refused.value.status, refused.value.param) == (400, param)
