"""The official OpenAI SDK for Python: on each API whole answers, streams, and streams through the SDK's own helper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loop import Question, serve
from openai import OpenAI


def connect(url: str, key: str, headers: dict[str, str]) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, default_headers=headers, max_retries=0, timeout=60)


def _chat(asked: Question) -> dict[str, Any]:
    messages = [{"role": "user", "content": asked.prompt}]
    return {"model": asked.model, "messages": messages, "max_tokens": asked.tokens}


def chat(client: OpenAI, asked: Question) -> Any:
    answer = client.chat.completions.create(**_chat(asked))
    return {"text": answer.choices[0].message.content, "request_id": answer._request_id}


def chat_stream(client: OpenAI, asked: Question) -> Iterator[str]:
    for chunk in client.chat.completions.create(**_chat(asked), stream=True):
        if text := chunk.choices[0].delta.content:
            yield text


def chat_helper(client: OpenAI, asked: Question) -> Iterator[str]:
    with client.chat.completions.stream(**_chat(asked)) as stream:
        for event in stream:
            if event.type == "content.delta":
                yield event.delta


def _completion(asked: Question) -> dict[str, Any]:
    return {"model": asked.model, "prompt": asked.prompt, "max_tokens": asked.tokens}


def completions(client: OpenAI, asked: Question) -> Any:
    answer = client.completions.create(**_completion(asked))
    return {"text": answer.choices[0].text, "request_id": answer._request_id}


def completions_stream(client: OpenAI, asked: Question) -> Iterator[str]:
    for chunk in client.completions.create(**_completion(asked), stream=True):
        yield chunk.choices[0].text


def _response(asked: Question) -> dict[str, Any]:
    return {"model": asked.model, "input": asked.prompt, "max_output_tokens": asked.tokens}


def responses(client: OpenAI, asked: Question) -> Any:
    answer = client.responses.create(**_response(asked))
    return {"text": answer.output_text, "request_id": answer._request_id}


def responses_stream(client: OpenAI, asked: Question) -> Iterator[str]:
    for event in client.responses.create(**_response(asked), stream=True):
        if event.type == "response.output_text.delta":
            yield event.delta


def responses_helper(client: OpenAI, asked: Question) -> Iterator[str]:
    with client.responses.stream(**_response(asked)) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                yield event.delta


serve(
    connect,
    chat=chat,
    chat_stream=chat_stream,
    chat_helper=chat_helper,
    completions=completions,
    completions_stream=completions_stream,
    responses=responses,
    responses_stream=responses_stream,
    responses_helper=responses_helper,
)
