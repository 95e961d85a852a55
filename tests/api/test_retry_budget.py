"""A gateway whose retry budget is spent makes no retries. One of its two replicas fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.cluster import Cluster
from tests.api.stage import Stage, chat_body, running_gateway, running_sims, text
from tests.forked import constants
from tests.polling import wait_until

BREAKER_FAILURES = 3
NO_BUDGET = {
    "gateway.relay.retry_budget.MIN_RETRIES": 0,
    "gateway.relay.retry_budget.SHARE": 0,
    "coordinator.breaker.FAILURES": BREAKER_FAILURES,
    "gateway.replicas.health_checks.FAILURES": 1000,
}
ROUND_ROBIN = {"x-kvgate-policy": "round_robin"}


@pytest.fixture
def spent(open_cluster: Cluster, http: httpx.Client, tmp_path: Path) -> Iterator[Stage]:
    arguments = ("--no-events", "--model", "org/spent", "--served-name", "sim")
    config = {"policy": {"allow_header": True}}
    with (
        constants(NO_BUDGET),
        running_sims(tmp_path, {"b0": arguments, "b1": arguments}) as sims,
        running_gateway(tmp_path, open_cluster.redis_url, sims, config) as url,
    ):
        stage = Stage([url], sims, http)
        wait_until(lambda: stage.get("/ready").json()["replicas"] == ["b0", "b1"])
        yield stage


def statuses(stage: Stage, count: int) -> list[int]:
    """The statuses of requests that go to both replicas in turn."""
    bodies = (chat_body(text(50)) for _ in range(count))
    return [stage.post("/v1/chat/completions", body, headers=ROUND_ROBIN).status_code for body in bodies]


def test_a_failure_passes_through_when_the_budget_is_spent_and_opens_no_breaker(spent: Stage) -> None:
    """Without a retry the gateway cannot tell whether the replica or the request is at fault. Otherwise a client could
    spend the budget first and then open breakers."""
    spent.sims[0].fail("error", status=500, count=2)
    assert sorted(statuses(spent, 20)) == [200] * 18 + [500] * 2
    assert spent.sample("kvgate_retries_withheld_total") == 2
    assert spent.sample("kvgate_retries_total") == 0
    assert spent.sample("kvgate_breaker_open") == 0


def test_a_replica_that_fails_everybody_is_left_without_a_budget_although_it_was_well_before(spent: Stage) -> None:
    """An engine whose process has died answers 500 at once, so it would draw requests on and on."""
    assert statuses(spent, 40) == [200] * 40
    spent.sims[0].fail("error", status=500, count=-1)
    assert statuses(spent, 40).count(500) == BREAKER_FAILURES - 1
    wait_until(lambda: spent.sample("kvgate_breaker_open", replica="b0"))


def test_a_connection_that_is_refused_costs_no_budget(spent: Stage) -> None:
    spent.sims[0].kill()
    assert statuses(spent, 6) == [200] * 6
    assert spent.sample("kvgate_retries_total", reason="refused") > 0
    assert spent.sample("kvgate_retries_withheld_total") == 0
