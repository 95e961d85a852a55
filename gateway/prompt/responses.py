"""OpenAI's Responses API, `/v1/responses`, written as the chat messages that vLLM translates it to.

One message of the assistant may come as several items (reasoning, text, function calls). They are joined as vLLM joins
them. Only the replica that stored `previous_response_id` knows the prompt of a conversation that continues it; the id
stands for that prompt, in the root.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from gateway.errors import bad_field
from gateway.prompt.fields import Json, list_at, object_at, utf8
from gateway.prompt.parts import write_content_text, write_part
from gateway.prompt.root import CHAT, CacheScope, write_option, write_root, write_tools
from gateway.prompt.turns import Named, ToolCall, Turn, WritePart, write_turns
from gateway.prompt.writer import PromptWriter

_HISTORY_OPTIONS: Final = ("previous_response_id", "previous_input_messages", "prompt")


def read_responses(writer: PromptWriter, body: dict[str, Json], scope: CacheScope) -> None:
    """A Responses request."""
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    write_root(writer, scope, CHAT, {**body, "reasoning_effort": effort})
    for name in _HISTORY_OPTIONS:
        if (value := body.get(name)) is not None:
            write_option(writer, name, value)
    tools = body.get("tools")
    if isinstance(tools, list):
        writer.steps.take(len(tools))
        tools = [_chat_tool(tool) for tool in tools]
    write_tools(writer, tools)
    writer.end_root()
    write_turns(writer, _turns(writer, body))


def _chat_tool(tool: Json) -> Json:
    """A function in chat form; a built-in tool unchanged."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or "function" in tool:
        return tool
    function = {name: value for name, value in tool.items() if name not in ("type", "cache_control")}
    return {"type": "function", "function": function}


def _turns(writer: PromptWriter, body: dict[str, Json]) -> list[Turn]:
    turns: list[Turn] = []
    if (instructions := body.get("instructions")) not in (None, ""):
        write = partial(write_content_text, writer, "system", instructions, "instructions")
        turns.append(Turn(Named("system", "instructions"), parts=[write]))
    items = body.get("input")
    if isinstance(items, str):
        turns.append(Turn(Named("user", "input"), parts=[partial(writer.text, items, "input")]))
        return turns
    if not isinstance(items, list):
        raise bad_field("input", "must be a string or a list of items")
    writer.expect_messages(len(items), "input")
    for index, item in enumerate(items):
        _read_item(writer, turns, object_at(item, f"input[{index}]"), f"input[{index}]")
    return turns


def _read_item(writer: PromptWriter, turns: list[Turn], item: dict[str, Json], param: str) -> None:
    """Add an item to the assistant's turn that it belongs to, or as a turn of its own."""
    match item.get("type"):
        case "function_call" | "custom_tool_call" as kind:
            arguments = Named(item.get("arguments"), f"{param}.arguments")
            if kind == "custom_tool_call":  # vLLM shows the model a function of one argument
                arguments = Named({"input": item.get("input")}, f"{param}.input")
            call = ToolCall(
                name=Named(item.get("name"), f"{param}.name"),
                call_id=Named(item.get("call_id"), f"{param}.call_id"),
                arguments=arguments,
            )
            _assistant_turn(turns, param, joins=True).calls.append(call)
        case "reasoning":
            reasoning = _reasoning_text(writer, item, param)
            joins = bool(turns) and turns[-1].reasoning is None
            _assistant_turn(turns, param, joins=joins).reasoning = reasoning
        case "function_call_output" | "custom_tool_call_output":
            turn = Turn(Named("tool", param), call_id=Named(item.get("call_id"), f"{param}.call_id"))
            turn.parts = _content(writer, Named(item.get("output"), f"{param}.output"), "tool")
            turns.append(turn)
        case kind if kind in (None, "message") or "role" in item:  # vLLM reads it as a message, whatever its type
            role = item.get("role")
            content = _content(writer, Named(item.get("content"), f"{param}.content"), str(role))
            if role == "assistant":
                joins = bool(turns) and not turns[-1].parts
                _assistant_turn(turns, param, joins=joins).parts += content
            else:
                turns.append(Turn(Named(role, f"{param}.role"), parts=content))
        case _:  # the record of a built-in tool
            writer.drop_uuid(item)
            turns.append(Turn(Named("", param), parts=[partial(writer.unknown_part, item, param)]))


def _assistant_turn(turns: list[Turn], param: str, *, joins: bool) -> Turn:
    """The assistant's turn at the end of `turns` if the item `joins` it; else a new turn."""
    if not (joins and turns and turns[-1].role.value == "assistant"):
        turns.append(Turn(Named("assistant", f"{param}.role")))
    return turns[-1]


def _content(writer: PromptWriter, content: Named, role: str) -> list[WritePart]:
    value, param = content
    if isinstance(value, str):
        return [partial(write_content_text, writer, role, value, param)]
    writer.expect_parts(len(list_at(value, param)), param)
    return [partial(write_part, writer, part, f"{param}[{index}]", role=role) for index, part in enumerate(value)]


def _reasoning_text(writer: PromptWriter, item: dict[str, Json], param: str) -> bytearray:
    """The reasoning itself if the item has it, else its summary."""
    name = "content" if item.get("content") else "summary"
    texts = list_at(item.get(name) or [], f"{param}.{name}")
    writer.expect_parts(len(texts), f"{param}.{name}")
    read = bytearray()
    for index, text in enumerate(texts):
        at = f"{param}.{name}[{index}]"
        read += utf8(object_at(text, at).get("text"), f"{at}.text")
    return read
