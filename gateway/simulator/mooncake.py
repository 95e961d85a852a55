"""vLLM's MooncakeConnector: one server computes a prompt, and pushes its KV blocks to another one, which decodes.

Both get the request at the same time, with one transfer id. The one that decodes asks the other one's bootstrap server
(GET /query; here on the server's own port) for the address of an engine, and never forgets it. There it waits for the
blocks: as long as vLLM if they never come, or if nobody is there. An id is good once: who uses it again waits, too.
In the place of the transfer, the servers speak HTTP, and the time of one passes. Checked against vLLM 0.33's source.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from gateway.simulator.engine import Generation
from gateway.simulator.errors import RequestRefused, not_found
from gateway.simulator.nixl import Fetched
from gateway.tasks import Tasks

_ABORT_S = 480.0
"""VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT: blocks are kept, and waited for, that long."""
_SILENCE_S = _ABORT_S + 60
"""So long a server waits for one that is gone."""
_QUERIES, _AGAIN_S = 3, 0.1
_FOR_EVER = aiohttp.ClientTimeout(total=None)


@dataclass(slots=True)
class Mooncake:
    """One server's."""

    recomputes: bool
    transfer_s_per_token: float
    tasks: Tasks
    counts: Counter[str] = field(default_factory=Counter)
    """Prompts that were `sent`, have `expired`, and were fetched; fetches that failed; ids that were `repeated`."""
    _engine_id: str = field(default_factory=lambda: os.urandom(8).hex())
    _sends: dict[str, asyncio.Future[tuple[int, int]]] = field(default_factory=dict)
    """Transfer id → the tokens of the prompt, and those that were cached; done when they are computed."""
    _used: set[tuple[str, str]] = field(default_factory=set)
    _workers: dict[str, str] = field(default_factory=dict)
    """Engine id → the address of that server."""

    def query(self, address: str) -> dict[str, Any]:
        """What the bootstrap server answers."""
        return {"0": {"engine_id": self._engine_id, "worker_addr": {"0": {"0": address}}}}

    def give(self, asked: Mapping[str, Any], generation: Generation) -> None:
        """The prompt is computed. If its answer has ended otherwise than by its limit, nobody gets its blocks."""
        transfer_id = asked.get("transfer_id")
        if not transfer_id or generation.sequences[0].answer.finish_reason != "length":
            return
        self._use("leg", transfer_id)
        if (send := self._send(transfer_id)).done():
            send = self._sends[transfer_id] = asyncio.get_running_loop().create_future()
        usage = generation.usage()
        send.set_result((usage.prompt_tokens, usage.cached_tokens))
        asyncio.get_running_loop().call_later(_ABORT_S, self._expire, transfer_id, send)

    async def push(self, engine_id: str, transfer_id: str) -> dict[str, Any]:
        """Another server waits for the blocks. Raises a 404 if it means another life of this one."""
        if engine_id != self._engine_id:
            raise not_found()
        self._use("pull", transfer_id)
        send = self._send(transfer_id)
        try:
            async with asyncio.timeout(_ABORT_S):
                tokens, cached_tokens = await asyncio.shield(send)
        except TimeoutError:
            return {"error": "Timeout waiting for P side ready."}
        if self._sends.pop(transfer_id, None) is not send:
            return {"error": "expired"}
        self.counts["sent"] += 1
        return {"tokens": tokens, "cached_tokens": cached_tokens}

    async def fetch(self, reference: dict[str, Any]) -> Fetched | None:
        """None: the prompt is to be computed here. Raises a 500. If the request ends before, the transfer goes on."""
        told = await asyncio.shield(self.tasks.spawn(self._told(reference), "a transfer"))
        if told is None or "error" in told:
            self.counts["failed"] += 1
            if self.recomputes:
                return None
            raise RequestRefused(500, "Internal server error")
        self.counts["fetched"] += 1
        return Fetched(told["tokens"], told["tokens"], is_late=False)  # usage calls all of it cached

    async def _told(self, reference: dict[str, Any]) -> dict[str, Any] | None:
        engine_id = reference["remote_engine_id"]
        if engine_id not in self._workers:
            await self._look_up(reference["remote_bootstrap_addr"])
        if engine_id not in self._workers:
            return None
        asks = {"engine_id": engine_id, "transfer_id": reference["transfer_id"]}
        url = f"{self._workers[engine_id]}/sim/push"
        try:
            async with aiohttp.ClientSession(timeout=_FOR_EVER) as session, session.post(url, json=asks) as answer:
                answer.raise_for_status()
                told: dict[str, Any] = await answer.json()
        except aiohttp.ClientError:  # ZeroMQ would not see that it is gone
            await asyncio.sleep(_SILENCE_S)
            return None
        await asyncio.sleep(told.get("tokens", 0) * self.transfer_s_per_token)
        return told

    async def _look_up(self, address: str) -> None:
        """Which engines are behind a bootstrap server."""
        for _ in range(_QUERIES):
            try:
                async with aiohttp.ClientSession() as session, session.get(f"{address}/query") as answer:
                    answer.raise_for_status()
                    engines = await answer.json()
            except aiohttp.ClientError:
                await asyncio.sleep(_AGAIN_S)
                continue
            self._workers |= {each["engine_id"]: each["worker_addr"]["0"]["0"] for each in engines.values()}
            return

    def _send(self, transfer_id: str) -> asyncio.Future[tuple[int, int]]:
        """Whoever comes first makes it."""
        if transfer_id not in self._sends:
            self._sends[transfer_id] = asyncio.get_running_loop().create_future()
        return self._sends[transfer_id]

    def _use(self, how: str, transfer_id: str) -> None:
        self.counts["repeated"] += (how, transfer_id) in self._used
        self._used.add((how, transfer_id))

    def _expire(self, transfer_id: str, send: asyncio.Future[tuple[int, int]]) -> None:
        if self._sends.get(transfer_id) is send:
            del self._sends[transfer_id]
            self.counts["expired"] += 1
