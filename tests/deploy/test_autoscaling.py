"""The autoscalers of deploy/kubernetes/autoscaling, added to each overlay: they build, their schemas accept them, and
their parts agree. test_run.py shows that a gateway answers the question of KEDA, and test_monitoring.py that the
metrics of the adapter's rule exist."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.keys import pool_slug
from gateway.doctor.checks.tenants import findings
from gateway.settings.gateway_settings import GatewaySettings, load_settings
from tests.deploy.manifests import (
    KUBERNETES,
    OVERLAYS,
    Document,
    built,
    expanded,
    named,
    of_ones_own,
    secret,
    workload,
)
from tests.deploy.schemas import VERSIONS, problem

AUTOSCALING = KUBERNETES / "autoscaling"
CHOICES = {"keda": ("keda",), "keda with a key": ("keda", "keda-key"), "hpa": ("hpa",)}

Scaled = Callable[[str, str], list[Document]]

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
each_choice = pytest.mark.parametrize("choice", CHOICES)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Scaled:
    """Builds an overlay with an autoscaler, once."""
    found: dict[tuple[str, str], list[Document]] = {}

    def build(overlay: str, choice: str) -> list[Document]:
        if (overlay, choice) not in found:
            components = [f"../../autoscaling/{name}" for name in CHOICES[choice]]
            text = yaml.safe_dump({"resources": [f"../{overlay}"], "components": components, **KIND})
            found[overlay, choice] = of_ones_own(tmp_path_factory.mktemp("own"), text)
        return found[overlay, choice]

    return build


KIND = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "namespace": "kvgate"}


def the(documents: list[Document], kind: str, name: str = "replica") -> Document:
    (one,) = (each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return one


def autoscaler(documents: list[Document]) -> Document:
    """The spec of the HorizontalPodAutoscaler, or the ScaledObject's, which KEDA makes one of."""
    kinds = ("ScaledObject", "HorizontalPodAutoscaler")
    (one,) = (each for each in documents if each["kind"] in kinds and each["metadata"]["name"] == "replica")
    spec: Document = one["spec"]
    return spec


@pytest.fixture
def settings(scaled: Scaled, overlay: str, choice: str, tmp_path: Path) -> GatewaySettings:
    """The gateways' settings, with the autoscaler."""
    (config,) = (d for d in scaled(overlay, choice) if d["metadata"]["name"].startswith("gateway-config-"))
    path = tmp_path / "gateway.yaml"
    path.write_text(config["data"]["gateway.yaml"])
    return load_settings(path, secret())


@each_overlay
@each_choice
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(scaled: Scaled, overlay: str, choice: str, version: str) -> None:
    assert [found for document in scaled(overlay, choice) if (found := problem(document, version))] == []


@pytest.mark.parametrize(
    ("choice", "kind", "name", "path"),
    [
        ("keda", "ScaledObject", "replica", ("spec",)),
        ("keda", "ScaledObject", "replica", ("spec", "advanced", "horizontalPodAutoscalerConfig", "behavior")),
        ("keda with a key", "TriggerAuthentication", "kvgate-admin", ("spec",)),
        ("hpa", "HorizontalPodAutoscaler", "replica", ("spec", "behavior")),
    ],
)
def test_a_misspelt_field_would_be_found(
    scaled: Scaled, choice: str, kind: str, name: str, path: tuple[str, ...]
) -> None:
    wrong = copy.deepcopy(the(scaled("gpu", choice), kind, name))
    at: Any = wrong
    for field in path:
        at = at[field]
    at["misspelt"] = {}
    assert problem(wrong, VERSIONS[-1])


@each_overlay
@each_choice
def test_the_autoscaler_sets_the_number_of_replicas_alone_and_all_else_is_as_it_was(
    scaled: Scaled, overlay: str, choice: str
) -> None:
    replica, without = the(scaled(overlay, choice), "StatefulSet"), named(overlay, "StatefulSet", "replica")
    assert replica["spec"] == {name: value for name, value in without["spec"].items() if name != "replicas"}
    target = {"apiVersion": replica["apiVersion"], "kind": "StatefulSet", "name": "replica"}
    assert autoscaler(scaled(overlay, choice))["scaleTargetRef"] == target
    others = [d["metadata"]["name"] for d in built(overlay) if d["kind"] == "NetworkPolicy"]
    assert [d["metadata"]["name"] for d in scaled(overlay, choice) if d["kind"] == "NetworkPolicy"] == others
    # The gateways get the changed configuration.
    names = {d["metadata"]["name"] for d in scaled(overlay, choice) if d["kind"] == "ConfigMap"}
    volumes = the(scaled(overlay, choice), "Deployment", "gateway")["spec"]["template"]["spec"]["volumes"]
    assert {volume["configMap"]["name"] for volume in volumes} <= names


