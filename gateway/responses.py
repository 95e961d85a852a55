"""Stored responses: they live on the replica that made them, and only that one can continue or cancel them."""

from __future__ import annotations

import re
from typing import Any

from coordinator import responses as stored
from coordinator.errors import StoreError
from coordinator.store import Store
from gateway.errors import ApiError
from gateway.fleet import Fleet
from gateway.job import Job
from gateway.routing.router import Ticket

_PATH = "/v1/responses"
_BY_ID = re.compile(r"/v1/responses/([^/]+)(?:/cancel|/input_items)?")
_ID_IN_EVENT = re.compile(rb'"id"\s*:\s*"(resp_[^"]{1,128})"')


class Responses:
    """Remembers where responses were made, and pins the requests that need one to its replica."""

    def __init__(self, store: Store, fleet: Fleet) -> None:
        self._store = store
        self._fleet = fleet

    async def pin(self, job: Job) -> None:
        """Pin a request that names a stored response. Raises a 404 when nobody here has it."""
        by_id = _BY_ID.fullmatch(job.path)
        wanted = by_id[1] if by_id else job.previous_response_id
        if wanted:
            job.pinned, job.served = await self._find(job, wanted)

    async def _find(self, job: Job, response_id: str) -> tuple[str, Any]:
        """The replica that made it, and what that replica serves."""
        try:
            for served in {one.pool: one for one in self._fleet.served.values()}.values():
                pool = self._store.pool(served.pool)
                found = await stored.find(pool, response_id, job.caller.tenant)
                if found is None:
                    continue
                record = pool.records.get(found[0])
                if record is None or record.incarnation != found[1]:
                    message = "The replica that kept this response has restarted or left."
                    raise ApiError(404, "response_lost", message, "response_id")
                return found[0], served
        except StoreError:
            raise ApiError(
                409,
                "response_unreachable",
                "Stored responses cannot be found while the shared store is away. Retry shortly.",
                "response_id",
                {"retry-after": "1"},
            ) from None
        raise ApiError(404, "response_not_found", "No response with this id is known here.", "response_id")

    def notice(self, job: Job, ticket: Ticket, events: bytes) -> None:
        """Remember a streamed response by the first events that name it."""
        if job.path == _PATH and not job.response_noted and (found := _ID_IN_EVENT.search(events)):
            self._remember(job, ticket, found[1].decode("ascii", "replace"))

    def notice_whole(self, job: Job, ticket: Ticket, document: dict[str, Any]) -> None:
        """Remember a response answered in one piece."""
        response_id = document.get("id")
        if job.path == _PATH and not job.response_noted and isinstance(response_id, str):
            self._remember(job, ticket, response_id)

    def _remember(self, job: Job, ticket: Ticket, response_id: str) -> None:
        job.response_noted = True
        stored.remember(ticket.pool, response_id, ticket.replica, ticket.incarnation, job.caller.tenant)
