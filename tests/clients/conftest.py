"""One cluster for all tests of this folder: two gateways, three simulated replicas, a half replica (half.py) and an
embedded Redis. Each client library runs as a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from bench.cluster import running_gateways, running_replicas
from tests.clients.half import running_half_replica
from tests.clients.libraries import Libraries, Library
from tests.clients.stage import CONFIG, REPLICA_ARGUMENTS, REPLICAS, REQUEST_S, Stage
from tests.forked import constants


@pytest.fixture(scope="package")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with (
        constants({"coordinator.breaker.FAILURES": 1000, "gateway.replicas.health_checks.INTERVAL_S": 0.25}),
        running_half_replica() as half,
        running_replicas(tmp_path_factory.mktemp("replicas"), REPLICAS, REPLICA_ARGUMENTS) as sims,
        running_gateways({sim.id: sim.url for sim in sims} | {"half": half.url}, gateways=2, config=CONFIG) as cluster,
    ):
        stage = Stage(cluster, sims, half)
        timeouts = {"first_byte_s": REQUEST_S, "request_s": REQUEST_S}
        with stage.another_gateway(timeouts=timeouts) as hurried:
            stage.hurried_url = hurried.url
            yield stage


@pytest.fixture(scope="package")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Libraries]:
    """Finds a library by the name of its driver."""
    folder = tmp_path_factory.mktemp("drivers")
    running: dict[str, Library] = {}
    with ExitStack() as stack:

        def find(driver: str) -> Library:
            if driver not in running:
                running[driver] = stack.enter_context(closing(Library(driver, folder)))
            return running[driver]

        yield find
