"""Objects that a replica makes and keeps: stored responses, videos, files, batches, voices. Only that replica can
continue, show or delete them."""

from __future__ import annotations

import asyncio
import re
from itertools import chain
from typing import Any

from coordinator.errors import StoreError
from coordinator.pool import object_owners
from coordinator.store import Store
from gateway.endpoints import Stored
from gateway.errors import ApiError
from gateway.relay.reply import Reply
from gateway.replicas.fleet import Fleet
from gateway.replicas.served import ServedModel
from gateway.request.job import Job
from gateway.request.paths import object_in_path
from gateway.routing.ticket import Ticket
from gateway.upstream.excerpts import WINDOW_BYTES

_ID_IN_BODY = re.compile(rb'"id"\s*:\s*"(resp_[^"]{1,128})"')
_ONE: dict[Stored, str] = {
    "responses": "response",
    "videos": "video",
    "files": "file",
    "batches": "batch",
    "audio/voices": "voice",
}
_MAX_ID_CHARS = 256
_NOTED_S = 0.25
_SHARED: Stored = "audio/voices"
"""Clients choose their names, and engines have some of their own."""


class StoredObjects:
    """Remembers which replica made an object, and pins the requests that name the object to that replica."""

    def __init__(self, store: Store, fleet: Fleet) -> None:
        self._store = store
        self._fleet = fleet

    async def pin(self, job: Job) -> None:
        """Pins a request that names an object. Raises a 404 if its replica is gone, or if it is another tenant's. A
        response that no gateway knows is a 404, too, and so is any other object that a tenant's path names. Otherwise
        it may be the engine's own, and is asked for by load. Raises a 403 for what concerns all tenants."""
        _refuse_what_is_shared(job)
        if (named := object_in_path(job.path)) is not None:
            kind, object_id = named
            await self._pin(job, kind, object_id, f"{_ONE[kind]}_id")
        elif job.refers_to and job.endpoint.refers_to is not None:
            param, kind = job.endpoint.refers_to
            await self._pin(job, kind, job.refers_to, param)

    async def _pin(self, job: Job, kind: Stored, object_id: str, param: str) -> None:
        """`param` names the field in errors."""
        one = _ONE[kind]
        try:
            for name, served in self._fleet.pools().items():
                pool = self._store.pool(name)
                found = await object_owners.find(pool, _name(kind, object_id), job.caller.tenant)
                if found is None:
                    continue
                if not found.is_callers and kind != _SHARED:
                    break
                record = pool.records.get(found.replica)
                if record is None or record.incarnation != found.incarnation:
                    message = f"The replica that kept this {one} has restarted or left."
                    raise ApiError(404, f"{one}_lost", message, param)
                job.route.pin(found.replica, self._served_by(job, found.replica, served))
                return
            else:
                is_own = job.caller.is_admin or kind == _SHARED or object_in_path(job.path) is None
                if kind != "responses" and is_own:
                    return
        except StoreError:
            has_no_choice = job.caller.is_admin and len(job.route.could_serve()) == 1
            if has_no_choice or (kind == _SHARED and object_in_path(job.path) is None):
                return  # it goes to the only replica; and most voices are the engine's own
            message = f"A stored {one} cannot be found while the shared store is away. Retry shortly."
            raise ApiError(409, f"{one}_unreachable", message, param, {"retry-after": "1"}) from None
        raise ApiError(404, f"{one}_not_found", f"No {one} with this id is known here.", param)

    def _served_by(self, job: Job, replica: str, served: ServedModel) -> ServedModel:
        """The request's model, if the replica serves it in this pool; else another model that it serves there. An
        adapter may be loaded on other replicas only."""
        backends = chain(job.route.backends, *self._fleet.served.values())
        return next((one for one in backends if one.pool == served.pool and replica in one.replicas), served)

    def notice(self, job: Job, ticket: Ticket, reply: Reply, body: bytes) -> None:
        """Remembers a response by its first events, or by the beginning of an answer that is not parsed."""
        if not job.endpoint.stores_responses or reply.object_noting is not None:
            return
        if found := _ID_IN_BODY.search(body, 0, WINDOW_BYTES):
            self._remember(job, ticket, reply, found[1].decode("ascii", "replace"))

    def notice_whole(self, job: Job, ticket: Ticket, reply: Reply, document: dict[str, Any]) -> None:
        """Remembers an object that was made, from the answer in one piece."""
        if job.endpoint.stores is None or reply.object_noting is not None or job.method != "POST":
            return
        object_id = _id_in(document)
        if 0 < len(object_id) <= _MAX_ID_CHARS and "/" not in object_id:
            self._remember(job, ticket, reply, object_id)

    def _remember(self, job: Job, ticket: Ticket, reply: Reply, object_id: str) -> None:
        assert job.endpoint.stores is not None
        name, tenant = _name(job.endpoint.stores, object_id), job.caller.tenant
        reply.object_noting = object_owners.remember(ticket.pool, name, ticket.replica, ticket.incarnation, tenant)


async def noted(reply: Reply) -> None:
    """Waits until Redis remembers the object that the answer has made, but not for long: its client may ask another
    gateway for it at once, whose question could overtake this."""
    if reply.object_noting is not None:
        await asyncio.wait((reply.object_noting,), timeout=_NOTED_S)


def _id_in(document: dict[str, Any]) -> str:
    """The id of an object. vLLM-Omni names a voice, and may describe it in `voice`."""
    inner = document.get("voice")
    for holder in (document, inner if isinstance(inner, dict) else {}):
        for field in ("id", "name"):
            if isinstance(found := holder.get(field), str):
                return found
    return ""


def _name(kind: Stored, object_id: str) -> str:
    return object_id if kind == "responses" else f"{kind}/{object_id}"


def _refuse_what_is_shared(job: Job) -> None:
    """Raises a 403: engines know no tenants, so a list shows the objects of all, and a voice is everybody's."""
    if job.caller.is_admin:
        return
    reads, stores = job.method in ("GET", "HEAD"), job.endpoint.stores
    named = object_in_path(job.path)
    if not reads and _SHARED in (stores, named[0] if named else None):
        raise ApiError(403, "admin_key_required", "All tenants share the voices: only an admin's key may change them.")
    if reads and stores is not None and stores != _SHARED:
        raise ApiError(403, "admin_key_required", "This list has the objects of all tenants: it needs an admin's key.")
