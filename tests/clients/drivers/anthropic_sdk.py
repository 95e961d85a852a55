"""The official Anthropic SDK for Python: whole messages, streams, and streams through the SDK's own helper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anthropic import Anthropic
from loop import Question, serve


def connect(url: str, key: str, headers: dict[str, str]) -> Anthropic:
    return Anthropic(base_url=url, api_key=key, default_headers=headers, max_retries=0, timeout=60)


def _message(asked: Question) -> dict[str, Any]:
    messages = [{"role": "user", "content": asked.prompt}]
    return {"model": asked.model, "messages": messages, "max_tokens": asked.tokens}


def messages(client: Anthropic, asked: Question) -> Any:
    answer = client.messages.create(**_message(asked))
    return {"text": answer.content[0].text, "request_id": answer._request_id}


def messages_stream(client: Anthropic, asked: Question) -> Iterator[str]:
    for event in client.messages.create(**_message(asked), stream=True):
        if event.type == "content_block_delta":
            yield event.delta.text


def messages_helper(client: Anthropic, asked: Question) -> Iterator[str]:
    with client.messages.stream(**_message(asked)) as stream:
        yield from stream.text_stream
        stream.get_final_message()


serve(connect, messages=messages, messages_stream=messages_stream, messages_helper=messages_helper)
