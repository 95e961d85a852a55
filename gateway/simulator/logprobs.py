"""Invented log probabilities: each token is the most likely one at its place. They are the same every time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from gateway.simulator.errors import bad_request
from gateway.simulator.prompt import WORDS, text_of, token_ids, token_of

_Ranked = Sequence[tuple[bytes, float]]
"""The most likely tokens at a place, in descending order, each with its log probability."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The wish of a request: how many tokens at each place, shown as texts or as `token_id:…`."""

    top: int
    as_ids: bool = False

    def chat(self, pieces: Sequence[str], first: int = 0) -> dict[str, Any]:
        """`choices[].logprobs` of chat for tokens of an answer, from place `first` on."""
        content = []
        for at, piece in enumerate(pieces, first):
            ranked = _ranked(token_of(piece), at, self.top)
            entry = self._chat_entry(*ranked[0])
            entry["top_logprobs"] = [self._chat_entry(*each) for each in ranked[: self.top]]
            content.append(entry)
        return {"content": content}

    def completion(self, tokens: Sequence[bytes], num_prompt_tokens: int, first: int, offset: int) -> dict[str, Any]:
        """`choices[].logprobs` of completions for tokens of which the first is at place `first`. The prompt's come
        before those of the answer, the very first has none. `offset` is the first one's, in characters."""
        offsets, logprobs, tops, names = [], [], [], []
        for at, token in enumerate(tokens, first):
            ranked = _ranked(token, at - num_prompt_tokens, self.top)
            known = at > 0 or num_prompt_tokens == 0
            names.append(self._name(token))
            logprobs.append(ranked[0][1] if known else None)
            tops.append({self._name(each): logprob for each, logprob in ranked} if known else None)
            offsets.append(offset)
            offset += len(names[-1])
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": names, "top_logprobs": tops}

    def _chat_entry(self, token: bytes, logprob: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": logprob, "bytes": list(text_of(token).encode())}

    def _name(self, token: bytes) -> str:
        return f"token_id:{token_ids(token)[0]}" if self.as_ids else text_of(token)


def chat_logprobs(body: dict[str, Any]) -> Logprobs | None:
    """The wish of a chat body. Raises a 400."""
    top, wanted = body.get("top_logprobs") or 0, body.get("logprobs")
    if top and not wanted:
        raise bad_request("top_logprobs need logprobs", "top_logprobs")
    return Logprobs(top, bool(body.get("return_tokens_as_token_ids"))) if wanted else None


def completion_logprobs(body: dict[str, Any]) -> Logprobs | None:
    """The wish of a completions body."""
    top = body.get("logprobs")
    return None if top is None else Logprobs(top, bool(body.get("return_tokens_as_token_ids")))


def prompt_logprobs(tokens: Sequence[bytes], top: int) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: by token id, for each token of a prompt but the first."""
    return [None] + [
        {
            str(token_ids(each)[0]): {"logprob": logprob, "rank": rank, "decoded_token": text_of(each)}
            for rank, (each, logprob) in enumerate(_ranked(token, at - len(tokens), top), 1)
        }
        for at, token in enumerate(tokens[1:], 1)
    ]


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
