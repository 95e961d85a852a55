"""Requests of messages and responses as chats: here, and at the simulated replica, as vLLM 0.33 turns them into chats.

`captures/vllm-named-requests.jsonl` has what vLLM's own code makes of each request.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.endpoints import ENDPOINTS
from gateway.relay.grammars import grammar_of
from gateway.relay.progress import NotResumable
from gateway.request.reading.resumable import why_not_resumed
from gateway.simulator import messages_api, responses_api

CAPTURES = Path(__file__).parents[2] / "captures" / "vllm-named-requests.jsonl"
RECORDED = [json.loads(line) for line in CAPTURES.read_text().splitlines()]
NAMES = [f"{each['path']} {number}" for number, each in enumerate(RECORDED)]
TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {}}


def as_chat(path: str, body: dict[str, Any]) -> dict[str, Any]:
    return grammar_of(ENDPOINTS[path], "").chat(body)


def simulated(path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path == "/v1/messages":
        return messages_api._chat_body(body)
    return responses_api._chat_body(body, responses_api._input_messages(body))


def shown(chat: dict[str, Any]) -> dict[str, Any]:
    """What templates and parsers see of a chat: vLLM takes both names of text parts, and fills in tools."""
    messages = [{name: each for name, each in message.items() if name != "type"} for message in chat["messages"]]
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = [_part(part) for part in message["content"]]
    tools = [_function(tool["function"]) for tool in chat.get("tools") or ()]
    choice, is_parallel = chat.get("tool_choice") or "auto", chat.get("parallel_tool_calls") is not False
    return {"messages": messages, "tools": tools} | ({"choice": choice, "parallel": is_parallel} if tools else {})


def _part(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": part["text"]} if "text" in part else {"type": part["type"], **part["image_url"]}


def _function(function: dict[str, Any]) -> str:
    """Templates see the order of the fields in a schema."""
    told = {"description": None, "parameters": None} | {
        name: each for name, each in function.items() if each is not None
    }
    return json.dumps([[name, told[name]] for name in sorted(told)])


@pytest.mark.parametrize("recorded", RECORDED, ids=NAMES)
@pytest.mark.parametrize("turned", [as_chat, simulated])
def test_a_request_is_turned_into_the_chat_that_vllm_makes_of_it(
    recorded: dict[str, Any], turned: Callable[[str, dict[str, Any]], dict[str, Any]]
) -> None:
    path, body, chat = recorded["path"], recorded["body"], recorded["chat"]
    assert why_not_resumed(ENDPOINTS[path], body) == ""
    told, wanted = shown(turned(path, body)), shown(chat)
    if turned is simulated:  # it calls one tool at most
        wanted |= {"parallel": True} if "parallel" in wanted else {}
    assert told == wanted
    if turned is as_chat:
        other = grammar_of(ENDPOINTS[path], "").other_chat(body)
        assert (other and shown(other)) == (shown(recorded["merged"]) if "merged" in recorded else None)
        limits = {name: chat[name] for name in ("max_tokens", "stop", "reasoning_effort") if name in chat}
        assert limits.items() <= turned(path, body).items()


@pytest.mark.parametrize(
    ("path", "given", "why"),
    [
        ("/v1/messages", {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}, "thinking"),
        ("/v1/messages", {"role": "assistant", "content": [{"type": "tool_result", "content": ""}]}, "tool_result"),
        ("/v1/messages", {"role": "system", "content": [{"type": "tool_addition"}]}, "tool_addition"),
        ("/v1/responses", {"type": "reasoning", "content": []}, "reasoning"),
        ("/v1/responses", {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""}, "custom_tool_call"),
        ("/v1/responses", {"type": "function_call", "namespace": "n"}, "function_call"),
        ("/v1/responses", {**TOOL, "type": "custom"}, "tools"),
        ("/v1/responses", {**TOOL, "type": "web_search"}, "tools"),
    ],
)
def test_what_is_not_turned_into_a_chat_says_why(path: str, given: dict[str, Any], why: str) -> None:
    is_tool = "parameters" in given
    body = {"messages": [given], "max_tokens": 1, "input": "a" if is_tool else [given], "tools": [given] * is_tool}
    with pytest.raises(NotResumable) as raised:
        as_chat(path, body)
    assert raised.value.reason == why


@pytest.mark.parametrize(
    ("path", "choice"),
    [("/v1/messages", {"type": "any"}), ("/v1/messages", {"type": "tool", "name": "f"}), ("/v1/responses", "required")],
)
def test_an_answer_that_has_to_call_a_tool_is_no_text(path: str, choice: Any) -> None:
    assert why_not_resumed(ENDPOINTS[path], {"tools": [TOOL], "tool_choice": choice}) == "tool_choice"
