"""What the doctor finds, for the pages of one gateway. It looks in the background, once a minute while a page is open.

It looks as `kvgate doctor` does. But it does not ask other gateways, whose addresses it does not know, nor replicas
that only Redis names. In a large fleet it asks no replica: each costs some milliseconds, and requests would wait. The
page says what was not checked.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson

from gateway.control.status import Status
from gateway.doctor.ask import gateway_evidence
from gateway.doctor.examine import examine
from gateway.doctor.gather import Targets, gather
from gateway.replicas.fleet import Fleet
from gateway.settings.gateway_settings import GatewaySettings, ReplicaSettings
from gateway.tasks import Tasks
from gateway.tls import Certificate

EVERY_S = 60.0
_MOST_ASKED = 64
_MOST_SHOWN = 100


class Findings:
    """Looks at the cluster with the doctor's eyes."""

    def __init__(
        self, settings: GatewaySettings, shown: Certificate | None, fleet: Fleet, status: Status, tasks: Tasks
    ) -> None:
        """`shown`: the certificate that replicas see of this gateway."""
        self._settings, self._shown, self._fleet, self._status, self._tasks = settings, shown, fleet, status, tasks
        self._told = b""
        self._looked_s = float("-inf")
        self._looking: asyncio.Task[Any] | None = None

    def use(self, settings: GatewaySettings) -> None:
        """These are the gateway's settings from now on."""
        self._settings = settings

    def latest(self) -> bytes:
        """What was found last, as JSON; the same object until the next look. Empty before the first look has ended, and
        during the first one after a time without pages: what was true then may not be so now."""
        since_s = time.monotonic() - self._looked_s
        if since_s >= EVERY_S and (self._looking is None or self._looking.done()):
            if since_s >= 2 * EVERY_S:
                self._told = b""
            self._looked_s = time.monotonic()
            self._looking = self._tasks.spawn(self._look(), "doctor")
        return self._told

    async def _look(self) -> None:
        told = examine(await gather(self._targets())).told()
        unchecked = dict.fromkeys(f"{one['subject']}: {one['what']}" for one in told["unchecked"])
        shown = {
            "time_ms": int(time.time() * 1000),
            "findings": told["findings"][:_MOST_SHOWN],
            "more": max(0, len(told["findings"]) - _MOST_SHOWN),
            "unchecked": list(unchecked)[:_MOST_SHOWN],
        }
        self._told = orjson.dumps(told | shown)

    def _targets(self) -> Targets:
        settings, members = self._settings, self._fleet.targets
        asked = [ReplicaSettings(id=each.id, url=each.url, dp_rank=each.dp_rank) for each in members]
        key = settings.security.replica_api_key
        _, ready = self._status.readiness()
        return Targets(
            redis_url=settings.redis.url,
            namespace=settings.redis.namespace,
            itself=gateway_evidence("", ready, self._status.about),
            replicas=tuple(asked) if len(asked) <= _MOST_ASKED else (),
            discovers=settings.finds_replicas(),
            asks_registered=False,
            replica_key=key.get_secret_value() if key else None,
            replica_certificate=self._shown,
            settings=settings,
        )
