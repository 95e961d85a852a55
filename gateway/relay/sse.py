"""Reads a stream of server-sent events while it passes its bytes on.

Complete events are passed on as they arrived, in one write. Only an unfinished event is held back: no client could use
it yet. So a broken stream can end with a well-formed error event, and the usage chunk can be taken out if the gateway
asked for it and the client did not.

The cost of a piece depends only on its new bytes, whatever a replica sends. Large events are not parsed.
"""

from __future__ import annotations

import re
from typing import Any

from gateway.relay.endings import ABORT, may_be_unfinished, says_no_end, unfinished
from gateway.relay.events import (
    bounds_of_event,
    end_of_first_event,
    end_of_last_event,
    event_data,
    has_kind,
    split_events,
)
from gateway.relay.sent import Sent
from gateway.relay.token_ids import without_ids, without_prompt_ids
from gateway.upstream.excerpts import WINDOW_BYTES, last_usage

MAX_EVENT_BYTES = 8 * 2**20
"""The most that is held of an event that is not complete."""
_LARGE_BYTES = 2**18
"""Larger events are not parsed."""

_SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s{0,9}:\s{0,9}(\d{1,15})')
_HAS_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_IDS = b'"token_ids":['
_NO_LOGPROBS = b',"logprobs":null'
_EMPTY = b'"delta":{},'
_NO_TEXT_BYTES = len(b"{}")
"""A delta without text. vLLM sends one that only tells token ids."""
_NAMES = (b"event: content_block_delta\n", b"event: response.output_text.delta\n")
"""How the events begin that have the text of messages and of responses."""
_NAMED_TEXT = re.compile(rb'(?:"type":"text_delta","text"|"delta"):("(?:[^"\\\n]|\\.)*")')
_GOES_ON = re.compile(rb'"finish_reason"\s{0,9}:\s{0,9}null')
_LESSONS = 8
"""So many pieces of other forms may teach the usual form of events. (The first event of a chat has another one.)"""
_LONGEST_SEAM = 3
"""The blank line that ends an event may begin this many bytes before a new piece."""


