"""A subset of a pool's replicas: those that serve one model name. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self


@dataclass(frozen=True, slots=True)
class Subset:
    """Replicas, and the digest by which all gateways that are told the same replicas name them in the store."""

    digest: str
    """32 hex."""
    replicas: frozenset[str]

    @classmethod
    def of(cls, replicas: Iterable[str]) -> Self:
        """The subset with these replicas, in whatever order."""
        names = frozenset(replicas)
        text = " ".join(sorted(names)).encode("utf-8", "surrogatepass")
        return cls(blake2b(text, digest_size=16).hexdigest(), names)

    def __bool__(self) -> bool:
        return bool(self.replicas)

    def __contains__(self, replica: str) -> bool:
        return replica in self.replicas
