"""The events of Anthropic's messages, as vLLM 0.33 writes them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from gateway.relay.grammars.grammar import Grammar, named
from gateway.relay.grammars.messages_as_chat import has_system_role, messages_as_chat
from gateway.relay.progress import NotResumable

_START: Final = "content_block_start"
_DELTA: Final = "content_block_delta"
_STOP: Final = "content_block_stop"


class Messages(Grammar):
    """Those of one stream. Its text is in one block. An engine that aborts it ends the block before it says so; then
    the rest is in a second one. Each call of a tool is a block of its own. Text behind it waits for its end."""

    is_chat: ClassVar[bool] = True

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._index = 0
        self._is_open = False
        self._stop: dict[str, str | None] = {}
        self._call_ids: dict[int, str] = {}
        """Those of the calls of tools, by their index in the chat."""
        self._call_id = ""
        """That of the block that is open, if it is a call."""
        self._arguments = ""
        """Of the last call so far."""
        self._waiting = ""
        """Text behind a call that is not over."""

    @staticmethod
    def chat(document: dict[str, Any]) -> dict[str, Any]:
        return messages_as_chat(document)

    @staticmethod
    def other_chat(document: dict[str, Any]) -> dict[str, Any] | None:
        is_other = any(map(has_system_role, document["messages"]))
        return messages_as_chat(document, merges_system=True) if is_other else None

    def take(self, event: Mapping[str, Any]) -> None:
        kind, progress = event.get("type"), self.progress
        if kind == "message_start":
            usage = (event.get("message") or {}).get("usage") or {}
            told = (usage.get(f"{name}input_tokens") for name in ("", "cache_read_", "cache_creation_"))
            progress.prompt_tokens = sum(filter(None, told))
        elif kind == _START:
            if (block := event["content_block"]["type"]) != "text":
                raise NotResumable(block)
            self._index, self._is_open = event["index"], True
        elif kind == _DELTA:
            if (part := event["delta"]["type"]) != "text_delta":
                raise NotResumable(part)
            progress.shape = progress.shape or dict(event)
            self.take_part(event["delta"]["text"], None)
        elif kind == _STOP:
            self._is_open = False
        elif kind == "message_delta":
            progress.finish_reason, progress.has_usage = event["delta"]["stop_reason"], True
        elif kind not in ("message_stop", "ping"):
            raise NotResumable("events")

    def take_part(self, text: Any, numbers: list[int] | None) -> None:
        self.progress.add(text, None)

    def part(self, text: str, choice: Mapping[str, Any], document: Mapping[str, Any], *, calls_tools: bool) -> bytes:
        told = self._text(text) if text else b""
        if calls_tools:
            told += b"".join(map(self._call, choice["delta"].get("tool_calls") or ()))
        if reason := choice.get("finish_reason"):
            self._stop = self._why_stopped(reason, choice.get("stop_reason"))
            told += self._end_of_block()
        return told

    def _text(self, text: str) -> bytes:
        if self._call_id:
            self._waiting += text
            return b""
        opening = b"" if self._is_open else self._block({"type": "text", "text": ""})
        return opening + self._event(_DELTA, delta={"type": "text_delta", "text": text})

    def _call(self, call: Mapping[str, Any]) -> bytes:
        """A part of a call of a tool. Only its first one has an id and a name."""
        function, told = call.get("function") or {}, b""
        call_id = self._call_ids[call["index"]] = call.get("id") or self._call_ids[call["index"]]
        if call_id != self._call_id and function.get("name"):
            told = self._end_of_block()
            told += self._block({"type": "tool_use", "id": call_id, "name": function["name"], "input": {}})
            self._call_id, self._arguments = call_id, ""
        if call_id == self._call_id and (arguments := function.get("arguments")):
            self._arguments += arguments
            told += self._event(_DELTA, delta={"type": "input_json_delta", "partial_json": arguments})
        return told

    def _block(self, block: dict[str, Any]) -> bytes:
        self._index, self._is_open = self._index + 1, True
        return self._event(_START, content_block=block)

    def _end_of_block(self) -> bytes:
        """Text that has waited is a block, too."""
        told = self._event(_STOP) if self._is_open else b""
        self._is_open, self._call_id = False, ""
        if text := self._waiting:
            self._waiting = ""
            told += self._text(text) + self._end_of_block()
        return told

    def _why_stopped(self, finish_reason: str, stop: Any) -> dict[str, str | None]:
        """Why an answer ended, and the stop sequence that it came upon. A call that it cut short must not run."""
        sequence = None
        if finish_reason == "length":
            reason = "max_tokens"
        elif self._call_ids and _is_json(self._arguments):
            reason = "tool_use"
        elif isinstance(stop, str):
            reason, sequence = "stop_sequence", stop
        else:
            reason = "tool_use" if self._call_ids else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def usage(self, usage: Mapping[str, Any], document: Mapping[str, Any]) -> bytes:
        told = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        details = usage.get("prompt_tokens_details") or {}
        for name, of_chat in (("cache_creation", "created_cache_tokens"), ("cache_read", "cached_tokens")):
            if (tokens := details.get(of_chat)) is not None:
                told[f"{name}_input_tokens"] = tokens
                told["input_tokens"] -= tokens
        told["input_tokens"] = max(0, told["input_tokens"])
        return named("message_delta", {"type": "message_delta", "delta": self._stop, "usage": told})

    def end(self, comment: bytes) -> bytes:
        if not self.progress.has_usage:
            raise NotResumable("usage")
        return comment + named("message_stop", {"type": "message_stop"})

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named(kind, {"type": kind, **fields, "index": self._index})


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True
