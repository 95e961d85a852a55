"""What `kvgate status` tells of models."""

from __future__ import annotations

from gateway.ops.local.cluster_status import backends_told


def test_each_backend_has_a_line_and_one_with_weight_needs_a_replica() -> None:
    backends = {
        "v1": {"weight": 9, "ready_replicas": 2},
        "v2": {"weight": 1, "ready_replicas": 0},
        "v3": {"weight": 0, "ready_replicas": 0},
    }
    lines = backends_told([{}, {"models": {"org/chat": backends}, "weights": "approximate"}])
    assert [(line.kind, line.id, line.state, line.detail) for line in lines] == [
        ("backend", "org/chat/v1", "ready", "weight: 9 (approximate), ready replicas: 2"),
        ("backend", "org/chat/v2", "not ready", "weight: 1 (approximate), ready replicas: 0"),
        ("backend", "org/chat/v3", "ready", "weight: 0 (approximate), ready replicas: 0"),
    ]
    assert backends_told([{}, {"store": "up"}]) == []
