"""Instructor: objects by a JSON schema and by a tool call, whole and streamed in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import instructor
from loop import Question, serve
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """Who it is about."""

    name: str
    age: int


def connect(url: str, key: str, headers: dict[str, str]) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, default_headers=headers, max_retries=0, timeout=60)


def _question(asked: Question) -> Any:
    messages = [{"role": "user", "content": asked.prompt}]
    return {"model": asked.model, "messages": messages, "max_tokens": asked.tokens, "max_retries": 0}


def structured(client: OpenAI, asked: Question) -> Any:
    by_schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    return by_schema.chat.completions.create(**_question(asked), response_model=Person).model_dump()


def tool(client: OpenAI, asked: Question) -> Any:
    by_tool = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    person = by_tool.chat.completions.create(**_question(asked), response_model=Person)
    return {"name": "Person", "arguments": person.model_dump()}


def stream(client: OpenAI, asked: Question) -> Iterator[Any]:
    by_tool = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    for partial in by_tool.chat.completions.create_partial(**_question(asked), response_model=Person):
        yield partial.model_dump()


serve(connect, structured=structured, tool=tool, stream=stream)
