"""The models that requests may name while no replica serves them: those that were served before, and configured ones.

The gateways write what they serve into one hash of the store, and read it, so a gateway that starts while there is no
replica knows the models as well. Nothing is remembered unless requests may be held (`queue.hold_s`).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import orjson

from coordinator.errors import StoreError
from coordinator.keys import models_key, pool_slug
from coordinator.registry import each
from coordinator.store import Store
from gateway.replicas.fleet import Fleet
from gateway.replicas.served import ServedModel
from gateway.settings.queue_settings import KnownModelSettings, QueueSettings

_EVERY_S = 2.0
_MAX_MODELS = 10_000


class KnownModels:
    """Keeps `fleet.known`. `run()` is a background task."""

    def __init__(self, fleet: Fleet, store: Store, queue: QueueSettings, namespace: str) -> None:
        self._fleet = fleet
        self._store = store
        self._key = models_key(namespace)
        self._first = asyncio.Event()
        self.use(queue)

    def use(self, queue: QueueSettings) -> None:
        """Other models are configured from now on."""
        self._is_holding = queue.hold_s > 0
        self._configured = {model.name: _served(model.root or model.name, model) for model in queue.models}
        self._fleet.known = dict(self._configured)

    async def first_exchange(self) -> None:
        """Wait until the store was asked once, with or without success."""
        await self._first.wait()

    async def run(self) -> None:
        """Exchange models with the store until cancelled."""
        while True:
            if self._is_holding:
                with suppress(StoreError):  # what is known stays known
                    await self.exchange()
            self._first.set()
            await asyncio.sleep(_EVERY_S)

    async def exchange(self) -> None:
        """Write the models that are served and that the store does not have; learn those that it has. Raises
        StoreError."""
        written = dict(list(each(await self._store.ask("HGETALL", self._key), _parse).items())[:_MAX_MODELS])
        told: list[str | bytes] = []
        for name, backends in self._fleet.named.items():
            models = [ServedModel(each.pool, each.root_model, each.adapter, {}) for each in backends]
            if written.get(name) not in models:  # of several pools, one is enough: any replica that comes will do
                model = written[name] = models[0]
                told += (name, orjson.dumps({"pool": model.pool, "root": model.root_model, "adapter": model.adapter}))
        self._fleet.known = self._configured | written
        if told:
            await self._store.ask("HSET", self._key, *told)


def _served(root: str, model: KnownModelSettings) -> ServedModel:
    return ServedModel(pool_slug(root), root, model.name if model.is_adapter else None, {})


def _parse(_name: str, text: str) -> ServedModel:
    """Raises ValueError or TypeError if no gateway wrote it."""
    model = orjson.loads(text)
    pool, root, adapter = model["pool"], model["root"], model["adapter"]
    if not isinstance(root, str) or pool != pool_slug(root) or not isinstance(adapter, str | None):
        raise ValueError("no gateway wrote this")
    return ServedModel(pool, root, adapter, {})
