"""`kvgate doctor` reads real engines: it finds these engines' only problem, events on every address."""

from __future__ import annotations

import pytest

from bench.vllm.replicas import VllmCluster
from gateway.doctor.event_endpoints import outward_address
from tests.cluster.test_doctor import doctor

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_real_engines_are_found_to_publish_to_everybody_and_nothing_else(cluster: VllmCluster) -> None:
    said = doctor("--state-dir", str(cluster.state_dir), "--timeout", "10")
    exposed = {("events-exposed", f"replica {replica.id}") for replica in cluster.replicas}
    assert said.found() == (exposed if outward_address() else set())
    assert said.unchecked == []
