"""Chat completions through the official SDK: its fields reach the replica, and it can read the answers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.api.stage import Stage, chat_body, text, user
from tests.gateway.simulator.pictures import data_url

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_a_chat_is_answered_with_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="sim", messages=user(text(400)), max_tokens=5)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens > 100


def test_a_message_holds_several_images_by_data_and_http_url(client: openai.OpenAI, stage: Stage) -> None:
    url = f"https://pictures.example/{text(20)}.png"
    content = [
        {"type": "text", "text": text(200)},
        {"type": "image_url", "image_url": {"url": data_url(10)}},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": {"url": data_url(20)}},
        {"type": "text", "text": "Compare them."},
    ]
    answer = client.chat.completions.with_raw_response.create(model="sim", messages=user(content), max_tokens=3)
    assert answer.parse().choices[0].message.content
    images = stage.seen(answer.http_response)["image_ids"]
    assert len(set(images)) == 3
    assert images[1] == url


@pytest.mark.parametrize(
    ("choice", "finish_reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")],
)
def test_tools_are_called(client: openai.OpenAI, choice: Any, finish_reason: str) -> None:
    answer = client.chat.completions.create(
        model="sim", messages=user(text(100)), tools=[WEATHER], tool_choice=choice, max_tokens=200
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].function.name == "weather"
    assert answer.choices[0].finish_reason == finish_reason


def test_a_stream_has_its_pieces_in_order_and_no_usage_nobody_asked_for(client: openai.OpenAI) -> None:
    messages = user(text(300))
    whole = client.chat.completions.create(model="sim", messages=messages, max_tokens=12)
    chunks = list(client.chat.completions.create(model="sim", messages=messages, max_tokens=12, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_the_bytes_of_a_stream_are_the_replicas_but_for_the_usage_not_asked_for(
    stage: Stage, options: dict[str, Any] | None
) -> None:
    body = chat_body(text(300), stream=True, **({} if options is None else {"stream_options": options}))
    asked = bool(options and options.get("include_usage"))
    answer = stage.post("/v1/chat/completions", body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert ('"usage"' in events[-3]) == asked
    assert ('"usage"' in answer.text) == asked
    assert '"finish_reason":"length"' in events[-4 if asked else -3]


def test_a_streamed_tool_call_is_put_together_again(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="sim", messages=user(text(100)), tools=[WEATHER], tool_choice="required", max_tokens=200, stream=True
    )
    calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function is not None
    assert calls[0].function.name == "weather"
    assert "".join(call.function.arguments or "" for call in calls if call.function).startswith("{")
