"""The sessions of clients, and what an endless cache would find of their prompts.

A session is one agent's work. Its first prompt is the system prompt of the agent's kind and a text of its own. A later
prompt repeats the last one, goes on with the answer, and adds a few tokens, like a tool's result.

The shapes are those of a peer's load generator, from the profiles in scripts/generate_sim of smg-project/smg. In its
`--help` and in its results, a rate of sessions, the number of workers and the seconds are given too; those are options
here. The peer's clock runs ten times as fast as a real engine's, and so do these figures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.workloads import Message, text
from gateway.simulator.chat_template import render_chat
from gateway.simulator.images import ImageReader
from gateway.simulator.prompt import TOKEN_BYTES

Cdf = tuple[tuple[int, float], ...]
"""Lengths in tokens, each with the share of prompts that are not longer. Between two of them, shares are linear."""

_POOL_BYTES = 2**20


@dataclass(frozen=True)
class Shape:
    """The traffic of one profile, and the workers that it is made for."""

    system_tokens: int
    kinds: int
    """Kinds of agents. Each has its own system prompt."""
    prompt_tokens: Cdf
    answer_tokens: Cdf
    follow_up_tokens: int
    follow_up_share: float
    """The share of turns that another turn follows."""
    max_turns: int
    streams: bool
    think_s: float
    """The mean pause between an answer and the next turn. The pauses are exponential."""
    sessions_per_s: float
    """The peer's rate with `workers` workers."""
    workers: int
    seconds: float

    @property
    def longest_prompt_tokens(self) -> int:
        return self.prompt_tokens[-1][0]

    @property
    def sessions_per_worker(self) -> int:
        return round(self.sessions_per_s * self.seconds / self.workers)


SHAPES = {
    "two-turn": Shape(  # profiles/local-medium.json; the run of pull request 2438 is this one
        system_tokens=2048,
        kinds=1,
        prompt_tokens=((256, 0.0), (5000, 0.216), (10_000, 0.530), (20_000, 0.994), (24_576, 1.0)),
        answer_tokens=((16, 0.0), (1000, 0.351), (2000, 0.513), (5000, 0.998), (6144, 1.0)),
        follow_up_tokens=512,
        follow_up_share=0.5,
        max_turns=2,
        streams=True,
        think_s=3.0,
        sessions_per_s=611.0,
        workers=240,
        seconds=180.0,
    ),
    "agents": Shape(  # profiles/agentic-small.json
        system_tokens=6144,
        kinds=16,
        prompt_tokens=((256, 0.0), (6500, 0.30), (9000, 0.70), (16_000, 0.99), (32_768, 1.0)),
        answer_tokens=((16, 0.0), (400, 0.40), (900, 0.75), (2000, 0.99), (4096, 1.0)),
        follow_up_tokens=384,
        follow_up_share=0.8,
        max_turns=8,
        streams=False,
        think_s=3.0,
        sessions_per_s=100.0,
        workers=120,
        seconds=180.0,
    ),
}


def drawn(cdf: Cdf, share: float) -> int:
    """The length that this share of prompts does not exceed."""
    for (shorter, below), (longer, above) in pairwise(cdf):
        if share <= above:
            return round(shorter + (longer - shorter) * (share - below) / (above - below))
    return cdf[-1][0]


class Texts:
    """Texts of any length that begin differently. All of them are cut from one long text, because making words for each
    costs more than a gateway needs for the request."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pool = text(rng, _POOL_BYTES)
        self._number = 0

    def next(self, tokens: int) -> str:
        self._number += 1
        head = f"{self._number:08d} "
        length = max(len(head), tokens * TOKEN_BYTES)
        at = self._rng.randrange(len(self._pool) - length)
        return head + self._pool[at : at + length - len(head)]


@dataclass
class Session:
    """One session: its messages until now, and its next turn."""

    kind: int
    messages: list[Message]
    answer_tokens: list[int]
    think_s: list[float]
    """The pause before each turn but the first."""
    follow_ups: list[str]
    turn: int = 0
    is_over: bool = False
    worker: str = ""
    """The worker of its first turn."""
    context_tokens: int = 0

    def body(self, model: str, shape: Shape) -> dict[str, Any]:
        """The request of the next turn."""
        stream = {"stream": True, "stream_options": {"include_usage": True}} if shape.streams else {}
        return {"model": model, "messages": self.messages, "max_tokens": self.answer_tokens[self.turn], **stream}

    def go_on(self, answer: str, context_tokens: int, shape: Shape) -> None:
        """The turn is answered: the next one repeats it, and adds a text. The session is over after its last turn, and
        before a prompt that is too long. `context_tokens` are the prompt and its answer, as the engine counted them."""
        self.context_tokens = context_tokens
        self.is_over = (
            self.turn == len(self.follow_ups) or context_tokens + shape.follow_up_tokens > shape.longest_prompt_tokens
        )
        if not self.is_over:
            follow_up = self.follow_ups[self.turn]
            self.messages = [*self.messages, _message("assistant", answer), _message("user", follow_up)]
            self.turn += 1


class Sessions:
    """Makes sessions, always the same for the same seed."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._rng = random.Random(seed)
        self._texts = Texts(self._rng)
        self.systems = [self._texts.next(shape.system_tokens) for _ in range(shape.kinds)]

    def next(self) -> Session:
        shape, rng = self._shape, self._rng
        kind = rng.randrange(shape.kinds)
        own_tokens = max(1, drawn(shape.prompt_tokens, rng.random()) - shape.system_tokens)
        turns = 1
        while turns < shape.max_turns and rng.random() < shape.follow_up_share:
            turns += 1
        return Session(
            kind,
            [_message("system", self.systems[kind]), _message("user", self._texts.next(own_tokens))],
            [drawn(shape.answer_tokens, rng.random()) for _ in range(turns)],
            [rng.expovariate(1 / shape.think_s) for _ in range(turns - 1)],
            [self._texts.next(shape.follow_up_tokens) for _ in range(turns - 1)],
        )


class EndlessCache:
    """Counts what one cache of endless size would find if it got every request, each after the answer to the last."""

    def __init__(self, systems: Sequence[str], block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._shared_tokens = [_shared_tokens(system) for system in systems]
        self._seen: set[int] = set()

    def finds(self, session: Session, prompt_tokens: int) -> int:
        """The cached tokens of a session's next prompt. Call it once for each turn that is sent."""
        known = session.context_tokens - 1 if session.turn else self._known(session.kind)
        return min(known, prompt_tokens - 1) // self._block_tokens * self._block_tokens if known > 0 else 0

    def _known(self, kind: int) -> int:
        if kind in self._seen:
            return self._shared_tokens[kind]
        self._seen.add(kind)
        return 0


def _shared_tokens(system: str) -> int:
    """The tokens that all first prompts of one kind begin with."""
    one, other = (
        render_chat([_message("system", system), _message("user", said)], ImageReader()).tokens for said in "ab"
    )
    same = next(at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    return same // TOKEN_BYTES


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
