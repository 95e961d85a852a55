"""What the client of a stream has got of its answer, and what its engine has told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

_OF_TEXT: Final = frozenset({"role", "content"})
"""What the delta of a chat has if it is only text."""
_HALF_CHARACTER: Final = "\N{REPLACEMENT CHARACTER}"


class NotResumable(Exception):
    """A stream cannot go on. `reason` is one word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Place(NamedTuple):
    """A place in an answer: so many token ids, and so many characters of text that were sent by then."""

    ids: int
    chars: int


@dataclass(slots=True)
class Progress:
    """What a client has got of an answer."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    """The token ids of the answer; empty if the engine does not tell them."""
    prompt_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    """Those of the prompt, if the engine has told their number only."""
    text_ids: list[int] = field(default_factory=list)
    """The tokens into which an engine cuts the text, if one was asked: not always those that were generated."""
    places: list[Place] = field(default_factory=list)
    """Behind each token that came alone, and with text."""
    parts: int = 0
    """The events with text, or with token ids."""
    shape: dict[str, Any] = field(default_factory=dict)
    """The first event with a part of the answer."""
    finish_reason: str = ""
    has_usage: bool = False
    """Whether the client has got the usage at the end."""
    is_parsed: bool = False
    """Whether the token ids do not make the text: a parser of the engine holds some of it back, or ids are missing."""

    @property
    def tokens(self) -> int:
        """The tokens of the answer so far. Without their ids, each part counts as one."""
        return len(self.ids) or self.parts

    def add(self, delta: Any, ids: Any) -> None:
        """A part of the answer: a chat's delta, or a text; and its token ids. Raises NotResumable."""
        text = text_of(delta)
        self.parts += bool(ids or text)
        if isinstance(ids, list):
            self.ids += ids
            self.is_parsed = self.is_parsed or (bool(ids) and delta == {})
        elif text:
            self.is_parsed = True
        self.text += text
        if text and isinstance(ids, list) and len(ids) == 1 and not text.endswith(_HALF_CHARACTER):
            self.places.append(Place(len(self.ids), len(self.text)))

    def was_cut(self, text_ids: list[int]) -> None:
        """An engine cuts the text into these tokens, which says more of their number than the events do."""
        self.text_ids, self.parts = text_ids, len(text_ids)

    def last_place(self, held_back_chars: int) -> tuple[int, int]:
        """From how many token ids the rest is generated, and how many characters of its text were sent already. An
        engine sends a text when it has `held_back_chars` more. Without any place, it is generated from the beginning:
        engines tell several tokens at once if their clients, or they themselves, are busy."""
        chars = len(self.text)
        for ids, until in reversed(self.places):
            if until + held_back_chars <= chars:
                return ids, chars - until - held_back_chars
        return 0, chars


def text_of(delta: Any) -> str:
    """The text of a chat's delta, or of a completion. Raises NotResumable if there is more than text."""
    if not isinstance(delta, dict):
        return delta if isinstance(delta, str) else ""
    for name, value in delta.items():
        if value and name not in _OF_TEXT:
            raise NotResumable(name)
    return delta.get("content") or ""
