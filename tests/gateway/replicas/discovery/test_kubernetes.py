"""Replicas from EndpointSlices, with an API server for tests, over real HTTP."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.replicas.discovery import api_server
from gateway.replicas.discovery.kubernetes import EndpointSlices
from gateway.replicas.discovery.source import SourceDown
from gateway.settings.discovery_settings import KubernetesSettings
from gateway.settings.gateway_settings import ReplicaSettings
from tests.certificates import self_signed
from tests.gateway.replicas.discovery.kubernetes_api import (
    KubernetesApi,
    endpoint,
    ports,
    running_kubernetes,
    service_account,
)
from tests.programs import needs

Answers = AsyncGenerator[list[ReplicaSettings], None]


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with running_kubernetes() as server:
        yield server


def follow(api: KubernetesApi, folder: Path, **settings: Any) -> Answers:
    if not folder.joinpath("token").exists():
        service_account(folder)
    settings = {"service": "vllm"} | settings
    if "selector" in settings:
        del settings["service"]
    return EndpointSlices(KubernetesSettings(api_url=api.url, service_account=str(folder), **settings)).follow()


async def urls(answers: Answers) -> dict[str, str]:
    """The replicas of the next answer: id → URL."""
    return {replica.id: replica.url for replica in await anext(answers)}


async def first(api: KubernetesApi, folder: Path, **settings: Any) -> dict[str, str]:
    answers = follow(api, folder, **settings)
    try:
        return await urls(answers)
    finally:
        await answers.aclose()


async def test_each_ready_pod_of_the_service_is_a_replica_under_its_own_name(
    api: KubernetesApi, tmp_path: Path
) -> None:
    pods = [endpoint("vllm-0", "10.0.0.1"), endpoint("vllm-1", "10.0.0.2", ready=None, terminating=None)]
    leaving = endpoint("leaving", "10.0.0.3", ready=True, terminating=True)
    await api.put("vllm-a", [*pods, leaving, endpoint("starting", "10.0.0.4", ready=False)], ports(http=8000))
    await api.put("vllm-b", [endpoint("vllm-2", "10.0.1.1")], ports(http=8001))
    await api.put("other", [endpoint("other-0", "10.0.2.1")], ports(http=8000), service="other")
    assert await first(api, tmp_path) == {
        "vllm-0": "http://10.0.0.1:8000",
        "vllm-1": "http://10.0.0.2:8000",
        "vllm-2": "http://10.0.1.1:8001",
    }


async def test_every_pod_that_is_found_has_the_configured_labels(api: KubernetesApi, tmp_path: Path) -> None:
    await api.put("vllm-a", [endpoint("vllm-0", "10.0.0.1")], ports(http=8000))
    answers = follow(api, tmp_path, labels={"version": "v2"})
    assert [replica.labels for replica in await anext(answers)] == [{"version": "v2"}]
    await answers.aclose()


async def test_labels_of_a_service_that_gateways_understand_are_those_of_its_replicas(
    api: KubernetesApi, tmp_path: Path
) -> None:
    for name, role in (("computes", "prefill"), ("answers", "decode"), ("wrong", "prefil")):
        labels = {"app": "vllm", "kvgate.io/role": role, "kvgate.io/team": "", "kvgate.io/bootstrap-port": "8999"}
        await api.put(name, [endpoint(name, "10.0.0.1")], ports(http=8000), service=name, labels=labels)
    everybody = [endpoint(name, "10.0.0.1") for name in ("computes", "answers", "wrong")]
    await api.put("all", everybody, ports(http=8000), service="all", labels={"app": "vllm"})
    answers = follow(api, tmp_path, selector="app=vllm", labels={"version": "v2"})
    assert {replica.id: replica.labels for replica in await anext(answers)} == {
        "computes": {"version": "v2", "kvgate.io/role": "prefill", "kvgate.io/bootstrap-port": "8999"},
        "answers": {"version": "v2", "kvgate.io/role": "decode", "kvgate.io/bootstrap-port": "8999"},
        "wrong": {"version": "v2"},
    }
    await answers.aclose()


async def test_a_wrong_label_is_logged_again_when_it_changes_and_not_with_each_list(
    api: KubernetesApi, tmp_path: Path
) -> None:
    service_account(tmp_path)
    source = EndpointSlices(KubernetesSettings(api_url=api.url, service_account=str(tmp_path), selector="app=vllm"))
    with capture_logs() as logs:
        for role in ("prefil", "prefil", "decod"):
            labels = {"app": "vllm", "kvgate.io/role": role}
            await api.put("a", [endpoint("vllm-0", "10.0.0.1")], ports(http=8000), labels=labels)
            answers = source.follow()
            assert [replica.labels for replica in await anext(answers)] == [{}]
            await answers.aclose()
    assert [(log["name"], log["problem"].split()[1]) for log in logs] == [("a", "'prefil'"), ("a", "'decod'")]


async def test_slices_are_found_by_labels_and_in_other_namespaces_too(api: KubernetesApi, tmp_path: Path) -> None:
    await api.put("a", [endpoint("vllm-0", "10.0.0.1")], ports(http=8000))
    assert await first(api, tmp_path, selector="kubernetes.io/service-name=vllm") == {"vllm-0": "http://10.0.0.1:8000"}
    assert await first(api, tmp_path, namespace="elsewhere") == {}


async def test_of_several_ports_the_named_one_is_taken(api: KubernetesApi, tmp_path: Path) -> None:
    await api.put("a", [endpoint("vllm-0", "10.0.0.1")], ports(metrics=9000, http=8000))
    assert await first(api, tmp_path, port="http") == {"vllm-0": "http://10.0.0.1:8000"}
    assert await first(api, tmp_path, port="grpc") == {}
    with pytest.raises(SourceDown, match=r"name one of metrics, http in discovery\.kubernetes\.port"):
        await first(api, tmp_path)


async def test_a_pod_with_addresses_of_both_kinds_is_one_replica(api: KubernetesApi, tmp_path: Path) -> None:
    await api.put("a", [endpoint("vllm-0", "2001:db8::1")], ports(http=8000), address_type="IPv6")
    assert await first(api, tmp_path) == {"vllm-0": "http://[2001:db8::1]:8000"}
    await api.put("b", [endpoint("vllm-0", "10.0.0.1")], ports(http=8000))
    assert await first(api, tmp_path) == {"vllm-0": "http://10.0.0.1:8000"}


async def test_names_too_long_for_an_id_keep_their_end_and_an_endpoint_without_one_gets_its_address(
    api: KubernetesApi, tmp_path: Path
) -> None:
    pod = "a-model-with-a-name-that-does-not-end-soon-6d4cf56db6-x7k2p"
    await api.put("a", [endpoint(pod, "10.0.0.1"), endpoint("", "10.0.0.2")], ports(http=8000))
    assert await first(api, tmp_path) == {pod[-48:]: "http://10.0.0.1:8000", "10.0.0.2-8000": "http://10.0.0.2:8000"}


async def test_what_changes_is_told_at_once(api: KubernetesApi, tmp_path: Path) -> None:
    await api.put("a", None, ports(http=8000))
    answers = follow(api, tmp_path)
    assert await urls(answers) == {}
    await api.bookmark()
    await api.put("a", [endpoint("vllm-0", "10.0.0.1")], ports(http=8000))
    assert await urls(answers) == {"vllm-0": "http://10.0.0.1:8000"}
    await api.put("b", [endpoint("vllm-1", "10.0.0.2")], ports(http=8000))
    assert set(await urls(answers)) == {"vllm-0", "vllm-1"}
    await api.put("a", [endpoint("vllm-0", "10.0.0.1", ready=False, terminating=True)], ports(http=8000))
    assert set(await urls(answers)) == {"vllm-1"}
    await api.delete("b")
    assert await urls(answers) == {}
    assert len(api.lists) == len(api.watches) == 1
    await answers.aclose()


async def test_a_watch_begins_where_the_list_ended(api: KubernetesApi, tmp_path: Path) -> None:
    await api.put("a", [endpoint("vllm-0", "10.0.0.1")], ports(http=8000))
    answers = follow(api, tmp_path)
    await anext(answers)
    await api.put("a", [endpoint("vllm-1", "10.0.0.1")], ports(http=8000))  # after the list and before the watch
    assert set(await urls(answers)) == {"vllm-1"}
    await answers.aclose()


async def test_following_ends_when_the_watch_does_or_its_version_is_too_old(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_server, "_WATCH_S", 1)
    answers = follow(api, tmp_path)
    await anext(answers)
    with pytest.raises(StopAsyncIteration):
        await anext(answers)
    answers = follow(api, tmp_path)
    await anext(answers)
    await api.compact()
    with pytest.raises(StopAsyncIteration):
        await anext(answers)


async def test_a_connection_that_breaks_says_nothing_about_the_replicas(api: KubernetesApi, tmp_path: Path) -> None:
    await api.put("a", [endpoint("vllm-0", "10.0.0.1")], ports(http=8000))
    answers = follow(api, tmp_path)
    await anext(answers)
    await api.put("a", [endpoint("vllm-1", "10.0.0.1")], ports(http=8000))
    await anext(answers)
    await api.cut()
    with pytest.raises(SourceDown):
        await anext(answers)


async def test_an_api_server_that_says_nothing_is_given_up(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_server, "_ANSWER_S", 0.3)
    api.hangs = True
    with pytest.raises(SourceDown, match="ReadTimeout"):
        await first(api, tmp_path)


async def test_a_token_that_is_not_allowed_to_says_which_role_is_missing(api: KubernetesApi, tmp_path: Path) -> None:
    api.fault = 403
    with pytest.raises(
        SourceDown, match=r"answered 403: .*; allow list and watch of endpointslices, .*discovery-rbac\.yaml"
    ):
        await first(api, tmp_path)
    api.fault = 0
    with pytest.raises(SourceDown, match="answered 401: Unauthorized"):
        await first(api, service_account(tmp_path / "wrong", token="another"))


async def test_outside_of_a_pod_it_says_what_is_missing(api: KubernetesApi, tmp_path: Path) -> None:
    service_account(tmp_path).joinpath("namespace").unlink()
    with pytest.raises(SourceDown, match=r"namespace cannot be read .* discovery\.kubernetes\.service_account"):
        await first(api, tmp_path)
    assert await first(api, tmp_path, namespace="models") == {}


async def test_what_is_no_list_of_slices_is_not_taken_for_an_empty_one(api: KubernetesApi, tmp_path: Path) -> None:
    await api.put("a", [{"addresses": []}], ports(http=8000))
    with pytest.raises(SourceDown, match="cannot be used"):
        await first(api, tmp_path)
    await api.put("a", [endpoint("vllm-0", "no address")], ports(http=8000))
    with pytest.raises(SourceDown, match="cannot be used"):
        await first(api, tmp_path)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two self-signed certificates for 127.0.0.1, with their keys in the same folder."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "another"):
        self_signed(folder, name, "127.0.0.1")
    return folder


@needs("openssl")
async def test_only_the_certificate_in_the_pod_is_trusted(certificates: Path, tmp_path: Path) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    async with running_kubernetes(tls) as api:
        await api.put("a", [endpoint("vllm-0", "10.0.0.1")], ports(http=8000))
        (tmp_path / "ca.crt").symlink_to(certificates / "server.crt")
        assert await first(api, tmp_path) == {"vllm-0": "http://10.0.0.1:8000"}
        (tmp_path / "ca.crt").unlink()
        with pytest.raises(SourceDown, match=r"ca\.crt cannot be used: No such file"):
            await first(api, tmp_path)
        (tmp_path / "ca.crt").symlink_to(certificates / "another.crt")
        with pytest.raises(SourceDown, match="CERTIFICATE_VERIFY_FAILED"):
            await first(api, tmp_path)
