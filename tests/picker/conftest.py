"""Four pickers beside a gateway, and an Envoy in each of the two modes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.cluster import Cluster, running_cluster
from bench.envoy import NOTHING, PASSES
from bench.pickers import Picker, running_pickers
from tests.api.stage import PATIENT_REDIS
from tests.picker.stage import running_envoy

SETTINGS = {"redis": PATIENT_REDIS, "hedge": {"max_share": 0}}


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    with running_cluster(gateways=1, replicas=3, replica_arguments=("--speed", "5"), config=SETTINGS) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def pickers(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Picker]]:
    with running_pickers(cluster, tmp_path_factory.mktemp("pickers"), 4) as pickers:
        yield pickers


@pytest.fixture(scope="package", params=[NOTHING, PASSES], ids=["answers read", "answers pass"])
def url(
    request: pytest.FixtureRequest, pickers: list[Picker], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with running_envoy(pickers, tmp_path_factory.mktemp("envoy"), request.param) as url:
        yield url
