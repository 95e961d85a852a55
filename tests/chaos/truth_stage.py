"""The cluster for comparing the map with the replicas' caches, and the steps that its tests share.

The map's side comes from POST /v1/route/explain. The truth is the replica's own list of blocks, and the prompt's
blocks, which the simulator's code computes here.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import redis.asyncio as redis

from bench.cluster import Cluster, SimReplica
from coordinator.keys import PoolKeys
from coordinator.registry import AgentRecord
from gateway.tasks import Tasks
from tests.chaos.truth_check import BLOCK_TOKENS, Told, fitted, is_measured, path_of, untold, untrue
from tests.cluster.clients import CHAT, chat, is_complete, prose
from tests.cluster.ledger import Ledger
from tests.polling import PATIENCE_S, Patience, eventually
from tests.redis_server import RedisServer

BLOCKS = 256
"""The blocks of a replica's cache: room for six prompts of 400 words."""
REPLICA_ARGUMENTS = ("--speed", "20", "--num-gpu-blocks", str(BLOCKS))
CONFIG: dict[str, Any] = {
    "hedge": {"max_share": 0},  # each test says which replica is slow, and where its requests go
    "redis": {"budget_ms": 500},
    "timeouts": {"first_byte_s": 5, "request_s": 60},
    "policy": {"allow_header": True},
}
# The node size limits how many entries `MAXLEN ~` keeps beyond its cap.
REDIS_OPTIONS = ("--stream-node-max-entries", "10")
SETTLES_WITHIN_S = 25.0
_WATCH_S = 0.05


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: its replica, the predicted and the cached tokens."""

    replica: str
    decision: str
    matched_tokens: int
    cached_tokens: int
    prompt_tokens: int

    @property
    def is_overpredicted(self) -> bool:
        """Whether fewer tokens were cached than predicted, by more than rounding."""
        return self.cached_tokens < self.matched_tokens - 2 * BLOCK_TOKENS


class TruthStage:
    """The shared cluster; `http`, `client` and `ledger` are the test's own."""

    http: httpx.AsyncClient
    client: redis.Redis
    ledger: Ledger

    def __init__(self, cluster: Cluster, store: RedisServer) -> None:
        self.cluster = cluster
        self.redis = store
        self.keys = PoolKeys(cluster.pool)
        self._numbers = itertools.count()

    @property
    def urls(self) -> list[str]:
        return self.cluster.gateway_urls

    def replica(self, name: str) -> SimReplica:
        return next(replica for replica in self.cluster.replicas if replica.id == name)

    def new_prompt(self, words: int = 400) -> str:
        """A text that no request has sent yet; 400 words are about 40 blocks. Sending it again takes no more room."""
        return fitted(prose(f"truth {next(self._numbers)}", words), last_block_tokens=8)

    # -- healing -----------------------------------------------------------------------------------------------

    async def heal(self) -> None:
        """Restores the initial state: all processes run, and every gateway hears every agent."""
        if self.redis.process.poll() is not None:
            self.redis.start()
        self.redis.resume()
        for daemon in (*self.cluster.gateway_processes, *self.cluster.agents):
            daemon.signal(signal.SIGCONT)
            if not daemon.is_alive():
                daemon.start()
        lives = await self.ledger.replicas()
        ended: dict[str, str] = {}
        for replica in self.cluster.replicas:
            replica.signal(signal.SIGCONT)
            if replica.arguments != REPLICA_ARGUMENTS:
                replica.kill()
                replica.arguments = REPLICA_ARGUMENTS
            if replica.process is None or replica.process.poll() is not None:
                replica.start()
                if replica.id in lives:
                    ended[replica.id] = lives[replica.id].incarnation
        await eventually(self._all_listen)
        await eventually(lambda: self._have_begun_anew(ended))
        await eventually(self.is_exact_everywhere)
        await asyncio.gather(*(self.fail(replica, "none") for replica in self.cluster.replicas))
        await self.ledger.forget_breakers()
        for replica in self.cluster.replicas:
            while await self.is_relearning(replica):
                await self.fill(replica)  # the agent sees each new block stored, so it knows the whole cache

    async def restart(self, replica: SimReplica, *arguments: str) -> None:
        """Kills a replica and starts it again, with these arguments besides the usual ones. Returns when every gateway
        knows its new life. Until then the old one passes for exact."""
        ended = {replica.id: (await self.ledger.replicas())[replica.id].incarnation}
        replica.kill()
        replica.arguments = (*REPLICA_ARGUMENTS, *arguments)
        replica.start()
        await eventually(lambda: self._have_begun_anew(ended))
        await eventually(self.is_exact_everywhere)

    async def _have_begun_anew(self, ended: dict[str, str]) -> bool:
        """Whether none of these lives of replicas is registered any more. Until then they pass for exact."""
        lives = await self.ledger.replicas()
        return all(name not in lives or lives[name].incarnation != life for name, life in ended.items())

    async def _all_listen(self) -> bool:
        return all([await self.listens(replica) for replica in self.cluster.replicas])

    async def listens(self, replica: SimReplica) -> bool:
        """Whether the replica answers."""
        try:
            return (await self.http.get(f"{replica.url}/health")).is_success
        except httpx.TransportError:
            return False

    async def agent_record(self, replica: SimReplica) -> AgentRecord:
        """The last record of the replica's agent."""
        return AgentRecord.parse(await self.client.hget(self.keys.agents, replica.id))

    async def is_relearning(self, replica: SimReplica) -> bool:
        """Whether the replica's cache may hold unpublished blocks, according to its agent's last heartbeat."""
        return (await self.agent_record(replica)).is_relearning

    async def is_exact_everywhere(self) -> bool:
        """Whether every agent holds the registered life of its replica, and every gateway knows it."""
        lives, agents = await self.ledger.replicas(), await self.client.hgetall(self.keys.agents)
        now_s, _ = await self.client.time()
        everyone = sorted(replica.id for replica in self.cluster.replicas)
        for name in everyone:
            agent = AgentRecord.parse(agents[name]) if name in agents and name in lives else None
            if agent is None or agent.incarnation != lives[name].incarnation or agent.lease_until_ms < now_s * 1000:
                return False
        try:
            ready = [(await self.http.get(f"{url}/ready")).json() for url in self.urls]
        except httpx.TransportError:
            return False
        return all(one["store"] == "up" and sorted(one["exact"]) == everyone for one in ready)

    async def fail(self, replica: SimReplica, mode: str, **details: Any) -> None:
        """See gateway/simulator/faults.py."""
        (await self.http.post(f"{replica.url}/sim/fail", json={"mode": mode, **details})).raise_for_status()

    async def all_load_is_given_back(self) -> bool:
        sums = await self.ledger.sums()
        assert not sums.problems(), sums.problems()
        return sums.are_zero

    # -- requests ----------------------------------------------------------------------------------------------

    async def ask(self, text: str, gateway: int = 0, url: str = "", policy: str = "prefix_kv_aware") -> Answer:
        """Sends one request, which must get a whole answer."""
        response = await self.http.post(
            (url or self.urls[gateway]) + CHAT, json=chat(text), headers={"x-kvgate-policy": policy}
        )
        assert is_complete(response), response.text
        usage = response.json()["usage"]
        return Answer(
            response.headers["x-kvgate-replica"],
            response.headers["x-kvgate-decision"],
            int(response.headers["x-kvgate-matched-tokens"]),
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            usage["prompt_tokens"],
        )

    async def ask_on(self, replica: SimReplica, text: str, url: str = "") -> Answer:
        """Sends a request until this replica answers it. Other replicas may answer it before."""
        while True:
            answer = await self.ask(text, url=url, policy="round_robin")
            if answer.replica == replica.id:
                return answer

    async def warm(self, count: int = 6, on: SimReplica | None = None, words: int = 400) -> list[str]:
        """This many new prompts that the map knows, on one replica if given."""
        texts: list[str] = []
        for number in itertools.takewhile(lambda _: len(texts) < count, range(100)):
            text = self.new_prompt(words)
            answer = await self.ask(text, gateway=number % 2)
            if "state=exact" not in answer.decision:
                # The store may be late on a machine that stalls. Then this prompt takes room in the cache, and the map
                # learns nothing of it. So begin again.
                await self.fill(self.replica(answer.replica))
                texts.clear()
            elif on is None or on.id == answer.replica:
                texts.append(text)
        assert len(texts) == count, (await self.ledger.sums(), await self.client.hgetall(self.keys.owned_tokens))
        await self.settle(texts)
        await self.measured(texts)
        return texts

    async def measured(self, texts: Sequence[str]) -> None:
        """Wait until agents have confirmed these prompts in full: no record is a claim."""
        patience = Patience(PATIENCE_S)
        while missing := [told for text in texts if not is_measured(text, told := (await self.told(text))[1])]:
            assert not patience.is_over(), missing
            await asyncio.sleep(_WATCH_S)

    async def old_and_kept(self, replica: SimReplica) -> tuple[str, list[str]]:
        """Fills the cache. `crowd_out` then evicts most of the first returned prompt and nothing of the others."""
        await self.fill(replica)
        old, *kept = await self.warm(3, replica, words=300)
        return old, kept

    async def crowd_out(self, replica: SimReplica) -> None:
        await self.fill(replica, blocks=BLOCKS - 80)

    async def forget_chains(self) -> None:
        """Deletes the chains that gateways write for agents. Without this they expire after a minute."""
        await self.client.delete(self.keys.bound_slot(0), self.keys.bound_slot(1))

    async def fill(self, replica: SimReplica, blocks: int = BLOCKS - 1) -> None:
        """Directly on the replica, evict the `blocks` least recently used blocks of its cache."""
        words = f"filler {next(self._numbers)} ".ljust(blocks * BLOCK_TOKENS * 4 - 4, "x")
        body = {"model": "sim", "prompt": words, "max_tokens": 1}
        (await self.http.post(f"{replica.url}/v1/completions", json=body)).raise_for_status()

    # -- the truth ---------------------------------------------------------------------------------------------

    async def hashes(self, replica: SimReplica) -> set[str]:
        """The blocks on the replica that a request can hit."""
        return set((await self.http.get(f"{replica.url}/sim/state")).json()["hashes"])

    async def told(self, text: str, gateway: int = 0) -> tuple[list[int], dict[str, Told]]:
        """The estimated ends of a prompt's keys in tokens, and the map's records of them by replica, without stale
        records."""
        answer = await self.http.post(f"{self.urls[gateway]}/v1/route/explain", json=chat(text))
        answer.raise_for_status()
        chain = answer.json()["chain"]
        found: dict[str, Told] = {}
        for index, key in enumerate(chain):
            for owner in key["owners"]:
                if owner["stale"]:
                    continue
                before = found.get(owner["replica"], Told()).records
                found[owner["replica"]] = Told(index + 1, owner.get("tokens", key["tokens"]), (*before, owner))
        return [key["tokens"] for key in chain], found

    async def owners(self, text: str, gateway: int = 0) -> set[str]:
        """The replicas that hold all of a prompt according to the map."""
        ends, found = await self.told(text, gateway)
        return {replica for replica, told in found.items() if told.keys == len(ends)}

    async def problems(self, texts: Sequence[str], *, complete: bool = True, claims: bool = True) -> list[str]:
        """Errors in the map of either gateway, and, with `complete`, gaps in it. Claims are only predictions: they are
        checked only with `claims`."""
        found: list[str] = []
        held = {replica.id: await self.hashes(replica) for replica in self.cluster.replicas}
        for text, gateway in itertools.product(texts, range(len(self.urls))):
            ends, told = await self.told(text, gateway)
            for replica, blocks in held.items():
                name = f"{text.split(':')[0]} on {replica} by gw{gateway}"
                mine = told.get(replica, Told())
                found += (f"{name}: {each}" for each in untrue(path_of(text), blocks, mine, claims))
                if complete:
                    found += (f"{name}: {each}" for each in untold(path_of(text), blocks, mine, ends))
        return found

    async def settle(
        self, texts: Sequence[str], *, complete: bool = True, claims: bool = True, within_s: float = SETTLES_WITHIN_S
    ) -> None:
        """Wait until there are no `problems` and the map's sums are right."""
        patience = Patience(within_s)
        while problems := [
            *await self.problems(texts, complete=complete, claims=claims),
            *await self.ledger.ownership_problems(),
        ]:
            assert not patience.is_over(), problems
            await asyncio.sleep(_WATCH_S)

    @asynccontextmanager
    async def staying_resident(self, texts: Sequence[str]) -> AsyncIterator[None]:
        """Fails if a replica that owns a prompt on entry stops owning it at any moment inside the context."""
        before = {text: await self.owners(text) for text in texts}
        assert all(before.values())
        missing: dict[str, set[str]] = {}
        looks, rounds = itertools.count(), 0

        async def watch() -> None:
            nonlocal rounds
            while not missing:
                rounds += 1
                lost = {text: before[text] - await self.owners(text, next(looks) % 2) for text in texts}
                missing.update({text.split(":")[0]: replicas for text, replicas in lost.items() if replicas})
                await asyncio.sleep(_WATCH_S)

        tasks = Tasks()
        tasks.spawn(watch(), "watch residency")
        try:
            yield
            await eventually(lambda: bool(missing) or rounds > 2)
        finally:
            await tasks.close()
        assert not missing, missing
