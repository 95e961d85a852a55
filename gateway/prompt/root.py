"""The root of a stream: everything that the engine renders or hashes before the messages."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from gateway.prompt import stream as tags
from gateway.prompt.fields import IGNORED_FIELDS, Json, list_at, object_at, ordered_json, sorted_json, utf8
from gateway.prompt.stream import frame
from gateway.prompt.writer import PromptWriter

# Requests of different kinds share no key, because the engine renders them by different rules.
CHAT: Final = b"chat"
COMPLETION: Final = b"completion"
EMBEDDING: Final = b"embedding"
EMBEDDING_CHAT: Final = b"embedding-chat"
SCORE: Final = b"score"

# Parameters that change the prompt in every API, in the order in which they are written.
_OPTIONS: Final = (
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "documents",
    "reasoning_effort",
    "truncate_prompt_tokens",
    "truncation_side",
)
_TOOL_FIELDS: Final = ("type", "function")
_FUNCTION_FIELDS: Final = ("name", "description", "parameters")


Flags = Iterable[tuple[str, bool]]
"""Boolean parameters with their defaults."""


class CacheScope(NamedTuple):
    """Prompts with different scopes share no KV cache, so they share no key."""

    root_model: str
    adapter: str | None
    cache_salt: str | None


def write_root(
    writer: PromptWriter,
    scope: CacheScope,
    kind: bytes,
    options: dict[str, Json],
    flags: Flags = (),
) -> None:
    """Write the root without the tools."""
    writer.stream.framed(_beginning(kind, utf8(scope.root_model, "model")))
    writer.optional_field(tags.ADAPTER, scope.adapter, "model")
    writer.optional_field(tags.CACHE_SALT, scope.cache_salt, "cache_salt")
    if not options.keys().isdisjoint(_OPTIONS):
        for name in _OPTIONS:
            if (value := options.get(name)) is not None:
                write_option(writer, name, value)
    write_flags(writer, options, flags)


def write_flags(writer: PromptWriter, options: dict[str, Json], flags: Flags) -> None:
    """The flags that differ from their defaults."""
    for name, default in flags:
        if (value := options.get(name)) is not None and value is not default:
            write_option(writer, name, value)


@lru_cache(maxsize=64)
def _beginning(kind: bytes, model: bytes) -> bytes:
    return frame(tags.VERSION, tags.FORMAT_VERSION) + frame(tags.KIND, kind) + frame(tags.MODEL, model)


def write_option(writer: PromptWriter, name: str, value: Json) -> None:
    """One parameter of the whole prompt. Templates render documents unchanged, and look up other values by name."""
    data = ordered_json(value, name) if name == "documents" else sorted_json(value, name)
    writer.stream.field(tags.OPTION, name.encode(), data)


def write_tools(writer: PromptWriter, tools: Json) -> None:
    """Tool definitions in OpenAI's chat form. They are written as text, so that grid boundaries fall inside long lists.

    vLLM shows the model the tools whatever `tool_choice` is, so agents that end with "none" keep their prefix.
    With --exclude-tools-when-tool-choice-none it does not; then such a prompt is taken for one that is cached.
    """
    if not tools:
        return
    writer.steps.take(len(list_at(tools, "tools")))
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        rendered = _in_order(_TOOL_FIELDS, object_at(tool, param))
        if isinstance(function := rendered.get("function"), dict):
            rendered["function"] = _in_order(_FUNCTION_FIELDS, function)
        writer.stream.text(ordered_json(rendered, param), tags.TOOL)


def _in_order(first: tuple[str, ...], fields: dict[str, Json]) -> dict[str, Json]:
    """The non-null fields in the engine's order, whatever their order in the request."""
    if tuple(fields) == first and None not in fields.values():
        return dict(fields)
    ordered = {name: fields[name] for name in first if fields.get(name) is not None}
    rest = sorted(fields.keys() - ordered.keys() - IGNORED_FIELDS)
    return ordered | {name: fields[name] for name in rest if fields[name] is not None}
