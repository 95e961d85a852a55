"""LiteLLM, with the gateway configured as a server that speaks OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import litellm
from loop import Question, serve
from pydantic import BaseModel

Client = Callable[[Callable[..., Any]], Callable[..., Any]]


class Person(BaseModel):
    """Who it is about."""

    name: str
    age: int


TOOL = {"type": "function", "function": {"name": "Person", "parameters": Person.model_json_schema()}}


def connect(url: str, key: str, headers: dict[str, str]) -> Client:
    where = {"api_base": f"{url}/v1", "api_key": key, "extra_headers": headers, "max_retries": 0, "timeout": 60}
    return lambda function: partial(function, **where)


def _completion(client: Client, asked: Question, **fields: Any) -> Any:
    messages = [{"role": "user", "content": asked.prompt}]
    model = f"openai/{asked.model}"
    return client(litellm.completion)(model=model, messages=messages, max_tokens=asked.tokens, **fields)


def plain(client: Client, asked: Question) -> str:
    return _completion(client, asked).choices[0].message.content


def stream(client: Client, asked: Question) -> Iterator[str]:
    for chunk in _completion(client, asked, stream=True):
        if text := chunk.choices[0].delta.content:
            yield text


def structured(client: Client, asked: Question) -> Any:
    return json.loads(_completion(client, asked, response_format=Person).choices[0].message.content)


def tool(client: Client, asked: Question) -> Any:
    (called,) = _completion(client, asked, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
    return {"name": called.function.name, "arguments": json.loads(called.function.arguments)}


def embedding(client: Client, asked: Question) -> list[float]:
    return client(litellm.embedding)(model=f"openai/{asked.model}", input=[asked.prompt]).data[0]["embedding"]


serve(connect, plain=plain, stream=stream, structured=structured, tool=tool, embedding=embedding)
