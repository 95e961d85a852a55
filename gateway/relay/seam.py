"""Joins the rest of an answer to what its client has got: the events of a continuation become those of one stream.

The client sees one id, one role, each token once, one finish reason, the usage of the whole answer, and one end. Pure.
"""

from __future__ import annotations

from typing import Any

from gateway.relay.continuation import CHAT, Continuation
from gateway.relay.endings import unfinished
from gateway.relay.events import event_data, kind_of, split_events
from gateway.relay.grammars import Grammar
from gateway.relay.progress import NotResumable, text_of

_FEW_TOKENS = 8
_HEADER_TOKENS = 3
"""A template's header of an answer ends with these tokens of its own, and no text of an answer does."""
_SEEN_TOKENS = 16
"""So many of the answer's last tokens are looked for at the end of a prompt. Its first one may have become a token
together with the template's header."""


class Seam:
    """What a client has got of one stream, and how the events that come next are joined to it."""

    def __init__(self, grammar: Grammar, wants_usage: bool) -> None:
        """`grammar` has taken what the client has got."""
        self.grammar = grammar
        self.progress = grammar.progress
        self.why_lost = ""
        """Why the rest did not fit to what the client had, or was not given; empty if it fitted."""
        self.times = 0
        """How often the stream went on elsewhere."""
        self.short_runs = 0
        """How often it broke again after few tokens."""
        self._wants_usage = wants_usage or grammar.always_tells_usage
        self._overlap = ""
        self._given_tokens = 0
        """The tokens of the answer that the current prompt goes on from."""
        self._ids: list[int] = []
        """All token ids that were told when the stream broke."""
        self._given_prompt_tokens = 0
        """The tokens of the current prompt behind the first one: the same, unless the text was cut in another way."""
        self._is_exact, self._is_unseen = True, False
        self.calls_tools = False
        """Whether the answer has begun to call tools. Then it does not go on elsewhere once more."""

    def broke(self) -> None:
        """The stream, or its rest, broke off."""
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
            except (LookupError, TypeError, AttributeError):  # no engine that we know writes such an event
                self.why_lost = "events"
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
        if not (text or reason or self.calls_tools):
            return b""
        if isinstance(usage := document.get("usage"), dict):
            document["usage"] = self.usage(usage)
        return self.grammar.part(text, choice, document, calls_tools=self.calls_tools)

    def _look_at_prompt(self, document: dict[str, Any]) -> None:
        """The first event of a chat tells its prompt: that of the first request, and behind it the answer so far.
        Raises NotResumable if the engine begins the answer anew, or if its template may have trimmed the text."""
        self._is_unseen, before, progress = False, self.progress.prompt_ids, self.progress
        told = document.get("prompt_token_ids")
        if not isinstance(told, list) or told[: len(before)] != before:
            raise NotResumable("restarted")
        if progress.text_ids:
            self._look_at_text(told, progress.text_ids)
            return
        behind = told[len(before) :]
        self._given_prompt_tokens, self._is_exact = len(behind), behind == self._ids
        if self._is_exact:
            progress.ids = behind
        elif not behind or behind[-_HEADER_TOKENS:] == before[-_HEADER_TOKENS:] or progress.text[-1:].isspace():
            raise NotResumable("restarted")

    def _look_at_text(self, told: list[int], text_ids: list[int]) -> None:
        """No stream has told the first prompt. The current one must end with the text, and if the number of the first
        one's tokens is known, it must be the first one and the text."""
        progress, last = self.progress, text_ids[-_SEEN_TOKENS:]
        progress.prompt_tokens = progress.prompt_tokens or len(told) - len(text_ids)
        given = len(told) - progress.prompt_tokens
        if told[-len(last) :] != last or abs(given - len(text_ids)) > 1:
            raise NotResumable("restarted")
        self._given_prompt_tokens, self._is_exact = given, False

    def _text(self, delta: Any) -> str:
        """The text of a part. Behind its text, a chat may call tools."""
        if isinstance(delta, dict) and delta.get("tool_calls"):
            self.calls_tools = True
        if self.calls_tools and isinstance(delta, dict):
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

    def _usage_event(self, document: dict[str, Any]) -> bytes:
        if not self._wants_usage or self.progress.has_usage or document.get("usage") is None:
            return b""
        self.progress.has_usage = True
        return self.grammar.usage(self.usage(document["usage"]), document)

    def usage(self, told: dict[str, Any]) -> dict[str, Any]:
        """The usage of the whole answer, by that of the rest, whose prompt had the beginning in it."""
        usage, in_prompt, given = dict(told), self._given_prompt_tokens, self._given_tokens
        changes = {"prompt_tokens": -in_prompt, "completion_tokens": given, "total_tokens": given - in_prompt}
        for name, change in changes.items():
            if isinstance(usage.get(name), int):
                usage[name] += change
        details, left = usage.get("prompt_tokens_details"), usage.get("prompt_tokens")
        if isinstance(details, dict) and isinstance(left, int):
            details = usage["prompt_tokens_details"] = dict(details)
            for name in ("cached_tokens", "created_cache_tokens"):  # those of the first prompt come first
                if isinstance(details.get(name), int):
                    details[name] = min(details[name], left)
                    left -= details[name]
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
            events += self.grammar.part("", {"finish_reason": "length"}, {}, calls_tools=False)
        if self.lacks_usage:
            prompt, output = len(progress.prompt_ids) or progress.prompt_tokens, progress.tokens
            usage = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
            self._given_tokens = self._given_prompt_tokens = 0
            events += self._usage_event({"usage": usage})
        return events + self.end()

    def end(self) -> bytes:
        """The end mark, and before it the news that the stream went on elsewhere, for whoever reads comments."""
        comment = b": x-kvgate-resumed: %d; %b\n\n" % (self.times, self.how.encode()) if self.times else b""
        return self.grammar.end(comment)
