"""POST /v1/route/explain: where a request would go, with all numbers behind the decision. Nothing is placed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from coordinator.errors import StoreError
from coordinator.pool.owners import read_owners
from coordinator.store import Store
from gateway.deadlines import Deadlines
from gateway.errors import ApiError
from gateway.prompt import Prompt
from gateway.relay.stored_objects import StoredObjects
from gateway.request.admission import Admission, AdmissionSlot, holder_of
from gateway.request.body import receive_body
from gateway.request.job import Job
from gateway.request.keyring import Caller
from gateway.request.reader import Reader
from gateway.request.reading import Body
from gateway.routing.fallbacks import Fallbacks
from gateway.routing.router import Router
from gateway.settings.gateway_settings import GatewaySettings

_SEVERAL = 2


class Explainer:
    """Answers explain requests."""

    def __init__(
        self,
        settings: GatewaySettings,
        admission: Admission,
        reader: Reader,
        router: Router,
        objects: StoredObjects,
        store: Store,
        fallbacks: Fallbacks,
    ) -> None:
        self._store, self._fallbacks = store, fallbacks
        self.use(settings)
        self._admission, self._reader, self._router, self._objects = admission, reader, router, objects
        self._deadlines = Deadlines()

    def use(self, settings: GatewaySettings) -> None:
        """Requests are explained by these settings from now on."""
        self._hold_s, self._body_s = settings.queue.hold_s, settings.timeouts.body_s

    async def __call__(self, request: Request, caller: Caller, path: str | None) -> Response:
        """The decision on the request in this body, which comes from the API or the console. Raises ApiError."""
        headers = dict(request.headers)
        slot = self._admission.admit(holder_of(caller, request.client.host if request.client else ""))
        more = partial(anext, request.stream(), b"")
        try:
            body = await receive_body(slot, headers, more, self._deadlines, self._body_s)
            slot.begin()
            explained = await self._explain(body, headers, caller, slot, path)
            return Response(orjson.dumps(explained), media_type="application/json")
        except ClientDisconnect:
            return Response(status_code=400)
        finally:
            slot.release()

    async def _explain(
        self, body: Body, headers: Mapping[str, str], caller: Caller, slot: AdmissionSlot, path: str | None
    ) -> dict[str, Any]:
        """The decision that a placement would take now. Raises ApiError for a request that would be refused."""
        job = await self._reader.read_to_explain(headers, path or "", caller, slot, body)
        route = job.route
        await self._objects.pin(job)
        if route.prompt is None:
            raise ApiError(400, "invalid_json", "body: send the request to explain.", "body")
        if self._fallbacks.is_due(job):
            self._fallbacks.next(job)
        if route.has_choice:
            self._router.choice.aim(job)
        pool = self._router.pool(job)
        answer: dict[str, Any] = {
            "pool": pool.name,
            "model": job.model,
            "served_model": job.other_name or job.model,
            "path": job.path,
            "prompt_tokens": job.prompt_tokens,
        } | self._backend(job)
        request = self._router.questions.ask(job, pool, (), "")
        if not route.served.replicas:
            held = {"policy": job.policy, "why": "held", "hold_s": self._hold_s}
            return answer | {"chain": _chain(route.prompt, route.tokens, []), "replicas": [], "choice": held}
        if not request.serving:
            reason = "in the registry, the ids of its replicas belong to other engines"
            return answer | _fallback(job, reason, self._router.unshared_order(job))
        try:
            decided = await pool.explain(request)
            owners = await read_owners(pool, route.prompt.keys)
        except StoreError as error:
            return answer | _fallback(job, str(error), self._router.fallback_order(job, pool))
        choice = orjson.loads(decided) if decided is not None else {"why": "none", "replicas": []}
        replicas = sorted(choice.pop("replicas"), key=lambda each: str(each["replica"]))
        return answer | {
            "store": "up",
            "chain": _chain(route.prompt, route.tokens, owners),
            "replicas": replicas,
            "choice": choice,
        }

    def _backend(self, job: Job) -> dict[str, Any]:
        """If the configuration names its model's backends: the one that it was explained for, and who chooses."""
        offer = job.route.offer
        option = offer.options.get(job.route.served.option) if offer is not None else None
        if option is None:
            return {}
        is_counted = self._store.has_one_slot and self._store.is_up()
        by = "only" if len(self._router.choice.ways(job)) < _SEVERAL else "count" if is_counted else "hash"
        return {"backend": option.name, "backend_weight": option.weight, "backend_by": by}


def _fallback(job: Job, reason: str, order: list[str]) -> dict[str, Any]:
    """The answer when the store does not decide."""
    prompt = job.route.prompt
    assert prompt is not None
    return {
        "store": "fallback",
        "reason": reason,
        "chain": _chain(prompt, job.route.tokens, []),
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
