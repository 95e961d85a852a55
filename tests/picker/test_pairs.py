"""Pickers whose answers pass, in front of replicas of which one computes prompts for others."""

from __future__ import annotations

from pathlib import Path

from bench.cluster import running_gateways, running_replicas, told_roles
from bench.envoy import PASSES
from bench.pickers import running_pickers
from tests.api.stage import text
from tests.cluster.test_pairs import CONFIG, REPLICA_ARGUMENTS
from tests.picker.stage import ask, running_envoy
from tests.polling import wait_until
from tests.programs import needs

pytestmark = needs("envoy")


def test_a_prompt_that_cannot_be_fetched_is_no_fault_of_the_replica_that_decodes(tmp_path: Path) -> None:
    with (
        running_replicas(tmp_path, 3, REPLICA_ARGUMENTS) as sims,
        running_gateways(
            {sim.id: sim.url for sim in sims}, gateways=1, config=CONFIG, beside=told_roles(sims, 1)
        ) as cluster,
        running_pickers(cluster, tmp_path, 1) as pickers,
        running_envoy(pickers, tmp_path, PASSES) as url,
    ):
        wait_until(lambda: "prefill=r0" in ask(url, text()).headers["x-kvgate-decision"])
        for sim in sims:
            sim.fail("no_blocks", count=-1)
        answers = [ask(url, text()) for _ in range(8)]
        assert [answer.status_code for answer in answers] == [200] * 8
        assert not any("last_resort" in answer.headers["x-kvgate-decision"] for answer in answers), "breakers are open"
