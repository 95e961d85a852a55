"""Whose a key is, by its name: KVGate's, LMCache's (a chunk of KV), or somebody else's, which is never touched."""

from __future__ import annotations

from typing import Literal

from coordinator.keys import PREFIX
from coordinator.lmcache_chunks import NAME

Kind = Literal["coordination", "chunk", "other"]
KINDS: tuple[Kind, ...] = ("coordination", "chunk", "other")


def kind_of(key: str) -> Kind:
    if key.startswith(f"{PREFIX}:"):
        return "coordination"
    return "chunk" if NAME.fullmatch(key) else "other"
