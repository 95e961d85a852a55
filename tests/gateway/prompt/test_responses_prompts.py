"""The Responses API: its prompt is the same as that of the chat that vLLM makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.prompt import Prompt, PromptLimits, read_prompt

DATA_URL = "data:image/png;base64,iVBORw0KGgo="
SYSTEM = {"role": "system", "content": "be brief"}
HELLO = {"role": "user", "content": "hello"}
WEATHER = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}

THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
OUTPUT_TEXT = {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}
ANSWER = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [OUTPUT_TEXT]}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}

CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CHAT_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}


def read(body: dict[str, Any], path: str = "/v1/responses") -> Prompt:
    body = {"model": "m", **body}
    return read_prompt(path, body, root_model="base", adapter=None, cache_salt=None, limits=PromptLimits(10**8))


def chat_keys(*messages: dict[str, Any], **other: Any) -> list[str]:
    return read({"messages": list(messages), **other}, "/v1/chat/completions").keys


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    "body",
    [
        {"input": "hello"},
        {"input": [HELLO]},
        {"input": [{"type": "message", **said({"type": "input_text", "text": "hello"})}], "instructions": ""},
        {"input": "hello", "temperature": 0.5, "store": False, "prompt_cache_key": "k", "text": {"format": {}}},
    ],
)
def test_an_input_is_a_users_message(body: dict[str, Any]) -> None:
    assert read(body).keys == chat_keys(HELLO)


def test_instructions_are_the_system_message() -> None:
    assert read({"instructions": "be brief", "input": "hello"}).keys == chat_keys(SYSTEM, HELLO)


def test_an_image_is_the_same_image_as_in_chat_and_leaves_the_body_alone() -> None:
    prompt = read({"input": [said({"type": "input_image", "image_url": DATA_URL, "detail": "auto"})]})
    assert prompt.keys == chat_keys(said({"type": "image_url", "image_url": {"url": DATA_URL}}))
    assert not prompt.body_changed


def test_items_of_one_assistants_turn_are_one_message() -> None:
    message = {"role": "assistant", "reasoning": "hm", "content": "hi", "tool_calls": [CHAT_CALL]}
    assert read({"input": [HELLO, THOUGHT, ANSWER, CALL, RESULT]}).keys == chat_keys(HELLO, message, CHAT_RESULT)
    assert read({"input": [HELLO, CALL, THOUGHT, ANSWER, RESULT]}).keys == chat_keys(HELLO, message, CHAT_RESULT)


def test_items_that_cannot_be_one_message_are_several() -> None:
    reply = {"role": "assistant", "content": "hi"}
    calls = {"role": "assistant", "tool_calls": [CHAT_CALL, CHAT_CALL]}
    assert read({"input": [ANSWER, ANSWER, HELLO]}).keys == chat_keys(reply, reply, HELLO)
    assert read({"input": [HELLO, CALL, CALL, RESULT]}).keys == chat_keys(HELLO, calls, CHAT_RESULT)
    assert read({"input": [THOUGHT, THOUGHT]}).keys == chat_keys(*[{"role": "assistant", "reasoning": "hm"}] * 2)


def test_reasoning_known_only_by_its_summary_is_the_summary() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    assert read({"input": [item]}).keys == chat_keys({"role": "assistant", "reasoning": "hm"})


def test_tools_and_effort_are_those_of_chat() -> None:
    tools = {"tools": [{"type": "function", "function": WEATHER}]}
    assert read({"input": "hello", "tools": [{"type": "function", **WEATHER}]}).keys == chat_keys(HELLO, **tools)
    assert read({"input": "hello", "reasoning": {"effort": "low"}}).keys == chat_keys(HELLO, reasoning_effort="low")


@pytest.mark.parametrize("history", [{"previous_response_id": "resp_1"}, {"previous_input_messages": [HELLO]}])
def test_a_history_kept_by_the_engine_keeps_prompts_apart(history: dict[str, Any]) -> None:
    assert not set(read({"input": "hello", **history}).keys) & set(read({"input": "hello"}).keys)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("input", {"input": 5}),
        ("instructions", {"instructions": 5, "input": "a"}),
        ("input[0].role", {"input": [{"content": "a"}]}),
        ("input[1].content[0].text", {"input": [HELLO, said({"type": "input_text"})]}),
        ("input[0].content[0].image_url", {"input": [said({"type": "input_image"})]}),
        ("input[0].arguments", {"input": [{"type": "function_call", "name": "f", "arguments": 5}]}),
        ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "c"}]}),
        ("input[0].call_id", {"input": [{"type": "function_call_output", "call_id": 5, "output": "a"}]}),
        ("input[0].summary[0].text", {"input": [{"type": "reasoning", "summary": [{}]}]}),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_the_name_the_client_gave_it(param: str, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        read(body)
    assert (refused.value.status, refused.value.param) == (400, param)
