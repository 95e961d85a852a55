"""One cluster for all tests of this folder: two gateways, three simulated replicas and an embedded Redis; and a process
for each client library that is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from bench.cluster import running_cluster
from tests.clients.half import running_half_replica
from tests.clients.libraries import Libraries, Library
from tests.clients.stage import CONFIG, REPLICA_ARGUMENTS, REQUEST_S, Stage


@pytest.fixture(scope="package")
def stage() -> Iterator[Stage]:
    with (
        running_half_replica() as half,
        running_cluster(gateways=2, replicas=3, replica_arguments=REPLICA_ARGUMENTS, config=CONFIG) as cluster,
    ):
        stage = Stage(cluster, half)
        timeouts = {"connect_s": REQUEST_S, "first_byte_s": REQUEST_S, "request_s": REQUEST_S}
        with stage.another_gateway(timeouts=timeouts) as hurried:
            stage.hurried_url = hurried.url
            yield stage


@pytest.fixture(scope="package")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Libraries]:
    """A library by the name of its driver."""
    folder = tmp_path_factory.mktemp("drivers")
    running: dict[str, Library] = {}
    with ExitStack() as stack:

        def find(driver: str) -> Library:
            if driver not in running:
                running[driver] = stack.enter_context(closing(Library(driver, folder)))
            return running[driver]

        yield find
