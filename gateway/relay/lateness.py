"""When the first byte of a stream is late. Pure.

A first byte is predicted by the prompt tokens that the replica has to compute until then: those of requests that are
ahead, and those of this one. How well that fits depends on the engine, and on the tokens that it generates meanwhile.
So a gateway compares its predictions with what came, and knows what is usual in a pool. One of twenty first bytes is
later than that, and most of these come soon. But if those of one replica are late again and again, it has become slow.
Gateways find out together which one that is (coordinator/pool/hedged.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean

from coordinator.pool.hedged import FirstBytes

_STEP_S = 0.1
"""What a first byte takes although there is nothing to compute: some steps of a busy engine, and the network."""
_WINDOW, _EACH = 128, 16
"""The last outcomes count. They are looked at each time when so many are new."""
_SHARE = 0.95


def predicted_s(ahead_tokens: int, uncached_tokens: int, tokens_per_s: float) -> float:
    """When the first byte of a request is due, after it was sent."""
    return _STEP_S + (ahead_tokens + uncached_tokens) / tokens_per_s


def tokens_until(s: float, tokens_per_s: float) -> int:
    """The most tokens of which a first byte is due by then: the inverse of predicted_s."""
    return max(0, int((s - _STEP_S) * tokens_per_s))


class Lateness:
    """What was predicted in one pool, against what came."""

    def __init__(self) -> None:
        self._last = deque[tuple[str, float]](maxlen=_WINDOW)
        self._new = 0
        self.usual = 0.0
        """How many times longer than predicted first bytes take, in 95 of 100 cases. 0: not known yet."""
        self.placed_tokens = 0
        """What replicas compute, and Redis was not told yet."""
        self._first_bytes: dict[str, FirstBytes] = {}
        self._late = set[str]()
        """The replicas whose last first byte was late."""
        self.lately: Mapping[str, bool] = {}
        """The replicas that were late lately, over all gateways, and whether they are slow."""

    def observe(self, replica: str, ratio: float, was_late: bool) -> None:
        """A first byte has come, so many times later than predicted. `was_late`: it was counted before."""
        self._last.append((replica, ratio))
        if not was_late:
            self._count(replica, False)
        self._new += 1
        if self._new == _EACH:
            self._new = 0
            self._look()

    def is_late(self, replica: str) -> bool:
        """A first byte is late. Whether the one before was, too, or its replica is slow for all gateways."""
        is_likely = replica in self._late or self.lately.get(replica, False)
        self._count(replica, True)
        return is_likely

    def _count(self, replica: str, is_late: bool) -> None:
        if is_late:
            self._late.add(replica)
        else:
            self._late.discard(replica)
        late, count = self._first_bytes.get(replica, (0, 0))
        self._first_bytes[replica] = FirstBytes(late + is_late, count + 1)

    def slow(self) -> list[str]:
        """The replicas that are slow."""
        return [replica for replica, is_slow in self.lately.items() if is_slow]

    def take_told(self) -> tuple[int, dict[str, FirstBytes]]:
        """What Redis is told now: of replicas that are late."""
        told = {name: each for name, each in self._first_bytes.items() if each.late or name in self.lately}
        placed_tokens, self.placed_tokens, self._first_bytes = self.placed_tokens, 0, {}
        return placed_tokens, told

    def _look(self) -> None:
        """One slow replica must not make late what is usual: so the slowest one does not count."""
        of_replica = dict[str, list[float]]()
        for replica, ratio in self._last:
            of_replica.setdefault(replica, []).append(ratio)
        slowest = max(of_replica, key=lambda replica: fmean(of_replica[replica]))
        ratios = sorted(ratio for replica, ratio in self._last if replica != slowest)
        if len(ratios) >= _EACH:
            self.usual = ratios[int(_SHARE * len(ratios))]
