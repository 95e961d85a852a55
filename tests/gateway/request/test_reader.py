"""The request headers that a replica receives."""

from __future__ import annotations

from gateway.request.reader import upstream_headers


def test_replicas_see_an_allow_list_of_headers() -> None:
    headers = {
        "content-type": "application/json",
        "x-session-id": "forged",
        "x-data-parallel-rank": "1",
        "x-vllm-priority": "9",
        "authorization": "Bearer secret",
        "cookie": "a=b",
        "traceparent": "00-1-2-01",
    }
    passed = upstream_headers(headers, "id-1", pass_authorization=False)
    assert passed == {"content-type": "application/json", "traceparent": "00-1-2-01", "x-request-id": "id-1"}
    assert upstream_headers(headers, "id-1", pass_authorization=True)["authorization"] == "Bearer secret"
