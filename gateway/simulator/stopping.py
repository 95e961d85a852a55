"""Ends an answer at a stop string or a stop token, like vLLM's detokenizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.prompt import token_ids, token_of


@dataclass(frozen=True, slots=True)
class Stops:
    """The stop strings and tokens of an answer, which apply after `min_tokens` tokens."""

    strings: Sequence[str]
    tokens: Collection[int]
    in_output: bool = False
    """Whether the stop string or token stays in the text."""
    min_tokens: int = 0


def stops(body: dict[str, Any]) -> Stops | None:
    """The stops of a chat or completions body; None if it has none."""
    given, tokens = body.get("stop") or (), body.get("stop_token_ids") or ()
    if not given and not tokens:
        return None
    strings = [given] if isinstance(given, str) else given
    in_output = body.get("include_stop_str_in_output", False)
    return Stops(strings, frozenset(tokens), in_output, body.get("min_tokens", 0))


def stopped(answer: GeneratedAnswer, stops: Stops) -> GeneratedAnswer:
    """`answer` up to where it stops.

    The token that completes a stop string is generated and counted. A stream holds text back while it may be part of a
    stop string: as many characters as the longest stop string has, less one.
    """
    behind = 0 if stops.in_output else max((len(each) for each in stops.strings), default=1) - 1
    text, shown_chars = "", 0
    shown: list[str] = []
    for at, piece in enumerate(answer.pieces):
        if at >= stops.min_tokens and stops.tokens and (token := token_ids(token_of(piece))[0]) in stops.tokens:
            last = piece if stops.in_output else ""
            return _ended(answer, [*shown, text[shown_chars:] + last], token)
        window = len(text)
        text += piece
        if at >= stops.min_tokens and (found := _found(text, window, stops)) is not None:
            end, stop = found
            return _ended(answer, [*shown, text[shown_chars:end]], stop)
        visible = max(shown_chars, len(text) - behind)
        shown.append(text[shown_chars:visible])
        shown_chars = visible
    if shown:
        shown[-1] += text[shown_chars:]
    return replace(answer, shown=shown)


def _found(text: str, window: int, stops: Stops) -> tuple[int, str] | None:
    """Where the text ends, and by which string, if one of the stop strings reaches beyond `window`."""
    for stop in stops.strings:
        start = text.find(stop, max(0, window - len(stop) + 1))
        if start >= 0:
            return start + len(stop) if stops.in_output else start, stop
    return None


def _ended(answer: GeneratedAnswer, shown: list[str], reason: int | str) -> GeneratedAnswer:
    pieces = answer.pieces[: len(shown)]
    return replace(answer, pieces=pieces, shown=shown, finish_reason="stop", stop_reason=reason)
