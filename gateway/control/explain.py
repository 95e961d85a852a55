"""POST /v1/route/explain: where a request would go, with all numbers behind the decision. Nothing is placed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from coordinator.errors import StoreError
from coordinator.pool.owners import read_owners
from gateway.endpoints import endpoint_of
from gateway.errors import ApiError
from gateway.prompt import Prompt
from gateway.relay.stored_objects import StoredObjects
from gateway.replicas.fleet import Fleet
from gateway.request.admission import AdmissionSlot
from gateway.request.keyring import Caller
from gateway.request.reader import Job, Reader
from gateway.request.reading import Body, BodyHead
from gateway.routing.router import Router


class Explainer:
    """Answers explain requests."""

    def __init__(self, reader: Reader, router: Router, fleet: Fleet, objects: StoredObjects, hold_s: float) -> None:
        self._hold_s = hold_s
        self._objects = objects
        self._reader = reader
        self._router = router
        self._fleet = fleet

    async def explain(
        self, body: Body, headers: Mapping[str, str], caller: Caller, slot: AdmissionSlot, path: str | None
    ) -> dict[str, Any]:
        """The decision that a placement would take now. Raises ApiError for a request that would be refused."""
        job = Job("explain", "POST", path or "", endpoint_of(path or ""), "", caller, self._reader.policy(headers), {})
        await self._reader.fill(job, BodyHead(path or ""), slot, body)
        await self._objects.pin(job)
        if job.prompt is None:
            raise ApiError(400, "invalid_json", "body: send the request to explain.", "body")
        if job.has_choice:
            self._router.choice.aim(job)
        pool = self._router.pool(job)
        answer: dict[str, Any] = {
            "pool": pool.name,
            "model": job.model,
            "path": job.path,
            "prompt_tokens": job.prompt_tokens,
        }
        request = self._router.questions.ask(job, pool, (), "")
        if not job.served.replicas:
            held = {"policy": job.policy, "why": "held", "hold_s": self._hold_s}
            return answer | {"chain": _chain(job.prompt, job.tokens, []), "replicas": [], "choice": held}
        if not request.serving:
            reason = "in the registry, the ids of its replicas belong to other engines"
            return answer | _fallback(job, reason, self._router.unshared_order(job))
        try:
            decided = await pool.explain(request)
            owners = await read_owners(pool, job.prompt.keys)
        except StoreError as error:
            return answer | _fallback(job, str(error), self._router.fallback_order(job, pool))
        choice = orjson.loads(decided) if decided is not None else {"why": "none", "replicas": []}
        replicas = sorted(choice.pop("replicas"), key=lambda each: str(each["replica"]))
        return answer | {
            "store": "up",
            "chain": _chain(job.prompt, job.tokens, owners),
            "replicas": replicas,
            "choice": choice,
        }


def _fallback(job: Job, reason: str, order: list[str]) -> dict[str, Any]:
    """The answer when the store does not decide."""
    assert job.prompt is not None
    return {
        "store": "fallback",
        "reason": reason,
        "chain": _chain(job.prompt, job.tokens, []),
        "replicas": [],
        "choice": {"policy": job.policy, "why": "fallback", "order": order},
    }


def _chain(prompt: Prompt, tokens: list[int], owners: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The prefix keys, shallow to deep, each with the size of the prompt up to it and its owners."""
    return [
        {
            "key": key,
            "tokens": tokens[i],
            "text_bytes": prompt.text_bytes[i],
            "images": prompt.image_counts[i],
            "owners": owners[i]["owners"] if owners else [],
        }
        for i, key in enumerate(prompt.keys)
    ]
