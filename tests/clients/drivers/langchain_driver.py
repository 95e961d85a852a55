"""LangChain's chat models on both APIs, and its embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from loop import Question, serve
from pydantic import BaseModel


class Person(BaseModel):
    """Who it is about."""

    name: str
    age: int


def connect(url: str, key: str, headers: dict[str, str]) -> SimpleNamespace:
    shared: Any = {"api_key": key, "default_headers": headers, "max_retries": 0}
    return SimpleNamespace(
        chat=partial(ChatOpenAI, base_url=f"{url}/v1", timeout=60, **shared),
        messages=partial(ChatAnthropic, base_url=url, timeout=60, **shared),
        # Without this LangChain downloads OpenAI's tokenizer and cuts texts with it.
        embeddings=partial(OpenAIEmbeddings, base_url=f"{url}/v1", check_embedding_ctx_length=False, **shared),
    )


def on(api: str, call: Callable[[BaseChatModel, str], Any]) -> Callable[[SimpleNamespace, Question], Any]:
    """Wraps a call so that it uses the chat model of one API."""
    return lambda models, asked: call(getattr(models, api)(model=asked.model, max_tokens=asked.tokens), asked.prompt)


def plain(model: BaseChatModel, prompt: str) -> str:
    return str(model.invoke(prompt).content)


def stream(model: BaseChatModel, prompt: str) -> Iterator[str]:
    for chunk in model.stream(prompt):
        if text := chunk.text:
            yield str(text)


def structured(model: BaseChatModel, prompt: str) -> Any:
    return model.with_structured_output(Person).invoke(prompt).model_dump()


def tool(model: BaseChatModel, prompt: str) -> Any:
    (called,) = model.bind_tools([Person], tool_choice="any").invoke(prompt).tool_calls
    return {"name": called["name"], "arguments": called["args"]}


def embedding(models: SimpleNamespace, asked: Question) -> list[float]:
    return models.embeddings(model=asked.model).embed_query(asked.prompt)


_CALLS = (plain, stream, structured, tool)
serve(
    connect,
    embedding=embedding,
    **{call.__name__: on("chat", call) for call in _CALLS},
    **{f"messages_{call.__name__}": on("messages", call) for call in _CALLS},
)
