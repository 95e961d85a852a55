"""Whose a key is, by its name: KVGate's, LMCache's (a chunk of KV), or somebody else's, which is never touched."""

from __future__ import annotations

import re
from typing import Literal

from coordinator.keys import PREFIX

Kind = Literal["coordination", "chunk", "other"]
KINDS: tuple[Kind, ...] = ("coordination", "chunk", "other")

# LMCache's names, as 0.3.7 to 0.5.6 write them:
#   server      [prefix@]model@kv_rank@group@hash[@salt]                       kvchunk@Qwen/Qwen2.5-7B@01000100@0@7e3e…
#   in process  model@world_size@worker@hash@dtype[@layer][@tag%value …]       Qwen/Qwen2.5-7B@1@0@-3f2a@bfloat16
# redis:// writes an in-process chunk as two keys, which end with kv_bytes and metadata.
_CHUNK = re.compile(
    r"[^@].*@(?:"
    r"[0-9a-f]{8}@[0-9a-f]{1,8}@[0-9a-f]{16,128}(?:@.*)?"
    r"|\d+@\d+@-?[0-9a-f]{1,64}@(?:half|b?float(?:16|32|64)?|double|u?int\d+|bool|fp8_\w+?)(?:@.*)?(?:kv_bytes|metadata)?"
    r")",
    re.DOTALL,
)


def kind_of(key: str) -> Kind:
    if key.startswith(f"{PREFIX}:"):
        return "coordination"
    return "chunk" if _CHUNK.fullmatch(key) else "other"
