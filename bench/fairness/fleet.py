"""Replicas that run a few requests at once, in a time that a small machine keeps up with, and clusters of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.cluster import Cluster, running_cluster


@dataclass(frozen=True)
class Fleet:
    """Simulated replicas of one kind."""

    slots: int
    """The requests that one replica runs at once. It makes others wait, as vLLM does with --max-num-seqs."""
    decode_s_per_token: float = 0.04
    prefill_tokens_per_s: float = 20_000.0
    replicas: int = 3
    more: tuple[str, ...] = ()

    @property
    def all_slots(self) -> int:
        return self.slots * self.replicas

    @property
    def arguments(self) -> tuple[str, ...]:
        options = {
            "--max-num-seqs": self.slots,
            "--decode-s-per-token": self.decode_s_per_token,
            "--prefill-tokens-per-s": self.prefill_tokens_per_s,
        }
        return *(str(part) for pair in options.items() for part in pair), *self.more

    @contextmanager
    def cluster(self, gateways: int, config: dict[str, Any]) -> Iterator[Cluster]:
        with running_cluster(
            gateways=gateways, replicas=self.replicas, replica_arguments=self.arguments, config=config
        ) as cluster:
            yield cluster
