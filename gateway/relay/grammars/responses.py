"""The events of OpenAI's responses, and such a request as a chat: as vLLM 0.33 turns it into one. Pure.

vLLM's /v1/responses continues a last item that is incomplete, but does not say whether it has. So the rest is asked for
as a chat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

from gateway.relay.grammars.grammar import Grammar, named
from gateway.relay.progress import NotResumable
from gateway.request.reading.resumable import SAMPLING

_SAME: Final = SAMPLING | {"model", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs"}
_UNFINISHED: Final = ("in_progress", "incomplete")
_DELTA: Final = "response.output_text.delta"
_DONE: Final = ("response.output_text.done", "response.content_part.done", "response.output_item.done")
"""The events that end the only item, in their order."""


class Responses(Grammar):
    """Those of one stream. Its text is in the only part of its only item."""

    is_chat: ClassVar[bool] = True

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._response: dict[str, Any] = {}
        """As the first event has it: without an answer."""
        self._item: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._number = 0
        """That of the next event."""
        self._done = 0
        """How many of the events came that end the item."""

    @staticmethod
    def chat(document: dict[str, Any]) -> dict[str, Any]:
        chat: dict[str, Any] = {name: document[name] for name in _SAME if document.get(name) is not None}
        given, instructions = document["input"], document.get("instructions")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        system = [{"role": "system", "content": instructions}] if instructions else []
        chat["messages"] = [*system, *map(_message, items)]
        if items[-1].get("status") in _UNFINISHED:
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
        if document.get("max_output_tokens") is not None:
            chat["max_tokens"] = document["max_output_tokens"]
        return chat

    def take(self, event: Mapping[str, Any]) -> None:
        kind, progress = event["type"], self.progress
        self._number = event["sequence_number"] + 1
        if kind == "response.created":
            self._response = event["response"]
        elif kind == "response.output_item.added":
            if event["item"]["type"] != "message" or event["output_index"] != 0:
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
        elif kind in ("response.completed", "response.incomplete"):
            progress.has_usage = True
        elif kind not in ("response.in_progress", "response.content_part.added"):
            raise NotResumable("events")

    def take_part(self, text: Any, numbers: list[int] | None) -> None:
        self.progress.add(text, None)
        self._number = numbers[0] + 1 if numbers else self._number + 1

    def part(self, text: str, choice: Mapping[str, Any], document: Mapping[str, Any], *, calls_tools: bool) -> bytes:
        if calls_tools:
            raise NotResumable("tool_calls")
        if text and self._done:
            raise NotResumable("ending")
        told = self._event(_DELTA, {**self.progress.shape, "delta": text}) if text else b""
        if reason := choice.get("finish_reason"):
            told += b"".join(self._end_of_item(reason))
        return told

    def _end_of_item(self, reason: str) -> Iterator[bytes]:
        self._item |= {"status": "incomplete" if reason == "length" else "completed", "content": [self._part()]}
        place = {name: self.progress.shape[name] for name in ("item_id", "output_index", "content_index")}
        text = {**place, "logprobs": [], "text": self.progress.text}
        item = {"item": self._item, "output_index": place["output_index"]}
        fields = (text, {**place, "part": self._part()}, item)
        for kind, told in list(zip(_DONE, fields, strict=True))[self._done :]:
            yield self._event(kind, told)
        self._done = len(_DONE)

    def _part(self) -> dict[str, Any]:
        return {"annotations": [], "text": self.progress.text, "type": "output_text", "logprobs": None}

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
        told = {"output": [self._item], "status": status, "incomplete_details": details, "usage": self._usage}
        model = self._model or self._response["model"]
        return comment + self._event(f"response.{status}", {"response": {**self._response, "model": model, **told}})

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        self._number += 1
        return named(kind, {**fields, "sequence_number": self._number - 1, "type": kind})


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    """Raises NotResumable for what is no message."""
    if (kind := item.get("type", "message")) != "message":
        raise NotResumable(kind)
    role, content = item["role"], item["content"]
    if role == "assistant" and not isinstance(content, str):
        content = content[0]["text"]
    return {"role": role, "content": content if isinstance(content, str) else list(map(_content, content))}


def _content(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] in ("input_text", "output_text", "text"):
        return {"type": "text", "text": part["text"]}
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise NotResumable(part["type"])