def test_both_autoscalers_in_one_overlay_are_an_error(tmp_path: Path) -> None:
    both = {"resources": ["../gpu"], "components": ["../../autoscaling/keda", "../../autoscaling/hpa"], **KIND}
    with pytest.raises(AssertionError, match="replicas"):
        of_ones_own(tmp_path, yaml.safe_dump(both))


@each_overlay
def test_the_annotations_name_what_the_engine_serves(overlay: str) -> None:
    told = named(overlay, "StatefulSet", "replica")["metadata"]["annotations"]
    argv = expanded(workload(overlay, "replica").container("engine"), POD_NAME="replica-0")
    if overlay == "sim":  # by default: test_run.py asks a gateway for this name
        assert (told["kvgate/model"], told["kvgate/root"]) == ("sim", "kvgate/sim-vlm")
    else:
        assert told["kvgate/model"] == told["kvgate/root"] == argv[argv.index("serve") + 1]
        assert "--served-model-name" not in argv
    assert told["kvgate/pool"] == pool_slug(told["kvgate/root"])


@each_overlay
@each_choice
def test_gateways_hold_requests_for_the_model_and_their_other_settings_are_the_bases(
    settings: GatewaySettings, overlay: str, tmp_path: Path
) -> None:
    told = named(overlay, "StatefulSet", "replica")["metadata"]["annotations"]
    (model,) = settings.queue.models
    assert (model.name, model.root) == (told["kvgate/model"], told["kvgate/root"])
    # A request that was held has two minutes for its answer.
    assert 0 < settings.queue.hold_s <= settings.timeouts.request_s - 120
    assert list(findings(settings)) == []
    base = load_settings(KUBERNETES / "base" / "gateway-config.yaml", secret())
    changed = {"policy": settings.policy, "queue": settings.queue}
    assert settings == base.model_copy(update=changed)


@each_overlay
@each_choice
def test_another_replica_is_started_before_the_slots_of_all_are_taken(
    scaled: Scaled, settings: GatewaySettings, overlay: str, choice: str
) -> None:
    spec, slots = autoscaler(scaled(overlay, choice)), settings.policy.max_active_requests
    if "triggers" in spec:
        target = int(spec["triggers"][0]["metadata"]["targetValue"])
    else:
        target = int(spec["metrics"][0]["external"]["target"]["averageValue"])
    assert slots is not None
    assert target == 0.75 * slots


@each_overlay
@each_choice
def test_replicas_go_one_by_one_and_only_when_the_last_one_is_gone(scaled: Scaled, overlay: str, choice: str) -> None:
    spec = autoscaler(scaled(overlay, choice))
    behavior = spec.get("behavior") or spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    (policy,) = behavior["scaleDown"]["policies"]
    assert (policy["type"], policy["value"]) == ("Pods", 1)
    drains_s = workload(overlay, "replica").pod["terminationGracePeriodSeconds"]
    assert policy["periodSeconds"] >= drains_s
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= drains_s
    assert spec.get("cooldownPeriod", drains_s) >= drains_s


@each_overlay
def test_the_rule_of_the_adapter_is_for_the_metric_of_the_autoscaler(scaled: Scaled, overlay: str) -> None:
    (metric,) = autoscaler(scaled(overlay, "hpa"))["metrics"]
    (rule,) = yaml.safe_load((AUTOSCALING / "hpa" / "adapter.yaml").read_text())["externalRules"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    told = named(overlay, "StatefulSet", "replica")["metadata"]["annotations"]
    assert metric["external"]["metric"]["selector"]["matchLabels"] == {"pool": told["kvgate/pool"]}


@each_overlay
def test_keda_asks_the_gateways_service_for_the_overlays_model(scaled: Scaled, overlay: str) -> None:
    documents = scaled(overlay, "keda with a key")
    (trigger,) = the(documents, "ScaledObject")["spec"]["triggers"]
    told = named(overlay, "StatefulSet", "replica")["metadata"]["annotations"]
    service = named(overlay, "Service", "gateway")
    host = f"{service['metadata']['name']}.{service['metadata']['namespace']}"
    assert [port["port"] for port in service["spec"]["ports"]] == [80]
    assert trigger["metadata"]["url"] == f"http://{host}/v1/demand?model={told['kvgate/model']}"
    assert trigger["metadata"]["authMode"] == "bearer"
    authentication = the(documents, "TriggerAuthentication", trigger["authenticationRef"]["name"])
    (token,) = authentication["spec"]["secretTargetRef"]
    assert (token["parameter"], token["name"]) == ("token", "kvgate")
    assert re.search(rf"`{token['key']}`", (KUBERNETES / "README.md").read_text())
