"""What vLLM's metrics tell of its connectors. The samples are in the form of vLLM 0.33."""

from __future__ import annotations

import pytest

from coordinator.engine.kv_transfers import KvTransfers, parse_transfers

PLAIN = 'vllm:num_requests_running{engine="0",model_name="m"} 0.0\n'
NIXL = """\
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.005",model_name="m"} 2.0
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} 3.0
vllm:nixl_xfer_time_seconds_count{engine="1",model_name="m"} 1e+01
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 7.0
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="m"} 4.0
"""
MOONCAKE = 'vllm:mooncake_xfer_time_seconds_count{engine="0",model_name="m"} 0.0\n'
STORE = 'vllm:mooncake_store_operation_total{engine="0",model_name="m"} 1.0\n'


@pytest.mark.parametrize(
    ("text", "transfers"),
    [
        ("", KvTransfers(frozenset(), 0, 0)),
        (PLAIN + STORE, KvTransfers(frozenset(), 0, 0)),
        (PLAIN + NIXL, KvTransfers(frozenset({"nixl"}), 13, 4)),
        (MOONCAKE.replace('"m"', '"a}b"').replace("0.0", "1e-01"), KvTransfers(frozenset({"mooncake"}), 0.1, 0)),
        (MOONCAKE + NIXL, KvTransfers(frozenset({"mooncake", "nixl"}), 13, 4)),
    ],
)
def test_a_connector_is_known_by_its_metrics(text: str, transfers: KvTransfers) -> None:
    assert parse_transfers(text) == transfers


@pytest.mark.parametrize("value", ["e", "..", "++"])
def test_a_number_that_is_none_is_an_error(value: str) -> None:
    with pytest.raises(ValueError):
        parse_transfers(f"vllm:nixl_xfer_time_seconds_count {value}\n")


def test_a_long_page_takes_no_time() -> None:
    text = "\nvllm:nixl_xfer_time_seconds_count{" * 20_000
    assert parse_transfers(text) == KvTransfers(frozenset(), 0, 0)
