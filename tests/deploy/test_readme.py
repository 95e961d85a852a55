"""Builds the overlay that deploy/kubernetes/README.md describes."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

from tests.deploy.manifests import KUBERNETES, ROOT, Workload, kustomized


def test_an_overlay_of_ones_own_builds_and_has_what_it_says(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "deploy" / "kubernetes")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    own = tmp_path / "deploy" / "kubernetes" / "overlays" / "own"
    own.mkdir()
    block = re.search(r"```yaml\n(.*?)```", (KUBERNETES / "README.md").read_text(), flags=re.DOTALL)
    assert block is not None
    (own / "kustomization.yaml").write_text(textwrap.dedent("   " + block[1].lstrip()))
    documents = kustomized(own)
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
