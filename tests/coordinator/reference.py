"""A look at every replica: what `place` would choose if it read them all. Random states of a fleet, to compare both."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.placement import PlaceRequest
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from coordinator.registry import ReplicaRecord
from coordinator.subset import Subset
from tests.coordinator.stage import chain

STATES = (
    *("all idle", "busy", "uneven", "90 % dead", "30 % broken", "an adapter on three", "a prompt owned by all"),
    *("mixed capacities", "all tried but one", "full caches", "caches filling up"),
)
_ASSUMED_CAPACITY_TOKENS, _REQUEST_COST_TOKENS, _COPY_WEIGHT = 100_000, 128, 16
_MIN_SLACK_REQUESTS, _LOAD_FACTOR = 8, 1.5
"""The numbers of lua/lib/costs.lua."""


@dataclass
class Replica:
    """One replica as the store knows it."""

    active: int
    backlog_tokens: int
    owned_tokens: int
    capacity_tokens: int
    is_dead: bool = False
    is_broken: bool = False

    @property
    def occupied_tokens(self) -> int:
        return self.capacity_tokens if self.owned_tokens > 0.96 * self.capacity_tokens else self.owned_tokens


@dataclass
class Prompt:
    """A request, and who owns how much of it."""

    keys: list[str]
    tokens: list[int]
    prompt_tokens: int
    hits: int
    depth: dict[str, int]
    """Replica → how many of the keys it owns."""
    answer: tuple[int, int] = (0, 0)
    tried: list[str] = field(default_factory=list)

    def matched_tokens(self, replica: str) -> int:
        depth = self.depth.get(replica, 0)
        return self.tokens[depth - 1] if depth else 0

    def credit_tokens(self, replica: str) -> int:
        """With the last answer, for those who own the chain up to it."""
        before, end = self.answer
        is_answered = 0 < before <= self.depth.get(replica, 0) < end and self.hits <= 8
        return self.tokens[end - 1] if is_answered else self.matched_tokens(replica)

    def request(self, serving: Subset, seed: int, knobs: PolicyKnobs) -> PlaceRequest:
        return PlaceRequest(
            f"r{seed}",
            self.keys,
            self.tokens,
            self.prompt_tokens,
            knobs,
            seed,
            tuple(self.tried),
            serving=serving,
            answer=self.answer,
        )


def costs(fleet: Mapping[str, Replica], names: Sequence[str], prompt: Prompt) -> dict[str, float]:
    """The cost of each replica: the expression of lua/lib/costs.lua, for replicas of any capacity and no other tier."""
    held = max((prompt.matched_tokens(name) for name in names), default=0)
    best = max((prompt.credit_tokens(name) for name in names), default=0)
    request_cost = _REQUEST_COST_TOKENS + 0.1 * (prompt.prompt_tokens - best)
    found = {}
    for name in names:
        one, lacks, share = fleet[name], best - prompt.credit_tokens(name), 1.0
        if prompt.hits and held:
            holds = one.capacity_tokens or _ASSUMED_CAPACITY_TOKENS
            share = max(1 / (1 + prompt.hits), min(1.0, _COPY_WEIGHT * lacks / holds))
        copied = max(lacks, held - prompt.matched_tokens(name)) * share if held else prompt.prompt_tokens
        displaced = max(0.0, one.occupied_tokens + copied - one.capacity_tokens) if one.capacity_tokens else 0.0
        charged = prompt.prompt_tokens - best + lacks * share
        found[name] = one.backlog_tokens + 3 * charged + displaced + request_cost * one.active
    return found


def below_the_guard(fleet: Mapping[str, Replica], names: Sequence[str]) -> list[str]:
    """The replicas that the load guard allows."""
    mean_active = sum(fleet[name].active for name in names) / len(names)
    limit = max(_MIN_SLACK_REQUESTS, _LOAD_FACTOR * mean_active)
    return [name for name in names if fleet[name].active < limit] or list(names)


class Stage:
    """A fleet in a random state of one kind, in the store, and random prompts for it."""

    def __init__(self, pool: Pool, kind: str, replicas: int, dice: random.Random) -> None:
        self.pool, self.kind, self.dice = pool, kind, dice
        self.fleet = {f"vllm-{dice.getrandbits(32):08x}": self._replica() for _ in range(replicas)}
        self.serving = list(self.fleet)
        if kind == "an adapter on three":
            self.serving = dice.sample(self.serving, 3)
        self.subset = Subset.of(self.serving)

    @property
    def good(self) -> list[str]:
        return [name for name in self.serving if not (self.fleet[name].is_dead or self.fleet[name].is_broken)]

    def _replica(self) -> Replica:
        dice, kind = self.dice, self.kind
        capacity = dice.choice([20_000, 50_000, 100_000, 400_000]) if kind == "mixed capacities" else 100_000
        occupied = {"full caches": dice.uniform(0.93, 1.02), "caches filling up": dice.random()}.get(
            kind, dice.choice([dice.uniform(0.97, 1.0), dice.uniform(0.5, 1)])
        )
        if kind == "all idle":
            return Replica(0, 0, dice.randint(0, 5000), capacity)
        if kind == "uneven":
            return Replica(dice.randint(0, 20), dice.randint(0, 20_000), int(occupied * capacity), capacity)
        active = int(dice.expovariate(1 / 3))
        backlog_tokens = sum(dice.choice([200, 1000, 3000]) for _ in range(active) if dice.random() < 0.2)
        return Replica(
            active,
            backlog_tokens,
            int(occupied * capacity),
            capacity,
            is_dead=kind == "90 % dead" and dice.random() < 0.9,
            is_broken=kind == "30 % broken" and dice.random() < 0.3,
        )

    async def write(self, now_ms: int) -> None:
        """Write the state to the store as gateways would have."""
        pool, fleet = self.pool, self.fleet
        for name, one in fleet.items():
            state = "dead" if one.is_dead else "ready"
            url = f"http://{name}.test:8000"
            pool.records[name] = ReplicaRecord(name, "life1", state, one.capacity_tokens, 1, url)
        await self._hash(pool.keys.replicas, {name: record.text for name, record in pool.records.items()})
        await self._hash(pool.keys.active, {name: one.active for name, one in fleet.items()})
        await self._hash(pool.keys.backlog_tokens, {name: one.backlog_tokens for name, one in fleet.items()})
        await self._hash(pool.keys.owned_tokens, {name: one.owned_tokens for name, one in fleet.items()})
        broken = {name: f"3 {now_ms + 50_000} 0" for name, one in fleet.items() if one.is_broken}
        await self._hash(pool.keys.breakers, broken)

    async def prompt(self, number: int, now_ms: int) -> Prompt:
        """A prompt, whose owners are written to the store."""
        dice = self.dice
        length, span = dice.choice([3, 10, 40]), dice.choice([64, 100, 400])
        tokens = [span * (i + 1) for i in range(length)]
        keys = chain(self.kind, number, *range(length))[2:]
        tried = dice.sample(self.good, len(self.good) - 1) if self.kind == "all tried but one" else []
        prompt = Prompt(
            keys, tokens, tokens[-1] + dice.choice([0, 50]), dice.choice([0, 0, 8, 80]), self._depths(length)
        )
        prompt.tried = tried
        before = dice.choice(sorted(prompt.depth.values()) or [0])
        if 0 < before < length and dice.random() < 0.5:
            prompt.answer = before, dice.randint(before + 1, length)
        for index, key in enumerate(keys):
            record = f"life1 claim gpu {span} {prompt.hits} {now_ms} other"
            owners = {name: record for name, depth in prompt.depth.items() if depth > index}
            await self._hash(self.pool.keys.own(key), owners)
        return prompt

    def _depths(self, length: int) -> dict[str, int]:
        """Who owns how much: nobody; a few; a few beside the many that own the beginning; very many."""
        dice, names = self.dice, self.serving
        if self.kind == "a prompt owned by all":
            return dict.fromkeys(names, length)
        owned: dict[str, int] = {}
        shape = dice.choice(["nobody", "few", "few", "beginning", "middle", "many"])
        if shape in ("few", "beginning", "middle"):
            owned |= {name: dice.randint(1, length) for name in _some(dice, names, dice.randint(1, 4))}
        if shape in ("beginning", "middle"):
            for name in _some(dice, names, int(len(names) * dice.choice([0.1, 0.5, 1]))):
                owned.setdefault(name, max(1, length // 10))
        if shape == "middle":
            for name in _some(dice, names, dice.choice([5, 12, 30])):
                owned[name] = max(owned.get(name, 0), length // 2)
        if shape == "many":
            many = _some(dice, names, dice.choice([20, 50, 100, 300]))
            owned |= {name: dice.choice([length, length, max(1, length // 2)]) for name in many}
        return {name: depth for name, depth in owned.items() if depth}

    async def _hash(self, key: str, fields: Mapping[str, object]) -> None:
        if fields:
            await self.pool.read("HSET", key, *(each for pair in fields.items() for each in pair))


def _some(dice: random.Random, names: Sequence[str], count: int) -> list[str]:
    return dice.sample(names, min(len(names), count))
