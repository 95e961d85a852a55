"""The kind of a key: LMCache's names are chunks, names that begin with "kvgate:" are coordination, and the rest is
other."""

from __future__ import annotations

import pytest

from coordinator.watch.key_samples import kind_of

HASH = "7e3eff9e" * 8


@pytest.mark.parametrize(
    "key",
    [
        f"Qwen/Qwen2.5-7B-Instruct@01000100@0@{HASH}",
        f"kvchunk@Qwen/Qwen2.5-7B-Instruct@01000100@0@{HASH}",
        f"kvg@/models/a b/tiny@02010201@1f@{HASH}@a-salt",
        "model@01000100@0@7e3eff9e7e3eff9e",
        "Qwen/Qwen2.5-7B-Instruct@1@0@1@bfloat16kv_bytes",
        "Qwen/Qwen2.5-7B-Instruct@1@0@1@bfloat16metadata",
        "Qwen/Qwen2.5-7B-Instruct@2@1@-3f2a7e@half",
        "Qwen/Qwen2.5-7B-Instruct@2@1@3f2a7e@fp8_e4m3fn@17",
        "Qwen/Qwen2.5-7B-Instruct@2@1@3f2a7e@float@tenant%ametadata",
    ],
)
def test_what_lmcache_writes_is_a_chunk(key: str) -> None:
    assert kind_of(key) == "chunk"


@pytest.mark.parametrize("key", ["kvgate:pools", "kvgate:watcher", "kvgate:{m}:own:7e", f"kvgate:m@01000100@0@{HASH}"])
def test_what_begins_with_kvgate_is_coordination_and_never_a_chunk(key: str) -> None:
    assert kind_of(key) == "coordination"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "session:42",
        "user@example.com",
        "a@b@c@d",
        "a@b@c@d@e",
        f"@01000100@0@{HASH}",
        f"model@0100010@0@{HASH}",
        "model@01000100@0@7e3e",
        "order@1@0@1@paid",
        "model@1@0@xyz@bfloat16",
        "kvgates:pools",
    ],
)
def test_everything_else_is_somebody_elses(key: str) -> None:
    assert kind_of(key) == "other"
