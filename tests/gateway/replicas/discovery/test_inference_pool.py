"""Replicas from an InferencePool and its pods, with an API server for tests, over real HTTP. It allows what
deploy/kubernetes/picker/rbac.yaml does, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.replicas.discovery import api_server
from gateway.replicas.discovery.discovery import sources_of
from gateway.replicas.discovery.source import SourceDown
from gateway.settings.discovery_settings import DiscoverySettings
from gateway.settings.gateway_settings import ReplicaSettings
from tests.gateway.replicas.discovery.kubernetes_api import (
    PODS,
    POOLS,
    ROLE_FILE,
    KubernetesApi,
    pod,
    pool,
    running_for_pickers,
    service_account,
)

Answers = AsyncGenerator[list[ReplicaSettings], None]


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with running_for_pickers() as server:
        yield server


def follow(api: KubernetesApi, folder: Path, **settings: Any) -> Answers:
    account = str(service_account(folder / "account"))
    kubernetes = {"inference_pool": "chat", "api_url": api.url, "service_account": account, **settings}
    (source,) = sources_of(DiscoverySettings.model_validate({"kubernetes": kubernetes}))
    return source.follow()


async def urls(answers: Answers) -> dict[str, str]:
    """The replicas of the next answer: id → URL."""
    return {replica.id: replica.url for replica in await anext(answers)}


async def first(api: KubernetesApi, folder: Path) -> dict[str, str]:
    async with aclosing(follow(api, folder)) as answers:
        return await urls(answers)


async def test_each_ready_pod_that_the_pool_selects_is_a_replica_under_its_own_name(
    api: KubernetesApi, tmp_path: Path
) -> None:
    await api.put_object(POOLS, "chat", **pool(8000, app="vllm", model="chat"))
    await api.put_object(POOLS, "other", **pool(9000, app="vllm"))
    both = {"app": "vllm", "model": "chat"}
    await api.put_object(PODS, "vllm-0", **pod("10.0.0.1", **both))
    await api.put_object(PODS, "vllm-1", **pod("2001:db8::1", **both))
    await api.put_object(PODS, "starting", **pod("10.0.0.3", ready=False, **both))
    await api.put_object(PODS, "begun", **pod("10.0.0.4", ready=None, **both))
    await api.put_object(PODS, "leaving", **pod("10.0.0.5", terminating=True, **both))
    await api.put_object(PODS, "nowhere", **pod("", **both))
    await api.put_object(PODS, "another-models", **pod("10.0.0.6", app="vllm"))
    await api.put_object(PODS, "elsewhere", namespace="elsewhere", **pod("10.0.0.7", **both))
    assert await first(api, tmp_path) == {"vllm-0": "http://10.0.0.1:8000", "vllm-1": "http://[2001:db8::1]:8000"}


async def test_each_of_several_ports_is_a_replica_and_labels_are_those_of_the_pod(
    api: KubernetesApi, tmp_path: Path
) -> None:
    await api.put_object(POOLS, "chat", **pool(8000, 8001, app="vllm"))
    told = {"app": "vllm", "kvgate.io/role": "decode", "kvgate.io/team": "a"}
    await api.put_object(PODS, "vllm-0", **pod("10.0.0.1", **told))
    async with aclosing(follow(api, tmp_path, labels={"version": "v2"}, scheme="https")) as answers:
        found = await anext(answers)
    labels = {"version": "v2", "kvgate.io/role": "decode"}
    assert found == [
        ReplicaSettings(id=f"vllm-0-{port}", url=f"https://10.0.0.1:{port}", labels=labels) for port in (8000, 8001)
    ]


async def test_a_wrong_label_of_a_pod_is_logged_and_the_pod_is_used(api: KubernetesApi, tmp_path: Path) -> None:
    await api.put_object(POOLS, "chat", **pool(8000, app="vllm"))
    await api.put_object(PODS, "vllm-0", **pod("10.0.0.1", app="vllm", **{"kvgate.io/role": "prefil"}))
    with capture_logs() as logs:
        assert await first(api, tmp_path) == {"vllm-0": "http://10.0.0.1:8000"}
    assert [(log["event"], log["name"]) for log in logs] == [("a pod has a wrong label", "vllm-0")]


async def test_what_changes_of_the_pods_is_told_at_once(api: KubernetesApi, tmp_path: Path) -> None:
    await api.put_object(POOLS, "chat", **pool(8000, app="vllm"))
    async with aclosing(follow(api, tmp_path)) as answers:
        assert await urls(answers) == {}
        await api.put_object(PODS, "vllm-0", **pod("10.0.0.1", app="vllm", ready=False))
        assert await urls(answers) == {}
        await api.put_object(PODS, "vllm-0", **pod("10.0.0.1", app="vllm"))
        assert set(await urls(answers)) == {"vllm-0"}
        await api.bookmark()
        await api.put_object(PODS, "vllm-1", **pod("10.0.0.2", app="vllm"))
        assert set(await urls(answers)) == {"vllm-0", "vllm-1"}
        await api.put_object(PODS, "vllm-1", **pod("10.0.0.2", app="none"))
        assert set(await urls(answers)) == {"vllm-0"}
        await api.put_object(PODS, "vllm-0", **pod("10.0.0.1", app="vllm", terminating=True))
        assert await urls(answers) == {}
        await api.delete("vllm-0", PODS)
        assert await urls(answers) == {}
    assert len(api.lists) == len(api.watches) == 2  # of the pool and of its pods


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (pool(8001, app="vllm"), {"vllm-0": "http://10.0.0.1:8001"}),
        (pool(8000, 8001, app="vllm"), {f"vllm-0-{port}": f"http://10.0.0.1:{port}" for port in (8000, 8001)}),
        (pool(8000, app="new"), {"new-0": "http://10.0.0.2:8000"}),
    ],
)
async def test_a_pool_with_another_selector_or_other_ports_is_followed_anew(
    api: KubernetesApi,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    found: dict[str, str],
) -> None:
    monkeypatch.setattr(api_server, "_WATCH_S", 3600)  # following would end with its watch
    await api.put_object(POOLS, "chat", **pool(8000, app="vllm"))
    await api.put_object(PODS, "vllm-0", **pod("10.0.0.1", app="vllm"))
    await api.put_object(PODS, "new-0", **pod("10.0.0.2", app="new"))
    async with aclosing(follow(api, tmp_path)) as answers:
        assert await urls(answers) == {"vllm-0": "http://10.0.0.1:8000"}
        await api.put_object(POOLS, "chat", **pool(8000, app="vllm"), status={"parents": []})
        await api.put_object(PODS, "vllm-0", **pod("10.0.0.9", app="vllm"))
        assert await urls(answers) == {"vllm-0": "http://10.0.0.9:8000"}  # the pool's status changes nothing
        await api.put_object(PODS, "vllm-0", **pod("10.0.0.1", app="vllm"))
        await anext(answers)
        await api.put_object(POOLS, "chat", **changed)
        with pytest.raises(StopAsyncIteration):
            await anext(answers)
    assert await first(api, tmp_path) == found


async def test_a_pool_that_is_not_there_is_named_with_its_setting(api: KubernetesApi, tmp_path: Path) -> None:
    missing = r"the namespace models has no InferencePool chat: create it, or .* discovery\.kubernetes\.inference_pool"
    with pytest.raises(SourceDown, match=missing):
        await first(api, tmp_path)
    await api.put_object(POOLS, "chat", **pool(8000, app="vllm"))
    async with aclosing(follow(api, tmp_path)) as answers:
        await anext(answers)
        await api.delete("chat", POOLS)
        with pytest.raises(SourceDown, match=missing):
            await anext(answers)
    api.served.remove(POOLS)
    with pytest.raises(SourceDown, match=r"404: ; it serves no inferencepools of inference\.networking\.k8s\.io/v1"):
        await first(api, tmp_path)


@pytest.mark.parametrize(("denied", "verb"), [("inferencepools", "list"), ("pods", "list"), ("pods", "watch")])
async def test_a_right_that_is_missing_is_named_with_the_file_that_has_it(
    api: KubernetesApi, tmp_path: Path, denied: str, verb: str
) -> None:
    await api.put_object(POOLS, "chat", **pool(8000, app="vllm"))
    assert api.rules is not None
    (rule,) = [rule for rule in api.rules if rule["resources"] == [denied]]
    rule["verbs"].remove(verb)
    told = f"answered 403: .*; allow list and watch of {denied}, as .*/{ROLE_FILE.name} "
    async with aclosing(follow(api, tmp_path)) as answers:
        with pytest.raises(SourceDown, match=told):  # the right to watch is missed after the first answer
            [_ async for _ in answers]


@pytest.mark.parametrize("gone", [True, False])
async def test_following_ends_when_a_watch_does_or_its_version_is_too_old(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    monkeypatch.setattr(api_server, "_WATCH_S", 30 if gone else 1)
    await api.put_object(POOLS, "chat", **pool(8000, app="vllm"))
    async with aclosing(follow(api, tmp_path)) as answers:
        await anext(answers)
        if gone:
            await api.compact()
        with pytest.raises(StopAsyncIteration):
            await anext(answers)


async def test_a_connection_that_breaks_says_nothing_about_the_replicas(api: KubernetesApi, tmp_path: Path) -> None:
    await api.put_object(POOLS, "chat", **pool(8000, app="vllm"))
    async with aclosing(follow(api, tmp_path)) as answers:
        await anext(answers)
        await api.put_object(PODS, "vllm-0", **pod("10.0.0.1", app="vllm"))
        await anext(answers)
        await api.cut()
        with pytest.raises(SourceDown):
            await anext(answers)


async def test_what_is_no_pod_is_not_taken_for_none(api: KubernetesApi, tmp_path: Path) -> None:
    await api.put_object(POOLS, "chat", **pool(8000, app="vllm"))
    await api.put_object(PODS, "vllm-0", **pod("no address", app="vllm"))
    with pytest.raises(SourceDown, match="pods cannot be used"):
        await first(api, tmp_path)
    await api.put_object(POOLS, "chat", **pool(app="vllm"))
    with pytest.raises(SourceDown, match="inferencepools cannot be used"):
        await first(api, tmp_path)
