"""Chat messages: `/v1/chat/completions`, `/tokenize` and `/v1/embeddings` with messages."""

from __future__ import annotations

from typing import Final

from gateway.errors import bad_field
from gateway.prompt import stream as tags
from gateway.prompt.fields import Json, list_at, object_at, sorted_json, utf8
from gateway.prompt.parts import drop_uuids, write_content_text, write_part, write_parts
from gateway.prompt.root import CHAT, EMBEDDING_CHAT, CacheScope, write_flags, write_root, write_tools
from gateway.prompt.writer import PromptWriter

KEYED_MESSAGES: Final = 16
"""A key ends after each of the last 16 messages. A next turn that adds fewer than 16 finds this turn's tip."""

_ROOT_FLAGS: Final = (("add_special_tokens", False),)
# This flag and `add_generation_prompt` change only the end of the prompt, so they are written behind the messages.
_CONTINUES: Final = ("continue_final_message", False)

_MESSAGE_FIELDS: Final = frozenset(
    {"role", "content", "name", "tool_call_id", "reasoning", "reasoning_content", "tool_calls"}
)
_CALL_FIELDS: Final = frozenset({"id", "function"})
_FUNCTION_CALL_FIELDS: Final = _CALL_FIELDS | {"type"}
_FUNCTION_FIELDS: Final = frozenset({"name", "arguments"})


def read_chat(writer: PromptWriter, body: dict[str, Json], scope: CacheScope) -> None:
    """A chat completion, or the tokenization of one."""
    write_root(writer, scope, CHAT, body, _ROOT_FLAGS)
    _write_conversation(writer, body, body.get("messages"), "messages")
    write_flags(writer, body, (("add_generation_prompt", True), _CONTINUES))


def read_embedding_chat(
    writer: PromptWriter, body: dict[str, Json], scope: CacheScope, messages: Json, param: str
) -> None:
    """An embedding of a conversation, or of several, of which the first one stands for the request."""
    write_root(writer, scope, EMBEDDING_CHAT, body, _ROOT_FLAGS)
    if isinstance(messages, list) and messages and isinstance(messages[0], list):
        for conversation in messages[1:]:
            drop_uuids(writer, conversation)
        messages, param = messages[0], f"{param}[0]"
    _write_conversation(writer, body, messages, param)
    write_flags(writer, body, (("add_generation_prompt", False), _CONTINUES))


def _write_conversation(writer: PromptWriter, body: dict[str, Json], messages: Json, param: str) -> None:
    # These change the decoded image. Engines hash them with it, but some vLLM versions do not if the image has a uuid.
    writer.pins_images = not body.get("media_io_kwargs")
    write_tools(writer, body.get("tools"))
    writer.end_root()
    count = len(list_at(messages, param))
    writer.expect_messages(count, param)
    first_keyed = count - KEYED_MESSAGES
    for index, message in enumerate(messages):
        _write_message(writer, message, f"{param}[{index}]")
        writer.close_message(keyed=index >= first_keyed)


def _write_message(writer: PromptWriter, message: Json, param: str) -> None:
    role = writer.open_message(object_at(message, param).get("role"), f"{param}.role")
    plain = len(message) == 2 and "content" in message  # no other fields to look for
    if not plain:
        _write_fields_before_content(writer, message, role, param)
    content = message.get("content")
    if isinstance(content, str):
        write_content_text(writer, role, content, f"{param}.content")
    elif isinstance(content, list):
        write_parts(writer, content, f"{param}.content", role=role)
    elif content is not None:
        raise bad_field(f"{param}.content", "must be a string or a list of parts")
    if not plain:
        if (calls := message.get("tool_calls")) is not None:
            _write_tool_calls(writer, calls, f"{param}.tool_calls")
        writer.other_fields(tags.FIELD, message, _MESSAGE_FIELDS, param)


def _write_fields_before_content(writer: PromptWriter, message: dict[str, Json], role: str, param: str) -> None:
    writer.optional_field(tags.NAME, message.get("name"), f"{param}.name")
    writer.optional_field(tags.CALL_ID, message.get("tool_call_id"), f"{param}.tool_call_id")
    for name in ("reasoning", "reasoning_content"):  # the second one is the older name
        if (reasoning := message.get(name)) is not None:
            _write_reasoning(writer, reasoning, role, f"{param}.{name}")
            return


def _write_reasoning(writer: PromptWriter, reasoning: Json, role: str, param: str) -> None:
    """A text, or one content part with the embeddings of a text. vLLM knows no other part here."""
    if isinstance(reasoning, dict) and reasoning.get("type") == "prompt_embeds":
        writer.stream.field(tags.FIELD, b"reasoning", b'"prompt_embeds"')  # the part belongs to no content
        write_part(writer, reasoning, param, role=role)
    else:
        writer.stream.text(utf8(reasoning, param), tags.REASONING)


def _write_tool_calls(writer: PromptWriter, calls: Json, param: str) -> None:
    writer.steps.take(len(list_at(calls, param)))
    for index, call in enumerate(calls):
        at = f"{param}[{index}]"
        function = object_at(object_at(call, at).get("function"), f"{at}.function")
        writer.stream.field(tags.CALL, utf8(function.get("name"), f"{at}.function.name"))
        writer.optional_field(tags.CALL_ID, call.get("id"), f"{at}.id")
        known = _FUNCTION_CALL_FIELDS if call.get("type") == "function" else _CALL_FIELDS
        writer.other_fields(tags.CALL_FIELD, call, known, at)
        if len(function) > len(_FUNCTION_FIELDS):
            rest = {name: value for name, value in function.items() if name not in _FUNCTION_FIELDS}
            writer.stream.field(tags.CALL_FIELD, b"function", sorted_json(rest, f"{at}.function"))
        writer.arguments(function.get("arguments"), f"{at}.function.arguments")
