"""The events of Anthropic's messages, and such a request as a chat: as vLLM 0.33 turns it into one. Pure.

vLLM's /v1/messages begins a new answer behind a last message of the assistant, so the rest is asked for as a chat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

from gateway.relay.grammars.grammar import Grammar, named
from gateway.relay.progress import NotResumable

_SAME: Final = ("model", "temperature", "top_p", "top_k", "cache_salt", "chat_template_kwargs", "vllm_xargs")
_BILLING: Final = "x-anthropic-billing-header"
"""How a text of a system prompt begins that vLLM leaves out: it differs in each request."""
_START: Final = "content_block_start"
_DELTA: Final = "content_block_delta"
_STOP: Final = "content_block_stop"


class Messages(Grammar):
    """Those of one stream. Its text is in one block. An engine that aborts it ends the block before it says so; then
    the rest is in a second one."""

    is_chat: ClassVar[bool] = True

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._index = 0
        self._is_open = False
        self._stop: dict[str, str | None] = {}

    @staticmethod
    def chat(document: dict[str, Any]) -> dict[str, Any]:
        chat: dict[str, Any] = {name: document[name] for name in _SAME if document.get(name) is not None}
        chat["messages"] = [*_system(document.get("system")), *map(_message, document["messages"])]
        chat["max_tokens"] = document["max_tokens"]
        if document.get("stop_sequences"):
            chat["stop"] = document["stop_sequences"]
        if (document.get("thinking") or {}).get("type") == "disabled":
            chat["reasoning_effort"] = "none"
        return chat

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
        if calls_tools:
            raise NotResumable("tool_calls")
        told = b""
        if text:
            if not self._is_open:
                self._index, self._is_open = self._index + 1, True
                told += self._event(_START, content_block={"type": "text", "text": ""})
            told += self._event(_DELTA, delta={"type": "text_delta", "text": text})
        if reason := choice.get("finish_reason"):
            self._stop = _stop(reason, choice.get("stop_reason"))
            if self._is_open:
                told += self._event(_STOP)
        return told

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


def _stop(finish_reason: str, stop: Any) -> dict[str, str | None]:
    """Why an answer ended, and the stop sequence that it came upon."""
    if finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _system(system: Any) -> Iterator[dict[str, Any]]:
    if isinstance(system, str):
        texts = [system]
    else:
        texts = [block["text"] for block in system or () if block["type"] == "text"]
        texts = [text for text in texts if not text.startswith(_BILLING)]
    if text := "".join(texts):
        yield {"role": "system", "content": text}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Raises NotResumable for what a chat would say in other messages: tools, and thoughts."""
    role, content = message["role"], message["content"]
    if role not in ("user", "assistant"):
        raise NotResumable(role)
    if isinstance(content, str):
        return {"role": role, "content": content}
    parts = [_part(block) for block in content if block["type"] != "text" or block["text"]]
    is_one_text = len(parts) == 1 and parts[0]["type"] == "text"
    return {"role": role, "content": parts[0]["text"] if is_one_text else parts}


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    if block["type"] != "image":
        raise NotResumable(block["type"])
    source = block["source"]
    data = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    url = source.get("url", "") if source.get("type") == "url" else data
    return {"type": "image_url", "image_url": {"url": url}}
