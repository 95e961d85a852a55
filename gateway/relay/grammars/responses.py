"""The events of OpenAI's responses, as vLLM 0.33 writes them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from gateway.relay.grammars.grammar import Grammar, named
from gateway.relay.grammars.responses_as_chat import responses_as_chat
from gateway.relay.progress import NotResumable

_DELTA: Final = "response.output_text.delta"
_ADDED: Final = "response.output_item.added"
_PART_ADDED: Final = "response.content_part.added"
_DONE: Final = ("response.output_text.done", "response.content_part.done", "response.output_item.done")
"""The events that end a text, in their order."""
_OF_CALL: Final = "response.function_call_arguments"
_MESSAGE: Final = "message"


class Responses(Grammar):
    """Those of one stream. What its client has got is the only part of the only item, a text. Behind it, the rest may
    have calls of tools and more texts, each an item of its own."""

    is_chat: ClassVar[bool] = True

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._response: dict[str, Any] = {}
        """As the first event has it: without an answer."""
        self._items: list[dict[str, Any]] = []
        """The items before the current one."""
        self._item: dict[str, Any] = {}
        self._text_at = 0
        """Where its text begins in the answer's."""
        self._call = -1
        """The index of the last call of a tool in the chat."""
        self._usage: dict[str, Any] = {}
        self._number = 0
        """That of the next event."""
        self._done = 0
        """How many of the events came that end its text."""

    @staticmethod
    def chat(document: dict[str, Any]) -> dict[str, Any]:
        return responses_as_chat(document)

    def take(self, event: Mapping[str, Any]) -> None:
        kind, progress = event["type"], self.progress
        self._number = event["sequence_number"] + 1
        if kind == "response.created":
            self._response = event["response"]
        elif kind == _ADDED:
            if event["item"]["type"] != _MESSAGE or event["output_index"] != 0:
                raise NotResumable(event["item"]["type"])
            self._item = event["item"]
        elif kind == _DELTA:
            progress.shape = progress.shape or dict(event)
            progress.add(event["delta"], None)
        elif kind in _DONE:
            self._done = _DONE.index(kind) + 1
            if kind == _DONE[-1]:
                self._item = event["item"]
                progress.finish_reason = "length" if event["item"]["status"] == "incomplete" else "stop"
                if progress.finish_reason == "stop" and self._response.get("tools"):
                    progress.finish_reason = ""  # a call of a tool may follow
        elif kind in ("response.completed", "response.incomplete"):
            progress.has_usage = True
        elif kind not in ("response.in_progress", _PART_ADDED):
            raise NotResumable("events")

    def take_part(self, text: Any, numbers: list[int] | None) -> None:
        self.progress.add(text, None)
        self._number = numbers[0] + 1 if numbers else self._number + 1

    def part(self, text: str, choice: Mapping[str, Any], document: Mapping[str, Any], *, calls_tools: bool) -> bytes:
        told = self._more(text) if text else b""
        if calls_tools:
            told += b"".join(map(self._called, choice["delta"].get("tool_calls") or ()))
        if reason := choice.get("finish_reason"):
            told += self._end_of_item("incomplete" if reason == "length" else "completed")
        return told

    def _more(self, text: str) -> bytes:
        told = b""
        if self._item["type"] != _MESSAGE:
            told = self._end_of_item()
            self._text_at = len(self.progress.text) - len(text)
            told += self._next_item({**self._items[0], "content": []}, "msg")
            told += self._event(_PART_ADDED, {**self._place(), "content_index": 0, "part": _part("", [])})
        elif self._done:
            raise NotResumable("ending")
        return told + self._event(_DELTA, {**self.progress.shape, **self._place(), "delta": text})

    def _called(self, call: Mapping[str, Any]) -> bytes:
        """A part of a call of a tool. Only its first one has an id and a name."""
        if (function := call.get("function")) is None:
            return b""
        told = b""
        if call["index"] != self._call or self._item["type"] == _MESSAGE:
            self._call, told = call["index"], self._end_of_item()
            item = {"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": ""}
            told += self._next_item(item, "fc")
        if arguments := function.get("arguments"):
            self._item["arguments"] += arguments
            told += self._event(f"{_OF_CALL}.delta", {**self._place(), "delta": arguments})
        return told

    def _next_item(self, item: dict[str, Any], prefix: str) -> bytes:
        """The current item is over."""
        self._items.append(self._item)
        _, _, name = self._items[0]["id"].partition("_")
        self._item = {**item, "id": f"{prefix}_{name}_{len(self._items)}", "status": "in_progress"}
        self._done = 0
        return self._event(_ADDED, {"output_index": len(self._items), "item": self._item})

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self._items)}

    def _end_of_item(self, status: str = "completed") -> bytes:
        self._item["status"], place = status, self._place()
        ends: tuple[str, ...] = _DONE
        if self._item["type"] == _MESSAGE:
            text, at = self.progress.text[self._text_at :], {**place, "content_index": 0}
            self._item["content"] = [part := _part(text, None)]
            fields = [{**at, "logprobs": [], "text": text}, {**at, "part": part}]
        else:
            ends = (f"{_OF_CALL}.done", _DONE[-1])
            fields = [{**place, "arguments": self._item["arguments"], "name": self._item["name"]}]
        fields.append({"item": self._item, "output_index": len(self._items)})
        left = list(zip(ends, fields, strict=True))[self._done :]
        self._done = len(_DONE)
        return b"".join(self._event(kind, told) for kind, told in left)

    def usage(self, usage: Mapping[str, Any], document: Mapping[str, Any]) -> bytes:
        details = usage.get("prompt_tokens_details") or {}
        cached, written = details.get("cached_tokens") or 0, details.get("created_cache_tokens") or 0
        of_prompt = {"cached_tokens": cached, "cache_write_tokens": written}
        of_answer = {"reasoning_tokens": 0, "tool_output_tokens": 0}
        self._usage = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**of_prompt, "input_tokens_per_turn": [], "cached_tokens_per_turn": []},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {**of_answer, "output_tokens_per_turn": [], "tool_output_tokens_per_turn": []},
            "total_tokens": usage["total_tokens"],
        }
        return b""

    def end(self, comment: bytes) -> bytes:
        if self.progress.has_usage and not self._usage:  # the client has got the last event
            return comment
        if not self._usage:
            raise NotResumable("usage")
        status = self._item["status"]
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        told = {
            "output": [*self._items, self._item],
            "status": status,
            "incomplete_details": details,
            "usage": self._usage,
        }
        model = self._model or self._response["model"]
        return comment + self._event(f"response.{status}", {"response": {**self._response, "model": model, **told}})

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        self._number += 1
        return named(kind, {**fields, "sequence_number": self._number - 1, "type": kind})


def _part(text: str, logprobs: list[Any] | None) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}
