"""Adds and removes replicas while the gateways run."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import orjson

from coordinator.errors import StoreError
from gateway.control.operations import Operations, records_secret_missing
from gateway.errors import ApiError
from gateway.records.record_book import ChangedMeanwhileError, RecordBook
from gateway.replicas.discovery.added import ADDED, MOST, AddedReplicas
from gateway.replicas.discovery.discovery import Discovery
from gateway.replicas.fleet import Fleet
from gateway.settings.config_file import SettingsError, build
from gateway.settings.gateway_settings import ReplicaSettings


class ReplicaChanges:
    """What admins do. All methods raise ApiError."""

    def __init__(
        self, book: RecordBook, added: AddedReplicas, discovery: Discovery, fleet: Fleet, operations: Operations
    ) -> None:
        self._book, self._added, self._discovery = book, added, discovery
        self._fleet, self._operations = fleet, operations

    async def add(self, body: bytes, who: str) -> dict[str, Any]:
        """Add the replica that a body describes. It gets requests from its first good health check on."""
        self._refuse_without_secret()
        replica = _described(body)
        if why := self._why_not(replica):
            raise ApiError(409, "replica_exists", f"{why}.", "id")
        try:
            await self._added.add(replica, who)
        except ChangedMeanwhileError:
            raise ApiError(409, "changed_meanwhile", "Somebody else was quicker. Look, and try again.") from None
        except StoreError as error:  # Redis may have it, or find it in its socket later
            message = f"Redis does not answer ({error}). Whether it was added is not known: look when Redis is back."
            raise ApiError(503, "store_unreachable", message, headers={"retry-after": "1"}) from None
        except ValueError:
            raise ApiError(400, "invalid_value", "url: is too long.", "url") from None
        if (known := self._fleet.members.get(replica.id)) is not None and known.url == replica.url:
            with suppress(ApiError):  # it was removed a while ago, and drained then
                await self._operations.drain(replica.id, is_over=True)
        return {**replica.model_dump(), "source": ADDED}

    async def remove(self, name: str, who: str) -> dict[str, Any]:
        """Drain a replica that was added, and forget it. What runs there finishes."""
        self._refuse_without_secret()
        records = [each for each in self._added.all() if each.replica.id == name]
        source = self._discovery.sources.get(name, "")
        if not records and source:
            message = f"{name}: comes from {source}: remove it there. Only a replica that was added can be removed so."
            raise ApiError(409, "replica_not_added", message, "id")
        if not records:
            raise ApiError(404, "replica_not_found", f"{name[:100]!r} was not added; GET /v1/replicas lists all.", "id")
        drained = {"id": name, "state": "unknown", "active_requests": 0}
        if source == ADDED:
            with suppress(ApiError):  # without Redis, or before it was reached: no gateway sends it anything new anyway
                drained = await self._operations.drain(name, is_over=False)
        away: StoreError | None = None
        for each in records:
            try:
                await self._added.remove(each, who)
            except StoreError as error:
                away = error
        if away is not None:
            message = f"This gateway uses it no more, and tells the others when Redis answers again ({away})."
            raise ApiError(503, "store_unreachable", message, headers={"retry-after": "1"})
        return drained

    def _refuse_without_secret(self) -> None:
        if self._book.signer is None:
            raise records_secret_missing()

    def _why_not(self, replica: ReplicaSettings) -> str:
        """Why the replica cannot be added now; empty if it can."""
        if why := self._discovery.taken(replica):
            return why
        added = self._added.all()
        if any(each.replica.id == replica.id for each in added):
            return "was added already, and is not used"
        if len(added) >= MOST or self._book.is_full:
            return f"{len(added)} replicas were added already; {MOST} is the most"
        return ""


def _described(body: bytes) -> ReplicaSettings:
    try:
        told = orjson.loads(body)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise ApiError(400, "invalid_json", "body: must be a JSON object.", "body")
    try:
        return build(ReplicaSettings, told, {}, {})
    except SettingsError as error:
        field = error.problems[0].partition(":")[0]
        raise ApiError(400, "invalid_value", "; ".join(error.problems) + ".", field) from None