class EventRelay:
    """Takes a replica's bytes, returns the client's bytes. One for each stream.

    `ends`, `ending_words`: see `Endpoint`. `hides_ids`: whether token ids are taken out. `token_mark` is a key that
    each part of a choice has once; strings cannot imitate it, because quotation marks inside have a backslash.
    `may_be_cancelled`: see `endings.unfinished`. `plain_bytes`: so many bytes at the beginning are known not to say
    that the stream is unfinished. `sent` keeps the events as they came.
    """

    def __init__(
        self,
        strip_usage: bool,
        ends: tuple[bytes, ...],
        hides_ids: bool = False,
        token_mark: bytes = b'"delta":',
        choices: int = 1,
        ending_words: tuple[bytes, ...] = (),
        may_be_cancelled: bool = False,
        plain_bytes: int = 0,
        sent: Sent | None = None,
    ) -> None:
        self.parts = 0
        """The parts of choices that were passed on."""
        self.running_tokens: dict[int, int] = {}
        """By choice, if there are several: its tokens so far, if each event tells them (`continuous_usage_stats`)."""
        self.usage: dict[str, Any] | None = None
        """From the last event that had one."""
        self._told_usage_apart = False
        """Whether an event had usage and nothing else, as at the end of a stream."""
        self.saw_end = not ends
        """Whether the stream said that it is complete. Always true if every end is one."""
        self.unfinished = ""
        """Why the engine did not finish the answer, if an event said so."""
        self._ends = ends
        self._ending_words = ending_words
        self._may_be_cancelled = may_be_cancelled
        self._plain_bytes = plain_bytes
        self._strip_usage = strip_usage
        self._hides_ids = self._lacks_prompt = hides_ids
        self._sent = sent
        self._token_mark = token_mark
        self._has_many_choices = choices > 1
        self._lessons = _LESSONS if ending_words and not self._has_many_choices else 0
        self._usual_start, self._usual_end = b"", b"none yet"
        """The bytes around what differs between the events of one choice: all but its delta, before its end."""
        self._start_bytes = self._end_bytes = 0
        self._ids_mark, self._hidden_end = b"", b""
        """If token ids are taken out: what stands between the text and them, and the end of an event without them. In
        events of responses it stands before their number."""
        self._tail = bytearray()

    @property
    def held_bytes(self) -> int:
        """Bytes of an event that is not complete. The caller ends the stream if they exceed MAX_EVENT_BYTES."""
        return len(self._tail)

    @property
    def forces_usage(self) -> bool | None:
        """Whether a replica that was not asked has told its usage, after a complete stream. None if this is not known:
        nothing was generated, or the usage came in an unusual way."""
        if self.usage is not None:
            return True if self._told_usage_apart else None
        return False if self.parts else None

    @property
    def has_ended(self) -> bool:
        """Whether an event said that the stream is complete. Then it does not matter how the connection ends."""
        return bool(self._ends) and self.saw_end and not self.unfinished

    @property
    def why_incomplete(self) -> str:
        """Why the stream is not complete, if it ends here; empty if it is."""
        return self.unfinished or ("" if self.saw_end else "ended early")

    def feed(self, piece: bytes) -> bytes:
        """The complete events so far, to send on now (may be empty)."""
        tail = self._tail
        if not tail:
            if piece.endswith(b"\n\n"):
                return self._passed(piece)
            end = end_of_last_event(piece, 0)
            tail += piece[end:] if end else piece
            return self._passed(piece[:end]) if end else b""
        seen = max(0, len(tail) - _LONGEST_SEAM)
        tail += piece
        if len(tail) > _LARGE_BYTES:
            return self._feed_large(seen)
        end = end_of_last_event(tail, seen)
        if end == 0:
            return b""
        self._tail = tail[end:]
        return self._passed(bytes(tail[:end]))

    def _feed_large(self, seen: int) -> bytes:
        """The tail is an event too large to be parsed, or it ends such an event and holds much behind it."""
        tail, self._plain_bytes = self._tail, 0
        end = end_of_first_event(tail, seen)
        if end == 0:
            return b""
        behind, self._tail = bytes(tail[end:]), bytearray()
        del tail[end:]
        first = self._passed_alone(bytes(tail))
        return first + self.feed(behind) if behind and not self.unfinished else first

    def finish(self) -> bytes:
        """Call it at a clean end. Some servers leave out the blank line behind the last event: this is that event. If
        the stream is not complete, the client does not get it."""
        self._sent = None
        rest, self._tail = bytes(self._tail), bytearray()
        return self._passed(rest) if rest else b""

    def _passed(self, ready: bytes) -> bytes:
        is_one = ready.find(b"\n", self._start_bytes) == len(ready) - 2
        if is_one and ready.endswith(self._usual_end) and ready.startswith(self._usual_start):
            usual = self._usual(ready) if self._sent is not None or self._hides_ids else ready
            if usual:
                self.parts += 1  # nothing in the event says more than a delta
                return usual
        plain_bytes, self._plain_bytes = self._plain_bytes, 0
        if len(ready) > _LARGE_BYTES:
            return b"".join(self._passed_alone(event) for event in split_events(ready))
        if self._lacks_prompt:
            ready = self._without_prompt(ready)
        parts = ready.count(self._token_mark)
        self.parts += parts
        if self._sent is not None:
            self._sent.add(ready, parts)
        original = ready
        if self._hides_ids:
            ready = without_ids(_without_empty(ready) if _EMPTY in ready else ready)
        if b'"usage"' in ready:
            ready = self._take_usage(ready)
        if len(ready) > plain_bytes and may_be_unfinished(ready, self._ending_words):
            return self._checked(ready)
        self._look_for_end(ready)
        if self._lessons and (is_one or ready.startswith(b"event:")):
            self._learn(original)
        return ready

    def _without_prompt(self, first: bytes) -> bytes:
        self._lacks_prompt = False
        first, ids = without_prompt_ids(first)
        if self._sent is not None:
            self._sent.keep_prompt(ids)
        return first

    def _usual(self, event: bytes) -> bytes:
        """An event of the usual form, without its token ids. Empty if it has another form after all."""
        start, end = self._start_bytes, len(event) - self._end_bytes
        if not self._ids_mark:
            if self._hides_ids and _IDS in event:
                return b""
            if self._sent is not None:
                self._sent.add_part(event[start:end], b"")
            return event
        text, mark, ids = event[start:end].partition(self._ids_mark)
        if len(text) <= _NO_TEXT_BYTES or not mark or b"]" in ids:
            return b""
        if self._sent is not None:
            self._sent.add_part(text, ids)
        return b"".join((self._usual_start, text, self._hidden_end)) if self._hides_ids else event

    def _learn(self, event: bytes) -> None:
        """Learns the usual form from events without an end, an error and usage. Strings cannot imitate the keys."""
        self._lessons -= 1
        if event.startswith(_NAMES):
            self._learn_named(event)
            return
        delta, reason = event.find(self._token_mark), event.rfind(b'"finish_reason"')
        is_form = event.startswith(b"data:") and 0 <= delta < reason and _GOES_ON.match(event, reason) is not None
        if not is_form or _HAS_USAGE.search(event) is not None:
            return
        start, at = delta + len(self._token_mark), reason - 1
        if event.endswith(_NO_LOGPROBS, 0, at):
            at -= len(_NO_LOGPROBS)
        ids = event.find(_IDS, at) if self._hides_ids else -1
        if event[at : at + 1] != b",":
            return
        if ids >= 0:
            end = event.find(b"]", ids)
            self._ids_mark, self._usual_end = event[at : ids + len(_IDS)], event[end:]
            self._hidden_end = self._ids_mark[:-1] + b"null" + event[end + 1 :]
        else:  # nobody asks, or the engine does not tell
            self._ids_mark, self._usual_end = b"", event[at:]
        self._usual_start = event[:start]
        self._start_bytes, self._end_bytes = start, len(self._usual_end)

    def _learn_named(self, event: bytes) -> None:
        """The events of messages differ in their text only, those of responses in their numbers, too."""
        text = _NAMED_TEXT.search(event)
        if text is None or event.find(b"\n\n") != len(event) - 2:
            return
        number = _SEQUENCE_NUMBER.search(event, text.end())
        at, end = number.span(1) if number is not None else (text.end(), text.end())
        self._ids_mark, self._usual_end = event[text.end() : at], event[end:]
        self._usual_start = event[: text.start(1)]
        self._start_bytes, self._end_bytes = text.start(1), len(event) - end

    def _look_for_end(self, ready: bytes) -> None:
        if not self.saw_end:
            for kind in self._ends:
                if kind in ready and has_kind(ready, kind):
                    self.saw_end = True

    def _checked(self, ready: bytes) -> bytes:
        """If an event says that the engine did not finish, the client gets the events before it. An error that is the
        request's fault is passed on, as an end."""
        passed = 0
        for event in split_events(ready):
            document = event_data(event) if may_be_unfinished(event, self._ending_words) else None
            found = unfinished(document, self._may_be_cancelled) if document is not None else None
            if found is not None and not found.is_requests_fault:
                self.unfinished = str(found)
                return ready[:passed]
            self.saw_end = self.saw_end or found is not None
            self._look_for_end(event)
            passed += len(event)
        return ready

    def _passed_alone(self, event: bytes) -> bytes:
        if self.unfinished:  # by an event before it
            return b""
        if len(event) <= _LARGE_BYTES:
            return self._passed(event)
        self.parts += event.count(self._token_mark)
        if self._sent is not None:
            self._sent.lose("length")
        if self._hides_ids:
            event = without_ids(event)
        if says_no_end(event[-WINDOW_BYTES:]):
            self.unfinished = str(ABORT)
            return b""
        self.usage = last_usage(event) or self.usage
        self._look_for_end(event[:WINDOW_BYTES])
        return event

    def _take_usage(self, ready: bytes) -> bytes:
        """Reads the last event with usage, of each choice, and takes out the events with nothing but usage."""
        if b"\r" in ready and len(events := split_events(ready)) > 1:
            return b"".join(map(self._take_usage, events))
        latest = None
        at = ready.rfind(b'"usage"')
        while at >= 0:
            begin, end = bounds_of_event(ready, at)
            event = ready[begin:end]
            if _HAS_USAGE.search(event):
                has_no_more = self._strip_usage and _NO_CHOICES.search(event) is not None
                is_read = has_no_more or latest is None or self._has_many_choices
                document = (event_data(event) if is_read else None) or {}
                usage, choices = document.get("usage"), document.get("choices")
                if isinstance(usage, dict):
                    latest = latest or usage
                    self._told_usage_apart = self._told_usage_apart or choices == []
                    if has_no_more and choices == []:
                        ready = ready[:begin] + ready[end:]
                    elif self._has_many_choices and choices:
                        self._note_running(choices, usage)
            at = ready.rfind(b'"usage"', 0, begin)
        self.usage = latest or self.usage
        return ready

    def _note_running(self, choices: Any, usage: dict[str, Any]) -> None:
        """vLLM tells of a choice's event how many tokens this choice has."""
        choice = choices[0] if isinstance(choices, list) else None
        index, tokens = choice.get("index") if isinstance(choice, dict) else None, usage.get("completion_tokens")
        if type(index) is int and type(tokens) is int:
            self.running_tokens[index] = max(tokens, self.running_tokens.get(index, 0))


def _without_empty(events: bytes) -> bytes:
    """Without the events that vLLM sends only to tell token ids: its parsers have no text for them yet."""
    kept = (event for event in split_events(events) if _EMPTY not in event or _GOES_ON.search(event) is None)
    return b"".join(kept)


def next_sequence_number(events: bytes) -> int:
    """The number of the event that follows these, which are the last of a streamed response. 0 if they have none."""
    at = events.rfind(b'"sequence_number"')
    found = _SEQUENCE_NUMBER.match(events, at) if at >= 0 else None
    return int(found[1]) + 1 if found else 0
