"""Stored responses. Only the replica that made a response can continue or cancel it."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

from coordinator.errors import StoreError
from coordinator.pool import response_owners as stored
from coordinator.store import Store
from gateway.errors import ApiError
from gateway.replicas.fleet import Fleet, ServedModel
from gateway.request.paths import stored_response_id
from gateway.request.reader import Job
from gateway.routing.ticket import Ticket
from gateway.upstream.excerpts import WINDOW_BYTES

_ID_IN_BODY = re.compile(rb'"id"\s*:\s*"(resp_[^"]{1,128})"')


class StoredResponses:
    """Remembers which replica made a response, and pins the requests that name the response to that replica."""

    def __init__(self, store: Store, fleet: Fleet) -> None:
        self._store = store
        self._fleet = fleet

    async def pin(self, job: Job) -> None:
        """Pins a request that names a stored response. Raises a 404 if no replica is known to have it."""
        by_id = stored_response_id(job.path)
        wanted, param = (by_id, "response_id") if by_id else (job.previous_response_id, "previous_response_id")
        if wanted:
            job.pinned, backend = await self._find(job, wanted, param)
            job.aim(backend)

    async def _find(self, job: Job, response_id: str, param: str) -> tuple[str, ServedModel]:
        """The replica that made it, and the model that it serves. `param` names the field in errors."""
        try:
            for name, served in self._fleet.pools().items():
                pool = self._store.pool(name)
                found = await stored.find(pool, response_id, job.caller.tenant)
                if found is None:
                    continue
                record = pool.records.get(found[0])
                if record is None or record.incarnation != found[1]:
                    message = "The replica that kept this response has restarted or left."
                    raise ApiError(404, "response_lost", message, param)
                return found[0], self._served_by(job, found[0], served)
        except StoreError:
            raise ApiError(
                409,
                "response_unreachable",
                "Stored responses cannot be found while the shared store is away. Retry shortly.",
                param,
                {"retry-after": "1"},
            ) from None
        raise ApiError(404, "response_not_found", "No response with this id is known here.", param)

    def _served_by(self, job: Job, replica: str, served: ServedModel) -> ServedModel:
        """The request's model, if the replica serves it in this pool; else another model that it serves there. An
        adapter may be loaded on other replicas only."""
        backends = chain(job.backends, *self._fleet.served.values())
        return next((one for one in backends if one.pool == served.pool and replica in one.replicas), served)

    def notice(self, job: Job, ticket: Ticket, body: bytes) -> None:
        """Remembers a response by its first events, or by the beginning of an answer that is not parsed."""
        if not job.endpoint.stores_responses or job.response_noted:
            return
        if found := _ID_IN_BODY.search(body, 0, WINDOW_BYTES):
            self._remember(job, ticket, found[1].decode("ascii", "replace"))

    def notice_whole(self, job: Job, ticket: Ticket, document: dict[str, Any]) -> None:
        """Remembers a response that was answered in one piece."""
        response_id = document.get("id")
        if job.endpoint.stores_responses and not job.response_noted and isinstance(response_id, str):
            self._remember(job, ticket, response_id)

    def _remember(self, job: Job, ticket: Ticket, response_id: str) -> None:
        job.response_noted = True
        stored.remember(ticket.pool, response_id, ticket.replica, ticket.incarnation, job.caller.tenant)
