"""Asks a replica into which tokens its engine cuts a text or the prompt of a chat, whose stream has told none."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import orjson

from gateway.relay.held import HeldBytes
from gateway.relay.outgoing import headers_of
from gateway.relay.progress import NotResumable
from gateway.replicas.fleet import Fleet
from gateway.request.admission import Admission
from gateway.request.job import Job
from gateway.upstream import Upstream, UpstreamError

_PATH: Final = "/tokenize"
_WITHIN_S: Final = 2.0
_MOST_ASKED: Final = 3
_MOST_BYTES: Final = 2**22
_UNKNOWN: Final = "text_tokens"


class TextTokens:
    """Asks the replicas of one gateway."""

    def __init__(self, fleet: Fleet, upstream: Upstream, admission: Admission) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._admission = admission

    async def of(self, job: Job, asked: dict[str, Any], but: str) -> list[int]:
        """The tokens of what is `asked` in vLLM's words, for the model of this request. The replica `but` is asked
        last. Raises NotResumable."""
        ready = [name for name in job.route.served.replicas if self._fleet.is_ready(name)]
        body = orjson.dumps({"model": job.other_name or job.model, **asked})
        for name in sorted(ready, key=lambda name: name == but)[:_MOST_ASKED]:
            held = HeldBytes(self._admission)
            try:
                async with asyncio.timeout(_WITHIN_S):
                    return await self._asked(job, job.route.served.replicas[name], body, held)
            except (UpstreamError, TimeoutError, ValueError, KeyError):
                continue
            finally:
                held.let_go()
        raise NotResumable(_UNKNOWN)

    async def _asked(self, job: Job, url: str, body: bytes, held: HeldBytes) -> list[int]:
        """Raises ValueError or KeyError if it does not tell."""
        answer = await self._upstream.send("POST", url, _PATH, headers_of(job), (body,))
        try:
            if not await answer.gathered(_MOST_BYTES, held.has_room) or answer.status != 200:
                raise ValueError
            told: Any = orjson.loads(answer.take())["tokens"]
        finally:
            answer.close()
        if not isinstance(told, list) or not told:
            raise ValueError
        return told
