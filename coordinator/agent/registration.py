"""How an agent makes its replica known: never over another engine that lives under the same id."""

from __future__ import annotations

from coordinator.agent.http_engine import EngineSnapshot
from coordinator.agent.link import Fenced, Link
from coordinator.errors import StoreError
from coordinator.registry import ReplicaRecord


class IdTaken(Fenced):
    """The registry means another engine by this replica's id, and that one lives."""


class Registration:
    """Opens an agent's links. It is kept from one life of the engine to the next."""

    def __init__(self, redis_url: str, replica: str, agent: str, namespace: str = "") -> None:
        self._redis_url = redis_url
        self._namespace = namespace
        self._replica = replica
        self._agent = agent
        self._replaced = ""
        """The life that this agent registered over last. An engine that is gone does not come back in the same life."""

    async def open(self, sight: EngineSnapshot) -> Link:
        """Connect, and make the replica, or a later life of it, known. Raises StoreError and IdTaken."""
        link = await Link.open(self._redis_url, sight.pool, self._replica, self._agent, self._namespace)
        try:
            known = await link.record()
            if known is not None and sight.started and known.incarnation != sight.started:
                if known.incarnation == self._replaced or await link.is_followed_by_another(known):
                    raise IdTaken(_words(known, sight))
                self._replaced = known.incarnation
            await link.register(sight.started, sight.capacity_tokens, sight.url)
        except (StoreError, IdTaken):
            await link.close()
            raise
        return link


def _words(known: ReplicaRecord, sight: EngineSnapshot) -> str:
    return (
        f"another engine lives under this id: the registry means the one at {known.url}, started {known.incarnation}; "
        f"here it is the one at {sight.url}, started {sight.started}. Give clusters that share a Redis a "
        "redis.namespace each, and replicas of one cluster an id each"
    )
