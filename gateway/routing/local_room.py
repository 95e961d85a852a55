"""The room that one gateway may use by itself, while the store is away. Pure.

All gateways follow one rule: each takes its share of a replica's room, and tries the replicas in rendezvous order. A
share is at least one request, so that no gateway is without room. So a replica has at most its room together, or one
request of each gateway; and what it had already when the store went away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.live_load import LiveLoad


class LocalRoom(NamedTuple):
    """The room of one replica that one gateway may use; 0 means any number."""

    requests: int
    backlog_tokens: float

    @classmethod
    def of(cls, knobs: PolicyKnobs, gateways: int, room_share: float) -> LocalRoom:
        """The share of one of `gateways`, for a request that may use this part of the room."""
        cap, wait_s = knobs.max_active_requests, knobs.max_wait_s
        requests = max(1, int(cap * room_share) // gateways) if cap else 0
        return cls(requests, wait_s * room_share * knobs.prefill_tokens_per_s / gateways)

    @property
    def is_bounded(self) -> bool:
        return bool(self.requests or self.backlog_tokens)

    def admits(self, requests: int, backlog_tokens: int) -> bool:
        """Whether one more request has room beside these. Its own size does not matter."""
        is_below_cap = not self.requests or requests < self.requests
        return is_below_cap and (not self.backlog_tokens or backlog_tokens < self.backlog_tokens)


class Loads:
    """What this gateway's requests are on each replica, with the room that is kept for requests that go before."""

    def __init__(self, load: LiveLoad) -> None:
        self._load = load
        self._kept: dict[str, tuple[int, int]] = {}

    def keep(self, replica: str, prompt_tokens: int) -> None:
        """Keep room for a request that will go there."""
        requests, tokens = self._kept.get(replica, (0, 0))
        self._kept[replica] = requests + 1, tokens + prompt_tokens

    def have_room(self, replica: str, room: LocalRoom) -> bool:
        requests, tokens = self._kept.get(replica, (0, 0))
        load = self._load
        return room.admits(requests + load.requests.get(replica, 0), tokens + load.backlog_tokens.get(replica, 0))


def choose(order: Sequence[str], is_usable: Callable[[str], bool], has_room: Callable[[str], bool]) -> str | None:
    """The first usable replica that has room; None if the request has to wait. If none is usable, the first one gets
    it, as a last resort."""
    usable = [replica for replica in order if is_usable(replica)]
    return next(filter(has_room, usable), None) if usable else order[0]
