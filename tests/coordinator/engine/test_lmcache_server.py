"""The facts that an LMCache server tells about itself. The documents are those of LMCache 0.5.6, shortened."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from coordinator.engine.lmcache_server import parse_speeds, parse_tier
from coordinator.lmcache_chunks import ChunkTier

STATUS: dict[str, Any] = {
    "is_healthy": True,
    "chunk_size": 512,
    "hash_algorithm": "blake3",
    "storage_manager": {"l2_adapters": [{"type": "fs_native"}, {"type": "valkey", "key_prefix": "kvchunk"}]},
    "cache_context_meta": {},
    "non_cuda_context_meta": {
        "3621961956722252660": {"model_name": "/models/tiny", "world_size": 2, "block_size": 32, "use_mla": True},
        "7": {"model_name": "another", "world_size": 8, "block_size": 32, "use_mla": False},
    },
}
CONFIG: dict[str, Any] = {
    "storage_manager": {
        "l2_adapter_config": {"adapters": [{"base_path": "/disk"}, {"key_prefix": "kvchunk", "ttl_seconds": 120}]}
    }
}
LABELS = '{l2_name="valkey",otel_scope_name="lmcache_mp.perf",otel_scope_schema_url="",otel_scope_version=""}'
METRICS = f"""\
# TYPE lmcache_mp_l2_load_throughput_GB_per_second histogram
lmcache_mp_l2_load_throughput_GB_per_second_bucket{LABELS.replace("valkey", 'valkey",le="5.0')} 8.0
lmcache_mp_l2_load_throughput_GB_per_second_count{LABELS} 8.0
lmcache_mp_l2_load_throughput_GB_per_second_sum{LABELS} 4.0
lmcache_mp_l2_store_throughput_GB_per_second_count{LABELS} 1.0
lmcache_mp_l2_store_throughput_GB_per_second_sum{LABELS} 9.0
lmcache_mp_l0_l1_load_throughput_GB_per_second_count 2.0
lmcache_mp_l0_l1_load_throughput_GB_per_second_sum 40.0
"""


def test_how_chunks_are_kept_in_redis_is_read() -> None:
    assert parse_tier(STATUS, CONFIG, "/models/tiny") == ChunkTier("kvchunk", "/models/tiny", 512, 2, 120)


@pytest.mark.parametrize(
    "change",
    [
        {"hash_algorithm": "builtin"},
        {"storage_manager": {"l2_adapters": [{"type": "fs_native"}]}},
        {"non_cuda_context_meta": {}},
        {"storage_manager": {"l2_adapters": [{"type": "valkey", "key_prefix": "a@b"}]}},
        {"chunk_size": "many"},
        {"chunk_size": 0},
    ],
    ids=["hash unknown", "no Redis", "no engine yet", "prefix with an @", "not a number", "chunks of nothing"],
)
def test_a_server_whose_chunks_cannot_be_named_has_no_tier(change: dict[str, Any]) -> None:
    assert parse_tier({**deepcopy(STATUS), **change}, CONFIG, "/models/tiny") is None


@pytest.mark.parametrize("document", [None, [], {}, "text", {"hash_algorithm": "blake3"}])
def test_what_is_no_lmcache_server_has_no_tier(document: Any) -> None:
    assert parse_tier(document, CONFIG, "/models/tiny") is None
    assert parse_tier(STATUS, document, "/models/tiny") is None


def test_chunks_without_a_ttl_are_named_for_a_day() -> None:
    tier = parse_tier(STATUS, {"storage_manager": {"l2_adapter_config": {"adapters": []}}}, "/models/tiny")
    assert tier is not None
    assert tier.ttl_s == 86_400


def test_speeds_are_the_means_of_all_loads() -> None:
    assert parse_speeds(METRICS) == {"l2_load_bytes_per_s": 0.5e9, "l1_load_bytes_per_s": 20e9}


@pytest.mark.parametrize("text", ["", "lmcache_mp_l2_load_throughput_GB_per_second_count 0.0", "anything"])
def test_of_a_server_that_loaded_nothing_no_speed_is_known(text: str) -> None:
    assert parse_speeds(text) == {}
