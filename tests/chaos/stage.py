"""The cluster that chaos tests share: its faults, its healing and its state."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
from collections.abc import Iterable
from typing import Any

import httpx

from bench.cluster import Cluster, SimReplica
from tests.cluster.clients import ask, prose
from tests.cluster.ledger import Ledger
from tests.polling import eventually
from tests.redis_server import RedisServer

FIRST_BYTE_S = 1.0
# 20 ms, the default, would be too short on a busy machine.
BUDGET_S = 0.5
# 100 tokens of prefill take 2 ms, and one token of an answer takes 20 ms: 4 000 tokens last longer than any test.
REPLICA_ARGUMENTS = ("--speed", "5", "--decode-s-per-token", "0.1")
CONFIG: dict[str, Any] = {
    "hedge": {"max_share": 0},  # each test says which replica is slow, and where its requests go
    "redis": {"budget_ms": BUDGET_S * 1000},
    "timeouts": {"first_byte_s": FIRST_BYTE_S, "request_s": 60},
    "policy": {"allow_header": True},
}
_SAMPLE = r"^%s(?:\{([^}]*)\})? (\S+)$"


class Stage:
    """The shared cluster; `http` and `ledger` are the test's own."""

    http: httpx.AsyncClient
    ledger: Ledger

    def __init__(self, cluster: Cluster, redis: RedisServer) -> None:
        self.cluster = cluster
        self.redis = redis
        self._numbers = itertools.count()

    # -- healing ---------------------------------------------------------------------------------------------

    def heal_processes(self) -> None:
        """Resumes every stopped process, and starts Redis again if it was killed."""
        if self.redis.process.poll() is not None:
            self.redis.start()
        self.redis.resume()
        for replica in self.cluster.replicas:
            replica.signal(signal.SIGCONT)
        for index in range(len(self.cluster.gateways)):
            self.cluster.signal_gateway(index, signal.SIGCONT)

    async def healed(self) -> None:
        """Waits until every gateway serves through the store, on every replica."""
        await asyncio.gather(*(self.clear_faults(replica) for replica in self.cluster.replicas))
        await eventually(self._is_whole)
        await self.ledger.forget_breakers()
        await eventually(self._no_breaker_is_known)

    async def clear_faults(self, replica: SimReplica) -> None:
        """End a replica's failures; start it again if it has died or was killed."""
        await eventually(lambda: self._is_revived(replica))
        await self.http.post(f"{replica.url}/sim/fail", json={"mode": "none"})

    async def _is_revived(self, replica: SimReplica) -> bool:
        """Called repeatedly, because a replica that crashes may still answer just before it exits."""
        assert replica.process is not None
        if replica.process.poll() is not None:
            replica.start()
        return await self.listens(replica.url)

    async def listens(self, url: str) -> bool:
        """Whether a replica or gateway answers there."""
        try:
            return (await self.http.get(f"{url}/version")).status_code == 200
        except httpx.TransportError:
            return False

    async def _is_whole(self) -> bool:
        everyone = sorted(replica.id for replica in self.cluster.replicas)
        answers = [await self.ready(url) for url in self.urls]
        return all(sorted(one["replicas"]) == everyone and one["store"] == "up" for one in answers)

    async def _no_breaker_is_known(self) -> bool:
        return not any([await self.metric(url, "kvgate_breaker_open") for url in self.urls])

    # -- the cluster as seen from outside ----------------------------------------------------------------------

    @property
    def urls(self) -> list[str]:
        return self.cluster.gateway_urls

    def replica(self, name: str) -> SimReplica:
        return next(replica for replica in self.cluster.replicas if replica.id == name)

    async def ready(self, url: str) -> dict[str, Any]:
        """A gateway's /ready, with its status."""
        answer = await self.http.get(f"{url}/ready")
        return {**answer.json(), "status": answer.status_code}

    async def metric(self, url: str, name: str, **labels: str) -> float:
        """The sum of the metric's samples that carry these labels."""
        text = (await self.http.get(f"{url}/metrics")).text
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        found = re.findall(_SAMPLE % re.escape(name), text, re.MULTILINE)
        return sum(float(value) for carried, value in found if wanted <= set(carried.split(",")))

    async def metric_of_all(self, name: str, **labels: str) -> float:
        return sum([await self.metric(url, name, **labels) for url in self.urls])

    async def explain(self, text: str, url: str | None = None) -> dict[str, Any]:
        """A gateway's answer to POST /v1/route/explain for a prompt."""
        body = {"model": "sim", "messages": [{"role": "user", "content": text}]}
        answer: dict[str, Any] = (await self.http.post(f"{url or self.urls[0]}/v1/route/explain", json=body)).json()
        return answer

    async def explained(self, text: str, url: str | None = None) -> dict[str, dict[str, Any]]:
        """The current cost of this prompt on each replica. A store that is late on a busy machine is asked again."""

        async def by_the_store() -> dict[str, Any]:
            answer = await self.explain(text, url)
            return answer if answer.get("store") == "up" else {}

        return {one["replica"]: one for one in (await eventually(by_the_store))["replicas"]}

    # -- prompts -------------------------------------------------------------------------------------------------

    def new_prompt(self) -> str:
        """A text that no request has sent yet."""
        return prose(f"prompt {next(self._numbers)}")

    async def warm_prompt(self, on: str | None = None) -> tuple[str, SimReplica]:
        """A prompt that one replica has in its cache, and that replica (`on` if given)."""
        while True:
            text = self.new_prompt()
            answer = await ask(self.http, self.urls[0], text)
            assert answer.status_code == 200, answer.text
            name = answer.headers["x-kvgate-replica"]
            if on in (None, name):
                return text, self.replica(name)

    async def all_load_is_given_back(self) -> bool:
        sums = await self.ledger.sums()
        assert not sums.problems(), sums.problems()
        return sums.are_zero

    async def active_is(self, count: int) -> bool:
        """Whether the store counts this many requests. Fails if the store's sums contradict each other."""
        sums = await self.ledger.sums()
        assert not sums.problems(), sums.problems()
        return sums.total == count

    async def fail_everywhere(self, mode: str, **details: Any) -> None:
        await asyncio.gather(*(self.fail(replica, mode, **details) for replica in self.cluster.replicas))

    async def fail(self, replica: SimReplica, mode: str, **details: Any) -> None:
        """Make a replica fail on demand; see gateway/simulator/faults.py."""
        answer = await self.http.post(f"{replica.url}/sim/fail", json={"mode": mode, **details})
        answer.raise_for_status()

    async def replica_state(self, replica: SimReplica) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.http.get(f"{replica.url}/sim/state")).json()
        return answer

    async def ready_replicas(self, urls: Iterable[str] | None = None) -> list[list[str]]:
        return [sorted((await self.ready(url))["replicas"]) for url in urls or self.urls]
