"""vLLM's NixlConnector: one server computes a prompt, and another one fetches its KV blocks and decodes.

The answer of the first leg has a reference to the blocks, which stay pinned until they are fetched, or for 30 s.
Whoever uses a reference later gets what the blocks hold by then. Here, that is always another prompt, which a client
sees as a wrong answer; vLLM may still have the right one. A server that is gone is an error, or with the policy
`recompute`, a prompt to compute. In the place of the transfer, the servers speak HTTP, and the time of one passes.
Checked against captures of vLLM 0.33 with NIXL 1.5 over TCP.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from yarl import URL

from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.engine import Generation
from gateway.simulator.errors import RequestRefused, bad_request

_LEASE_S = 30.0
_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a server has fetched of a prompt."""

    tokens: int
    cached_tokens: int
    """Those that the first server had cached. Usage tells these."""
    is_late: bool
    """Whether the blocks were given away before."""

    def answer(self, answer: GeneratedAnswer) -> GeneratedAnswer:
        """What the engine decodes."""
        return replace(answer, pieces=answer.pieces[::-1], shown=None) if self.is_late else answer


@dataclass(slots=True)
class Nixl:
    """One server's."""

    recomputes: bool
    transfer_s_per_token: float
    counts: Counter[str] = field(default_factory=Counter)
    """References that were given, fetched, fetched `late`, that have expired; and fetches that failed."""
    on_unpinned: Callable[[], None] = lambda: None
    """Called when blocks were fetched, or have expired."""
    _engine_id: str = field(default_factory=lambda: os.urandom(8).hex())
    _pinned: dict[str, tuple[int, int]] = field(default_factory=dict)

    def give(self, request_id: str, generation: Generation, url: URL) -> dict[str, Any]:
        """A reference to the blocks of a prompt that was computed."""
        name, usage = f"{request_id}-{os.urandom(4).hex()}", generation.usage()
        self._pinned[name] = usage.prompt_tokens, usage.cached_tokens
        self.counts["given"] += 1
        asyncio.get_running_loop().call_later(_LEASE_S, self._expire, name)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1]],
            "remote_engine_id": self._engine_id,
            "remote_request_id": name,
            "remote_host": url.host or "",
            "remote_port": url.port or 0,
            "tp_size": 1,
            "remote_num_tokens": usage.prompt_tokens,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": usage.cached_tokens,
        }

    @property
    def num_pinned(self) -> int:
        """Prompts whose blocks wait to be fetched."""
        return len(self._pinned)

    def _expire(self, name: str) -> None:
        if self._pinned.pop(name, None) is not None:
            self.counts["expired"] += 1
            self.on_unpinned()

    def unpin(self, engine_id: str, name: str) -> bool:
        """Another server fetches the blocks. Whether they are still there. Raises a 400 for those of another life."""
        if engine_id != self._engine_id:
            raise bad_request("unknown engine id")
        is_there = self._pinned.pop(name, None) is not None
        self.counts["fetched" if is_there else "late"] += 1
        self.on_unpinned()
        return is_there

    async def fetch(self, reference: dict[str, Any]) -> Fetched | None:
        """None: the prompt is to be computed here. Raises a 500."""
        url = f"http://{reference['remote_host']}:{reference['remote_port']}/sim/fetch"
        told = {"engine_id": reference["remote_engine_id"], "name": reference["remote_request_id"]}
        limit = aiohttp.ClientTimeout(sock_connect=_CONNECT_S)
        try:
            async with aiohttp.ClientSession(timeout=limit) as session, session.post(url, json=told) as answer:
                answer.raise_for_status()
                is_there = (await answer.json())["is_there"]
        except aiohttp.ClientError:
            self.counts["failed"] += 1
            if self.recomputes:
                return None
            raise RequestRefused(500, "Internal server error") from None
        await asyncio.sleep(reference["remote_num_tokens"] * self.transfer_s_per_token)
        return Fetched(reference["remote_num_tokens"], reference["remote_prefill_cached_tokens"], not is_there)
