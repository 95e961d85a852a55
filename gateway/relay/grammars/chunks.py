"""The events of chats and completions: chunks of OpenAI's APIs, and `[DONE]`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import orjson

from gateway.relay.grammars.grammar import Grammar
from gateway.relay.progress import NotResumable

_DONE: Final = b"data: [DONE]\n\n"
_SAME: Final = frozenset({"id", "object", "created"})
"""What all events of a stream have in common, beside its model."""


class Chunks(Grammar):
    """Those of one stream."""

    always_tells_usage: ClassVar[bool] = False

    def take(self, event: Mapping[str, Any]) -> None:
        choices, progress = event.get("choices"), self.progress
        if not isinstance(choices, list):
            raise NotResumable("events")
        choice = choices[0] if choices else {}
        if not isinstance(choice, dict):
            raise NotResumable("events")
        for told in (event, choice):
            if not progress.prompt_ids and isinstance(ids := told.get("prompt_token_ids"), list):
                progress.prompt_ids = ids
        if not choices:
            progress.has_usage = progress.has_usage or event.get("usage") is not None
            return
        delta = choice.get("delta", choice.get("text"))
        progress.add(delta, choice.get("token_ids"))
        if not progress.shape and "role" not in choice.get("delta", ()):
            progress.shape = {**event, "choices": [choice]}
        progress.finish_reason = choice.get("finish_reason") or progress.finish_reason

    def take_part(self, text: Any, numbers: list[int] | None) -> None:
        self.progress.add(text, numbers)

    def part(self, text: str, choice: Mapping[str, Any], document: Mapping[str, Any], *, calls_tools: bool) -> bytes:
        """A choice in the shape of those that came before it."""
        shape, reason = self.progress.shape["choices"][0], choice.get("finish_reason")
        told = _nulls(shape) | {"index": 0, "logprobs": None, "finish_reason": reason}
        told |= {"delta": {"content": text}} if "delta" in shape else {"text": text}
        if calls_tools:
            told["delta"] = choice.get("delta")
        if reason:
            told |= {name: None for name in _nulls(choice) if not name.startswith("prompt_")}
            told |= {"finish_reason": reason, "stop_reason": choice.get("stop_reason")}
        told |= {name: None for name in ("prompt_token_ids", "token_ids") if name in shape}
        usage = document.get("usage") if "usage" in self.progress.shape else None
        return self._written(document, [told], usage, _nulls(self.progress.shape))

    def usage(self, usage: Mapping[str, Any], document: Mapping[str, Any]) -> bytes:
        return self._written(document, [], usage, {})

    def _written(self, document: Mapping[str, Any], choices: list[Any], usage: Any, nulls: dict[str, None]) -> bytes:
        shape = self.progress.shape
        told: dict[str, Any] = {name: value for name, value in shape.items() if name in _SAME}
        told |= {"model": self._model or shape.get("model", ""), "choices": choices, **nulls}
        if document.get("system_fingerprint") is not None:
            told["system_fingerprint"] = document["system_fingerprint"]
        if isinstance(usage, Mapping):
            told["usage"] = usage
        return b"data: " + orjson.dumps(told) + b"\n\n"

    def end(self, comment: bytes) -> bytes:
        return comment + _DONE


def _nulls(fields: Mapping[str, Any]) -> dict[str, None]:
    """The fields that an engine sends with null."""
    return {name: None for name, value in fields.items() if value is None}
