"""The load: sessions that begin at a rate, whatever happened to earlier ones, and what came of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from bench.fleet.client import Client, NoAnswer
from bench.fleet.traffic import EndlessCache, Session, Sessions, Shape
from bench.load import percentile

_ANSWER_S = 7200.0

Spread = Callable[[], tuple[str, str]]
"""Chooses where the next request goes: the URL, and the worker behind it. The worker is empty if a gateway chooses."""


@dataclass(slots=True)
class Sent:
    """One answered request."""

    at_s: float
    """Since the start of the run."""
    took_s: float
    first_byte_s: float
    worker: str
    turn: int
    prompt_tokens: int
    cached_tokens: int
    endless_tokens: int
    """What an endless cache would have found."""
    is_where_it_was: bool
    """Whether the session's first turn was on the same worker."""
    decision: str


@dataclass
class Outcome:
    """What came of a load."""

    sessions: int = 0
    sent: list[Sent] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    """Requests without an answer, by kind."""
    latest_s: float = 0.0
    """How late the latest session began. If it is more than a moment, the clients were the limit."""
    seconds: float = 0.0

    def between(self, begin_s: float, end_s: float) -> Outcome:
        """The requests that were sent in this part of the run. Errors and sessions are those of the whole run."""
        part = [each for each in self.sent if begin_s <= each.at_s < end_s]
        return Outcome(self.sessions, part, self.errors, self.latest_s, end_s - begin_s)

    def figures(self, workers: Collection[str]) -> dict[str, float]:
        """The figures of the run. The variation of load is over these workers."""
        follow_ups = [each for each in self.sent if each.turn]
        took_s = [each.took_s for each in self.sent]
        requests, computed = _per_worker(self.sent, workers)
        return {
            "sessions": self.sessions,
            "requests": len(self.sent),
            "errors": sum(self.errors.values()),
            "follow_ups": len(follow_ups),
            "same_worker": round(_share(each.is_where_it_was for each in follow_ups), 4),
            "follow_up_cached": round(_cached(follow_ups), 4),
            "follow_up_bound": round(_bound(follow_ups), 4),
            "cached": round(_cached(self.sent), 4),
            "bound": round(_bound(self.sent), 4),
            "cov_requests": round(variation(requests), 4),
            "cov_computed_tokens": round(variation(computed), 4),
            "took_p50_s": round(percentile(took_s, 0.5), 3),
            "took_p99_s": round(percentile(took_s, 0.99), 3),
            **_first_bytes("first_byte", self.sent),
            **_first_bytes("follow_up_first_byte", follow_ups),
            "latest_s": round(self.latest_s, 3),
            "seconds": round(self.seconds, 1),
            "requests_per_s": round(len(self.sent) / self.seconds, 1) if self.seconds else 0.0,
        }

    def reasons(self) -> dict[str, dict[str, int]]:
        """How often each kind of failure occurred, and why gateways chose another worker for a follow-up than for its
        first turn."""
        elsewhere = Counter(each.decision for each in self.sent if not each.is_where_it_was)
        return {"error_kinds": dict(self.errors), "moved_because": dict(elsewhere)}


def _first_bytes(name: str, sent: Collection[Sent]) -> dict[str, float]:
    waited_s = [each.first_byte_s for each in sent]
    return {
        f"{name}_mean_s": round(fmean(waited_s), 4) if waited_s else 0.0,
        f"{name}_p50_s": round(percentile(waited_s, 0.5), 4),
        f"{name}_p99_s": round(percentile(waited_s, 0.99), 4),
    }


def variation(loads: Mapping[str, float]) -> float:
    """The coefficient of variation: the standard deviation of loads, divided by their mean."""
    mean = fmean(loads.values()) if loads else 0.0
    return pstdev(loads.values()) / mean if mean else 0.0


def _per_worker(sent: Iterable[Sent], workers: Collection[str]) -> tuple[dict[str, float], dict[str, float]]:
    """By worker: its requests, and the prompt tokens that it computed."""
    requests = dict.fromkeys(workers, 0.0)
    computed = dict(requests)
    for each in sent:
        if each.worker in requests:
            requests[each.worker] += 1
            computed[each.worker] += each.prompt_tokens - each.cached_tokens
    return requests, computed


def _share(of: Iterable[bool]) -> float:
    found = list(of)
    return sum(found) / len(found) if found else 0.0


def _cached(sent: list[Sent]) -> float:
    return sum(each.cached_tokens for each in sent) / max(1, sum(each.prompt_tokens for each in sent))


def _bound(sent: list[Sent]) -> float:
    return sum(each.endless_tokens for each in sent) / max(1, sum(each.prompt_tokens for each in sent))


class Load:
    """Sends the sessions of a shape. `pace` divides their pauses, as it divides the workers' times."""

    def __init__(self, shape: Shape, spread: Spread, model: str, block_tokens: int, pace: float, seed: int) -> None:
        self._shape, self._spread, self._model, self._pace = shape, spread, model, pace
        self._rng = random.Random(seed)
        self._sessions = Sessions(shape, seed)
        self._endless = EndlessCache(self._sessions.systems, block_tokens)
        self._client = Client(_ANSWER_S)
        self.outcome = Outcome()

    async def run(self, sessions_per_s: float, sessions: int) -> Outcome:
        """Begin this many sessions at this rate, and wait for all of them."""
        loop = asyncio.get_running_loop()
        self._began_s = due_s = loop.time()
        async with asyncio.TaskGroup() as running:
            for _ in range(sessions):
                due_s += self._rng.expovariate(sessions_per_s)
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                self.outcome.latest_s = max(self.outcome.latest_s, loop.time() - due_s)
                self.outcome.sessions += 1
                running.create_task(self._serve(self._sessions.next()))
        self.outcome.seconds = loop.time() - self._began_s
        self._client.close()
        return self.outcome

    async def _serve(self, session: Session) -> None:
        """All turns of one session."""
        try:
            await self._turn(session)
            for think_s in session.think_s:
                if session.is_over:
                    return
                await asyncio.sleep(think_s / self._pace)
                await self._turn(session)
        except NoAnswer as error:
            self.outcome.errors[str(error)] += 1

    async def _turn(self, session: Session) -> None:
        """One turn. Raises NoAnswer."""
        loop = asyncio.get_running_loop()
        url, worker = self._spread()
        sent_s = loop.time()
        answer = await self._client.post(url, session.body(self._model, self._shape))
        text, usage = answer.read(self._shape.streams)
        worker = worker or answer.worker
        if not session.turn:
            session.worker = worker
        prompt_tokens = usage["prompt_tokens"]
        cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self.outcome.sent.append(
            Sent(
                sent_s - self._began_s,
                loop.time() - sent_s,
                answer.first_byte_s - sent_s,
                worker,
                session.turn,
                prompt_tokens,
                cached_tokens,
                self._endless.finds(session, prompt_tokens),
                worker == session.worker,
                answer.decision,
            )
        )
        session.go_on(text, usage["total_tokens"], self._shape)
