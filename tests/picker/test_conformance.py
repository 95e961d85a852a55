"""What the inference extension's conformance tests ask of a picker, with a real Envoy.

The suite itself knows gateways only, and brings its own picker. Its tests that concern a picker are written anew here:
endpoint selection (each of several ports), subset (test_requests.py), served endpoint, fail-open, weighted pools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.cluster import Cluster, running_cluster
from bench.pickers import Picker, running_pickers
from tests.api.stage import chat_body, fresh, text
from tests.picker.stage import CHAT, ask, is_idle, load, replica_of, running_envoy, stream
from tests.polling import wait_until
from tests.programs import needs

pytestmark = needs("envoy")
_SUBSET = "x-gateway-destination-endpoint-subset"


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    """A cluster whose replicas may die."""
    with running_cluster(gateways=1, replicas=3, replica_arguments=("--speed", "5")) as cluster:
        yield cluster


def test_each_port_of_a_host_is_an_endpoint_that_a_trusted_proxy_can_select(own: Cluster, tmp_path: Path) -> None:
    obeyed = {f"                          - remove: {_SUBSET}\n": ""}  # so the client stands for the proxy here
    with (
        running_pickers(own, tmp_path, 1, trusts_subset_header=True) as pickers,
        running_envoy(pickers, tmp_path, obeyed) as url,
    ):
        for sim in (*own.replicas, *own.replicas):
            named = {_SUBSET: sim.url.removeprefix("http://")}
            answer = httpx.post(f"{url}{CHAT}", json=chat_body(fresh()), headers=named, trust_env=False)
            assert (answer.status_code, answer.headers["x-kvgate-replica"]) == (200, sim.id)


def test_without_a_picker_an_open_proxy_serves_what_has_no_body(own: Cluster, tmp_path: Path) -> None:
    with (
        running_pickers(own, tmp_path, 1) as pickers,
        running_envoy(pickers, tmp_path, edit=partial(_tries_itself, own)) as url,
    ):
        pickers[0].end()
        assert httpx.get(f"{url}/version", trust_env=False).status_code == 200, "by Envoy's own policy"
        assert ask(url).status_code == 500, "Envoy does not fail open while a body streams in both directions"


def _weighted(second: Picker, filters: list[Any], clusters: list[Any]) -> None:
    """One request in four goes to a second pool, which has a picker of its own."""
    manager = filters[0]["typed_config"]
    (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
    other = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
        "overrides": {"grpc_service": {"envoy_grpc": {"cluster_name": "second"}}},
    }
    del route["route"]["cluster"]
    route["route"]["weighted_clusters"] = {
        "clusters": [
            {"name": "replicas", "weight": 75},
            {"name": "replicas", "weight": 25, "typed_per_filter_config": {"envoy.filters.http.ext_proc": other}},
        ]
    }
    address = {"socket_address": {"address": "127.0.0.1", "port_value": second.grpc_port}}
    (asked,) = (each for each in clusters if each["name"] == "pickers")
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    clusters.append(asked | {"name": "second", "load_assignment": {"cluster_name": "second", "endpoints": endpoints}})


def test_each_of_two_weighted_pools_has_its_picker_and_its_replicas(own: Cluster, tmp_path: Path) -> None:
    listed = [{"id": sim.id, "url": sim.url} for sim in own.replicas]
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    with (
        running_pickers(own, folders[0], 1, {"replicas": listed[:2]}) as first,
        running_pickers(own, folders[1], 1, {"replicas": listed[2:]}) as second,
        running_envoy(first, tmp_path, edit=partial(_weighted, second[0])) as url,
    ):
        went = Counter(ask(url).headers["x-kvgate-replica"] for _ in range(40))
    assert went.keys() == {sim.id for sim in own.replicas}
    assert 2 <= went[own.replicas[2].id] <= 20, went


def test_the_load_moves_to_the_endpoint_that_the_proxy_has_really_used(own: Cluster, tmp_path: Path) -> None:
    with (
        running_pickers(own, tmp_path, 1, fallback_endpoints=2) as pickers,
        running_envoy(pickers, tmp_path, edit=partial(_tries_itself, own)) as url,
    ):
        prompt = text()
        first = replica_of(own, ask(url, prompt))
        first.kill()
        with stream(url, prompt, max_tokens=200) as answer:
            served = replica_of(own, answer)
            assert served is not first
            assert answer.headers["x-kvgate-decision"].startswith("moved; ")
            wait_until(lambda: load(own) == {served.id: 1})
            answer.read()
        first.start()
        first.wait_until_ready()
        wait_until(lambda: is_idle(own))


_POLICIES = "type.googleapis.com/envoy.extensions.load_balancing_policies"


def _policy(name: str, message: str, **fields: Any) -> dict[str, Any]:
    typed = {"@type": f"{_POLICIES}.{name}.v3.{message}", **fields}
    return {"policies": [{"typed_extension_config": {"name": name, "typed_config": typed}}]}


def _tries_itself(cluster: Cluster, filters: list[Any], clusters: list[Any]) -> None:
    """Envoy knows the replicas, goes from one endpoint of the picker's list to the next, and says which one answers."""
    replicas = clusters[0]
    for name in ("lb_policy", "original_dst_lb_config"):
        del replicas[name]
    addresses = [{"address": "127.0.0.1", "port_value": sim.port} for sim in cluster.replicas]
    replicas["type"] = "STATIC"
    replicas["load_assignment"] = {
        "cluster_name": "replicas",
        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": {"socket_address": each}}} for each in addresses]}],
    }
    replicas["load_balancing_policy"] = _policy(
        "override_host",
        "OverrideHost",
        override_host_sources=[{"header": "x-gateway-destination-endpoint"}],
        selected_host_key={"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint-served"}]},
        fallback_policy=_policy("round_robin", "RoundRobin"),
    )
    manager = filters[0]["typed_config"]
    (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
    route["route"]["retry_policy"] = {"retry_on": "connect-failure", "num_retries": 2}
    (ext_proc,) = (each for each in manager["http_filters"] if each["name"] == "envoy.filters.http.ext_proc")
    ext_proc["typed_config"]["metadata_options"] = {"forwarding_namespaces": {"untyped": ["envoy.lb"]}}
