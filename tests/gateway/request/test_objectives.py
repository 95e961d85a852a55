"""The priorities of InferenceObjectives, with an API server for tests, over real HTTP. It allows what
deploy/kubernetes/picker/rbac.yaml does, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.request.objectives import Objectives
from gateway.settings.discovery_settings import DiscoverySettings
from gateway.tasks import Tasks
from tests.gateway.replicas.discovery.kubernetes_api import (
    OBJECTIVES,
    OLD_OBJECTIVES,
    ROLE_FILE,
    KubernetesApi,
    objective,
    running_for_pickers,
    service_account,
)
from tests.polling import eventually

HEADER = "x-gateway-inference-objective"


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with running_for_pickers() as server:
        yield server


def settings(api: KubernetesApi, folder: Path, header: str | None = HEADER, pool: str = "chat") -> DiscoverySettings:
    account = str(service_account(folder / "account"))
    kubernetes = {"inference_pool": pool, "api_url": api.url, "service_account": account, "objective_header": header}
    return DiscoverySettings.model_validate({"kubernetes": kubernetes})


@asynccontextmanager
async def followed(told: DiscoverySettings) -> AsyncIterator[Objectives]:
    """It has its first answer."""
    tasks, objectives = Tasks(), Objectives(told)
    tasks.spawn(objectives.run(), "objectives")
    try:
        await objectives.first_answer()
        yield objectives
    finally:
        await tasks.close()


def of(objectives: Objectives, name: str) -> int | None:
    return objectives.priority({HEADER: name})


async def test_a_request_has_the_priority_of_the_objective_that_it_names_and_a_change_counts(
    api: KubernetesApi, tmp_path: Path
) -> None:
    await api.put_object(OBJECTIVES, "urgent", **objective("chat", 10))
    await api.put_object(OBJECTIVES, "unset", **objective("chat", None, group=None))
    await api.put_object(OBJECTIVES, "of-another-pool", **objective("other", 10))
    await api.put_object(OBJECTIVES, "of-another-group", **objective("chat", 10, group="inference.networking.x-k8s.io"))
    await api.put_object(OBJECTIVES, "elsewhere", namespace="elsewhere", **objective("chat", 10))
    async with followed(settings(api, tmp_path)) as objectives:
        assert [of(objectives, name) for name in ("urgent", "unset")] == [10, 0]
        for name in ("of-another-pool", "of-another-group", "elsewhere", "missing", "urgent, urgent", ""):
            assert of(objectives, name) is None
        assert objectives.priority({}) is None
        assert objectives.priority({"x-llm-d-inference-objective": "urgent"}) is None
        await api.put_object(OBJECTIVES, "urgent", **objective("chat", -1))
        await eventually(lambda: of(objectives, "urgent") == -1)
        await api.delete("urgent", OBJECTIVES)
        await eventually(lambda: of(objectives, "urgent") is None)
        assert objectives.problems() == {"objectives of chat": ""}


async def test_without_a_header_in_the_configuration_none_counts_and_nobody_is_asked(
    api: KubernetesApi, tmp_path: Path
) -> None:
    await api.put_object(OBJECTIVES, "urgent", **objective("chat", 10))
    async with followed(settings(api, tmp_path, header=None)) as objectives:
        assert of(objectives, "urgent") is None
        assert (objectives.problems(), api.lists) == ({}, [])
        objectives.use(settings(api, tmp_path))
        await objectives.first_answer()
        assert of(objectives, "urgent") == 10
        objectives.use(settings(api, tmp_path, pool="other"))
        await objectives.first_answer()
        assert of(objectives, "urgent") is None
        assert objectives.problems() == {"objectives of other": ""}


async def test_objectives_of_the_older_group_count_if_the_newer_one_is_not_installed(
    api: KubernetesApi, tmp_path: Path
) -> None:
    api.served.add(OLD_OBJECTIVES)
    await api.put_object(OLD_OBJECTIVES, "old", **objective("chat", 1))
    async with followed(settings(api, tmp_path)) as objectives:
        assert of(objectives, "old") is None
    api.served.remove(OBJECTIVES)
    async with followed(settings(api, tmp_path)) as objectives:
        assert of(objectives, "old") == 1
    api.served.remove(OLD_OBJECTIVES)
    async with followed(settings(api, tmp_path)) as objectives:
        (problem,) = objectives.problems().values()
        assert problem.endswith("install their CRD, or leave out discovery.kubernetes.objective_header")


async def test_while_the_api_server_refuses_those_found_last_stay_and_the_missing_right_is_named(
    api: KubernetesApi, tmp_path: Path
) -> None:
    await api.put_object(OBJECTIVES, "urgent", **objective("chat", 10))
    async with followed(settings(api, tmp_path)) as objectives:
        allowed, api.rules = api.rules, []
        await api.cut()
        await eventually(lambda: "answered 403" in objectives.problems()["objectives of chat"])
        assert f"allow list and watch of inferenceobjectives, as deploy/kubernetes/picker/{ROLE_FILE.name} does" in str(
            objectives.problems()
        )
        assert of(objectives, "urgent") == 10
        api.rules = allowed
        await api.put_object(OBJECTIVES, "urgent", **objective("chat", 1))
        await eventually(lambda: of(objectives, "urgent") == 1)
        assert objectives.problems() == {"objectives of chat": ""}
