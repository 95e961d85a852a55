"""Joins the rest of an answer to what its client has got: the events of a continuation become those of one stream.

The client sees one id, one role, each token once, one finish reason, the usage of the whole answer, and one end. Pure.
"""

from __future__ import annotations

from typing import Any

import orjson

from gateway.relay.continuation import CHAT, Continuation, NotResumable, Progress, text_of
from gateway.relay.endings import unfinished
from gateway.relay.events import event_data, kind_of, split_events

_DONE = b"data: [DONE]\n\n"
_FEW_TOKENS = 8
_HEADER_TOKENS = 3
"""A template's header of an answer ends with these tokens of its own, and no text of an answer does."""
_SAME = frozenset({"id", "object", "created"})
"""What all events of a stream have in common, beside its model."""


class Seam:
    """What a client has got of one stream, and how the events that come next are joined to it."""

    def __init__(self, progress: Progress, model: str, wants_usage: bool) -> None:
        """`model`: the name that the client used."""
        self.progress = progress
        self.why_lost = ""
        """Why the rest did not fit to what the client had, or was not given; empty if it fitted."""
        self.times = 0
        """How often the stream went on elsewhere."""
        self.short_runs = 0
        """How often it broke again after few tokens."""
        self._model = model
        self._wants_usage = wants_usage
        self._overlap = ""
        self._given_tokens = 0
        """The tokens of the answer that the current prompt goes on from."""
        self._ids: list[int] = []
        """All token ids that were told when the stream broke."""
        self._given_prompt_tokens = 0
        """The tokens of the current prompt behind the first one: the same, unless the text was cut in another way."""
        self._is_exact, self._is_unseen, self._calls_tools = True, False, False

    def broke(self) -> None:
        """The stream, or its rest, broke off."""
        if self._calls_tools:
            self.why_lost = "tool_calls"
        if self.progress.tokens < self._given_tokens + _FEW_TOKENS:
            self.short_runs += 1

    def goes_on(self, rest: Continuation) -> None:
        """The next events are an answer to this."""
        progress = self.progress
        self.times += 1
        self._ids = progress.ids
        self._is_exact, self._overlap, self._given_tokens = rest.is_exact, rest.overlap, rest.given_tokens
        self._given_prompt_tokens, self._is_unseen = rest.given_tokens, rest.path == CHAT
        progress.ids = progress.ids[: rest.given_tokens] if rest.is_exact else []
        progress.places = [each for each in progress.places if each.ids <= len(progress.ids)]

    def events(self, data: bytes) -> bytes:
        """Whole events of the continuation as the client gets them: nothing more once they do not fit (`why_lost`)."""
        found = []
        for event in split_events(data) if data and not self.why_lost else ():
            try:
                found.append(self._event(event))
            except NotResumable as error:
                self.why_lost = error.reason
                break
        return b"".join(found)

    def seen_tokens(self) -> int:
        """The tokens of the answer that the client has got."""
        return self.progress.tokens

    def _event(self, event: bytes) -> bytes:
        document = event_data(event)
        if document is None:
            return self.end() if kind_of(event) == b"[DONE]" else b""
        if unfinished(document) is not None:  # the request for the rest is refused; the client has not sent it
            raise NotResumable("error_event")
        choices = document.get("choices")
        if not choices:
            return self._usage_event(document)
        if self._is_unseen:
            self._look_at_prompt(document)
        choice = choices[0]
        if not isinstance(choice, dict):
            raise NotResumable("events")
        delta, ids = choice.get("delta", choice.get("text")), choice.get("token_ids")
        if isinstance(delta, dict) and "role" in delta:
            return b""
        text = self._beyond_overlap(self._text(delta))
        self.progress.add(text, ids if self._is_exact else None)
        reason = self.progress.finish_reason = choice.get("finish_reason") or ""
        is_told = text or reason or self._calls_tools
        return self._written(document, self._choice(choice, text, delta)) if is_told else b""

    def _look_at_prompt(self, document: dict[str, Any]) -> None:
        """The first event of a chat tells its prompt: that of the first request, and behind it the answer so far.
        Raises NotResumable if the engine begins the answer anew, or if its template may have trimmed the text."""
        self._is_unseen, before, progress = False, self.progress.prompt_ids, self.progress
        told = document.get("prompt_token_ids")
        if not isinstance(told, list) or told[: len(before)] != before:
            raise NotResumable("restarted")
        behind = told[len(before) :]
        self._given_prompt_tokens, self._is_exact = len(behind), behind == self._ids
        if self._is_exact:
            progress.ids = behind
        elif not behind or behind[-_HEADER_TOKENS:] == before[-_HEADER_TOKENS:] or progress.text[-1:].isspace():
            raise NotResumable("restarted")

    def _text(self, delta: Any) -> str:
        """The text of a part. Behind its text, a chat may call tools."""
        if isinstance(delta, dict) and delta.get("tool_calls"):
            self._calls_tools = True
        if self._calls_tools and isinstance(delta, dict):
            return delta.get("content") or ""
        return text_of(delta)

    def _beyond_overlap(self, text: str) -> str:
        overlap = self._overlap
        if not overlap or not text:
            return text
        if not text.startswith(overlap) and not overlap.startswith(text):
            raise NotResumable("diverged")
        self._overlap = overlap[len(text) :]
        return text[len(overlap) :]

    def _choice(self, choice: dict[str, Any], text: str, delta: Any = None) -> dict[str, Any]:
        """A choice in the shape of those that came before it."""
        shape, reason = self.progress.shape["choices"][0], choice.get("finish_reason")
        told = _nulls(shape) | {"index": 0, "logprobs": None, "finish_reason": reason}
        told |= {"delta": {"content": text}} if "delta" in shape else {"text": text}
        if self._calls_tools:
            told["delta"] = delta
        if reason:
            told |= {name: None for name in _nulls(choice) if not name.startswith("prompt_")}
            told |= {"finish_reason": reason, "stop_reason": choice.get("stop_reason")}
        return told | {name: None for name in ("prompt_token_ids", "token_ids") if name in shape}

    def _written(self, document: dict[str, Any], choice: dict[str, Any] | None) -> bytes:
        shape = self.progress.shape
        told: dict[str, Any] = {name: value for name, value in shape.items() if name in _SAME}
        told |= {"model": self._model, "choices": [] if choice is None else [choice]}
        if choice is not None:
            told |= _nulls(shape)
        if document.get("system_fingerprint") is not None:
            told["system_fingerprint"] = document["system_fingerprint"]
        if (choice is None or "usage" in shape) and isinstance(usage := document.get("usage"), dict):
            told["usage"] = self.usage(usage)
        return b"data: " + orjson.dumps(told) + b"\n\n"

    def _usage_event(self, document: dict[str, Any]) -> bytes:
        if not self._wants_usage or self.progress.has_usage or document.get("usage") is None:
            return b""
        self.progress.has_usage = True
        return self._written(document, None)

    def usage(self, told: dict[str, Any]) -> dict[str, Any]:
        """The usage of the whole answer, by that of the rest, whose prompt had the beginning in it."""
        usage, in_prompt, given = dict(told), self._given_prompt_tokens, self._given_tokens
        changes = {"prompt_tokens": -in_prompt, "completion_tokens": given, "total_tokens": given - in_prompt}
        for name, change in changes.items():
            if isinstance(usage.get(name), int):
                usage[name] += change
        details, prompt_tokens = usage.get("prompt_tokens_details"), usage.get("prompt_tokens")
        if (
            isinstance(details, dict)
            and isinstance(details.get("cached_tokens"), int)
            and isinstance(prompt_tokens, int)
        ):
            usage["prompt_tokens_details"] = details | {"cached_tokens": min(details["cached_tokens"], prompt_tokens)}
        return usage

    @property
    def lacks_usage(self) -> bool:
        """Whether the client wants the usage, and has not got it."""
        return self._wants_usage and not self.progress.has_usage

    @property
    def how(self) -> str:
        """How the rest was asked for: `exact` (by token ids) or `text`."""
        return "exact" if self._is_exact else "text"

    def close(self) -> bytes:
        """The end of a stream of which only the end is missing. Without a finish reason it had all its tokens."""
        progress, events = self.progress, b""
        if not progress.finish_reason:
            progress.finish_reason = "length"
            events += self._written({}, self._choice({"finish_reason": "length"}, ""))
        if self.lacks_usage:
            prompt, output = len(progress.prompt_ids), progress.tokens
            usage = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
            self._given_tokens = self._given_prompt_tokens = 0
            events += self._usage_event({"usage": usage})
        return events + self.end()

    def end(self) -> bytes:
        """The end mark, and before it the news that the stream went on elsewhere, for whoever reads comments."""
        if not self.times:
            return _DONE
        return b": x-kvgate-resumed: %d; %b\n\n" % (self.times, self.how.encode()) + _DONE


def _nulls(fields: dict[str, Any]) -> dict[str, None]:
    """The fields that an engine sends with null."""
    return {name: None for name, value in fields.items() if value is None}
