"""Prompts without messages: completions, embeddings, rerank and score."""

from __future__ import annotations

import sys
from array import array
from typing import Final

from gateway.errors import bad_field
from gateway.prompt.chat import KEYED_MESSAGES, read_chat, read_embedding_chat
from gateway.prompt.fields import Json, list_at
from gateway.prompt.parts import write_parts
from gateway.prompt.root import COMPLETION, EMBEDDING, SCORE, CacheScope, write_option, write_root
from gateway.prompt.writer import PromptWriter

_FLAGS: Final = (("add_special_tokens", True),)
_SCORE_OPTIONS: Final = ("instruction", "max_tokens_per_query", "max_tokens_per_doc")
_MAX_TOKEN_ID: Final = 2**31 - 1


def read_completion(writer: PromptWriter, body: dict[str, Json], scope: CacheScope) -> None:
    """A completion. The first of several prompts stands for the request."""
    write_root(writer, scope, COMPLETION, body, _FLAGS)
    writer.end_root()
    prompt, embeds = body.get("prompt"), body.get("prompt_embeds")
    if embeds is not None:
        writer.media("prompt_embeds", embeds, "prompt_embeds")
    if prompt is not None or embeds is None:
        _write_prompt(writer, prompt, "prompt")


def read_tokenize(writer: PromptWriter, body: dict[str, Json], scope: CacheScope) -> None:
    """The tokenization of a chat or of a completion's prompt."""
    read = read_chat if "messages" in body else read_completion
    read(writer, body, scope)


def read_embedding(writer: PromptWriter, body: dict[str, Json], scope: CacheScope) -> None:
    """An embedding of a text or a conversation. The first of several inputs stands for the request."""
    for param in ("messages", "input"):
        value = body.get(param)
        if (param == "messages" and value is not None) or _holds_messages(value):
            read_embedding_chat(writer, body, scope, value, param)
            return
    write_root(writer, scope, EMBEDDING, body, _FLAGS)
    writer.end_root()
    _write_prompt(writer, body.get("input"), "input")


def read_rerank(writer: PromptWriter, body: dict[str, Json], scope: CacheScope) -> None:
    """A query and the documents to rank."""
    _read_pair(writer, body, scope, ("query",), ("documents",))


def read_score(writer: PromptWriter, body: dict[str, Json], scope: CacheScope) -> None:
    """One or more queries, and the documents to score them against."""
    _read_pair(writer, body, scope, ("queries", "data_1", "text_1"), ("documents", "items", "data_2", "text_2"))


def _holds_messages(value: Json) -> bool:
    if isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _write_prompt(writer: PromptWriter, prompt: Json, param: str) -> None:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt, param = prompt[0], f"{param}[0]"
    if isinstance(prompt, str):
        writer.text(prompt, param)
    elif isinstance(prompt, list) and prompt:
        writer.token_ids(_token_ids(prompt, param))
    else:
        raise bad_field(param, "must be a string, token ids, or a list of either, and not empty")


def _token_ids(ids: list[Json], param: str) -> bytes:
    try:
        packed = array("I", ids)
        if max(packed) > _MAX_TOKEN_ID:
            raise OverflowError
    except (TypeError, OverflowError):
        raise bad_field(param, f"token ids must be integers from 0 to {_MAX_TOKEN_ID}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _read_pair(
    writer: PromptWriter,
    body: dict[str, Json],
    scope: CacheScope,
    first_names: tuple[str, ...],
    second_names: tuple[str, ...],
) -> None:
    """Every query, then every document, each as a message."""
    write_root(writer, scope, SCORE, {**body, "documents": None})  # here they are the items to score, and no context
    for name in _SCORE_OPTIONS:
        if (value := body.get(name)) is not None:
            write_option(writer, name, value)
    writer.end_root()
    items = [("query", *item) for item in _items(writer, body, first_names)]
    items += [("document", *item) for item in _items(writer, body, second_names)]
    for index, (role, value, param) in enumerate(items):
        writer.open_message(role, param)
        if isinstance(value, str):
            writer.text(value, param)
        elif isinstance(value, dict):
            write_parts(writer, list_at(value.get("content"), f"{param}.content"), f"{param}.content", role=role)
        else:
            raise bad_field(param, "must be a string or an object with content")
        writer.close_message(keyed=index == 0 or index >= len(items) - KEYED_MESSAGES)


def _items(writer: PromptWriter, body: dict[str, Json], names: tuple[str, ...]) -> list[tuple[Json, str]]:
    """The values of the first of `names` in the body, each with the name of its field for errors."""
    name = next((name for name in names if body.get(name) is not None), names[0])
    value = body.get(name)
    if isinstance(value, list):
        writer.expect_messages(len(value), name)
        return [(item, f"{name}[{index}]") for index, item in enumerate(value)]
    return [(value, name)]
