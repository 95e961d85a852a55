"""Anthropic's Messages API, `/v1/messages`, written as the chat messages that vLLM translates it to."""

from __future__ import annotations

from functools import partial
from typing import Final

from gateway.errors import bad_field
from gateway.prompt.fields import Json, list_at, object_at, utf8
from gateway.prompt.images import identify_image_data
from gateway.prompt.parts import BILLING_HEADER, write_content_text
from gateway.prompt.root import CHAT, CacheScope, write_option, write_root, write_tools
from gateway.prompt.turns import Named, ToolCall, Turn, write_turns
from gateway.prompt.writer import PromptWriter

_TOOL_CHANGES: Final = ("tool_addition", "tool_removal")


def read_anthropic(writer: PromptWriter, body: dict[str, Json], scope: CacheScope) -> None:
    """A Messages request."""
    write_root(writer, scope, CHAT, {**body, "reasoning_effort": _reasoning_effort(body)})
    messages = list_at(body.get("messages"), "messages")
    writer.expect_messages(len(messages), "messages")
    if changes := [change for message in messages for change in _tool_changes(writer, message)]:
        write_option(writer, "tool_changes", changes)
    if isinstance(tools := body.get("tools"), list):
        writer.steps.take(len(tools))
        tools = [_chat_tool(tool) for tool in tools]
    write_tools(writer, tools)
    writer.end_root()

    turns = []
    if (system := body.get("system")) is not None:
        turns += _system_turn(writer, Named("system", "system"), Named(system, "system"))
    for index, message in enumerate(messages):
        turns += _message_turns(writer, message, f"messages[{index}]")
    write_turns(writer, turns)


def _reasoning_effort(body: dict[str, Json]) -> Json:
    """vLLM's chat parameter. Disabled thinking is "none" here, also if vLLM sets another value for a template."""
    thinking, output = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        return "none"
    return output.get("effort") if isinstance(output, dict) else None


def _tool_changes(writer: PromptWriter, message: Json) -> list[Json]:
    """The blocks of a system message that add tools or remove them. vLLM changes its list of tools by them, which is at
    the beginning of the prompt."""
    blocks = message.get("content") if isinstance(message, dict) and message.get("role") == "system" else None
    if not isinstance(blocks, list):
        return []
    writer.steps.take(len(blocks))
    return [
        [block["type"], block.get("tool")]
        for block in blocks
        if isinstance(block, dict) and block.get("type") in _TOOL_CHANGES
    ]


def _chat_tool(tool: Json) -> Json:
    """A client's tool in chat form; any other tool unchanged."""
    if not isinstance(tool, dict) or not isinstance(schema := tool.get("input_schema"), dict):
        return tool
    rest = {name: value for name, value in tool.items() if name not in ("input_schema", "cache_control", "type")}
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    return {"type": "function", "function": {**rest, "parameters": parameters}}


def _system_turn(writer: PromptWriter, role: Named, content: Named) -> list[Turn]:
    """The system prompt. The engine joins its text blocks, and without text there is no system message."""
    value, param = content
    if isinstance(value, list):
        writer.expect_parts(len(value), param)
        texts = []
        for index, block in enumerate(value):
            block_param = f"{param}[{index}]"
            writer.drop_uuid(object_at(block, block_param))
            if block.get("type") == "text":
                utf8(text := block.get("text"), f"{block_param}.text")
                texts += [] if text.startswith(BILLING_HEADER) else [text]
        value = "".join(texts)
    elif not isinstance(value, str):
        raise bad_field(param, "must be a string or a list of blocks")
    if not value:
        return []
    return [Turn(role, parts=[partial(write_content_text, writer, "system", value, param)])]


def _message_turns(writer: PromptWriter, message: Json, param: str) -> list[Turn]:
    role = Named(object_at(message, param).get("role"), f"{param}.role")
    content = Named(message.get("content"), f"{param}.content")
    if role.value == "system":
        return _system_turn(writer, role, content)
    if isinstance(content.value, str):
        return [Turn(role, parts=[partial(writer.text, *content)])]
    if not isinstance(content.value, list):
        raise bad_field(content.param, "must be a string or a list of blocks")
    writer.expect_parts(len(content.value), content.param)
    turn = Turn(role)
    results: list[Turn] = []
    for index, block in enumerate(content.value):
        _read_block(writer, Named(block, f"{content.param}[{index}]"), turn, results)
    # A user's tool results become messages of their own, before the user's other blocks.
    only_results = bool(results) and not (turn.parts or turn.calls or turn.reasoning)
    return results if only_results else [*results, turn]


def _read_block(writer: PromptWriter, named: Named, turn: Turn, results: list[Turn]) -> None:
    """Add one content block to `turn`. A tool result becomes turns of its own, in `results`."""
    block, param = named
    writer.drop_uuid(object_at(block, param))
    match block.get("type"):
        case "text":
            if block.get("text") != "":
                turn.parts.append(partial(writer.text, block.get("text"), f"{param}.text"))
        case "image":
            turn.parts.append(partial(_write_image, writer, block.get("source"), f"{param}.source"))
        case "thinking":
            turn.reasoning = turn.reasoning or bytearray()
            turn.reasoning += utf8(block.get("thinking"), f"{param}.thinking")
        case "redacted_thinking":  # encrypted, never rendered
            pass
        case "tool_use":
            turn.calls.append(
                ToolCall(
                    name=Named(block.get("name"), f"{param}.name"),
                    call_id=Named(block.get("id"), f"{param}.id"),
                    arguments=Named(block.get("input"), f"{param}.input"),
                )
            )
        case "tool_result" if turn.role.value == "user":
            results += _tool_result_turns(writer, block, param)
        case _:
            turn.parts.append(partial(writer.unknown_part, block, param))


def _tool_result_turns(writer: PromptWriter, block: dict[str, Json], param: str) -> list[Turn]:
    """A tool's message, and a user's message with the images that the tool returned."""
    content, at = block.get("content"), f"{param}.content"
    tool = Turn(Named("tool", param), call_id=Named(block.get("tool_use_id"), f"{param}.tool_use_id"))
    images = Turn(Named("user", param))
    texts: list[str] = []
    if isinstance(content, str):
        texts = [content]
    elif content is not None:
        writer.expect_parts(len(list_at(content, at)), at)
        for index, item in enumerate(content):
            item_param = f"{at}[{index}]"
            writer.drop_uuid(object_at(item, item_param))
            if item.get("type") == "text":
                utf8(text := item.get("text"), f"{item_param}.text")
                texts.append(text)
            elif item.get("type") == "image":
                images.parts.append(partial(_write_image, writer, item.get("source"), f"{item_param}.source"))
            else:
                tool.parts.append(partial(writer.unknown_part, item, item_param))
    tool.parts.insert(0, partial(writer.text, "\n".join(texts), at))
    return [tool, images] if images.parts else [tool]


def _write_image(writer: PromptWriter, source: Json, param: str) -> None:
    if object_at(source, param).get("type") == "url":
        url = source.get("url")
        utf8(url, f"{param}.url")
        writer.image(url, f"{param}.url")
        return
    data = source.get("data")
    utf8(data, f"{param}.data")
    writer.identified_image(identify_image_data(data, f"{param}.data", writer.limits))
