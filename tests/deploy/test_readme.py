"""Builds the overlay that deploy/kubernetes/README.md describes."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from tests.deploy.manifests import KUBERNETES, Workload, of_ones_own


def test_an_overlay_of_ones_own_builds_and_has_what_it_says(tmp_path: Path) -> None:
    block = re.search(r"```yaml\n(.*?)```", (KUBERNETES / "README.md").read_text(), flags=re.DOTALL)
    assert block is not None
    documents = of_ones_own(tmp_path, textwrap.dedent("   " + block[1].lstrip()))
    (replica,) = (
        Workload("replica", d) for d in documents if d["kind"] == "StatefulSet" and d["metadata"]["name"] == "replica"
    )
    assert replica.document["spec"]["replicas"] == 5
    images = {container["image"] for container in replica.containers}
    assert images == {"registry.example/kvgate:1", "registry.example/vllm-lmcache:1"}
    (discovery,) = (d["spec"] for d in documents if d["metadata"]["name"] == "discovery")
    (rule,) = discovery["egress"]
    assert [port["port"] for port in rule["ports"]] == [443, 6443]
    assert [peer["ipBlock"]["cidr"] for peer in rule["to"]] == ["10.96.0.1/32", "172.18.0.2/32"]
