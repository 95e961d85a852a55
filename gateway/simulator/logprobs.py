"""Invented log probabilities: each token is the most likely one at its place. They are the same every time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from gateway.simulator.errors import bad_request
from gateway.simulator.prompt import WORDS, text_of, token_of

_Ranked = Sequence[tuple[bytes, float]]
"""The most likely tokens at a place, in descending order, each with its log probability."""


def chat_logprobs(pieces: Sequence[str], top: int, first: int = 0) -> dict[str, Any]:
    """`choices[].logprobs` of chat for tokens of an answer, from place `first` on, with `top` tokens at each."""
    content = []
    for at, piece in enumerate(pieces, first):
        ranked = _ranked(token_of(piece), at, top)
        entry = _chat_entry(*ranked[0])
        entry["top_logprobs"] = [_chat_entry(*each) for each in ranked[:top]]
        content.append(entry)
    return {"content": content}


def completion_logprobs(pieces: Sequence[str], top: int, first: int, offset: int) -> dict[str, Any]:
    """The same of completions. `offset` is the first token's, in characters."""
    told: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for at, piece in enumerate(pieces, first):
        ranked = _ranked(token_of(piece), at, top)
        told["text_offset"].append(offset)
        told["token_logprobs"].append(ranked[0][1])
        told["tokens"].append(text_of(ranked[0][0]))
        told["top_logprobs"].append({text_of(each): logprob for each, logprob in ranked})
        offset += len(told["tokens"][-1])
    return told


def wanted_of_chat(body: dict[str, Any]) -> int | None:
    """How many tokens a chat body wants to see at each place; None if it wants no log probabilities. Raises a 400."""
    top, wanted = body.get("top_logprobs") or 0, body.get("logprobs")
    if top and not wanted:
        raise bad_request("top_logprobs need logprobs", "top_logprobs")
    return top if wanted else None


def _chat_entry(token: bytes, logprob: float) -> dict[str, Any]:
    text = text_of(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _ranked(token: bytes, place: int, count: int) -> _Ranked:
    """`token`, then others, `count` in all. Places count from the start of the answer."""
    random = Random(b"%d %b" % (place, token))
    probability = 0.5 + random.random() / 2.001
    ranked = [(token, math.log(probability))]
    rest = 1 - probability
    for word in random.sample(WORDS, count + 1):
        other = token_of(word + " ")
        if other != token and len(ranked) < count:
            rest /= 2
            ranked.append((other, math.log(rest)))
    return ranked
