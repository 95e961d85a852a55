"""The overlay `pairs`: prefill and decode on replicas of two StatefulSets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.settings.base import ROLE_LABEL
from tests.deploy.manifests import (
    Document,
    built,
    discovered,
    endpoint_slice,
    gateway_settings,
    of_ones_own,
    replicas,
    selected,
    workload,
)
from tests.deploy.schemas import VERSIONS, problem

ROLES = {"replica-prefill": "prefill", "replica-decode": "decode"}
TRANSFER = "--kv-transfer-config"


async def test_gateways_find_the_replicas_of_both_roles_and_know_which_is_which(tmp_path: Path) -> None:
    slices = [endpoint_slice("pairs", name, {f"{name}-0": f"10.0.0.{number}"}) for number, name in enumerate(ROLES)]
    found = await discovered(gateway_settings("pairs", tmp_path), tmp_path, *slices)
    roles = {replica.id: replica.labels[ROLE_LABEL] for replica in found}
    assert roles == {f"{name}-0": role for name, role in ROLES.items()}


def test_all_else_of_the_gateways_configuration_is_as_without_pairs(tmp_path: Path) -> None:
    pairs, gpu = (gateway_settings(overlay, tmp_path).model_dump() for overlay in ("pairs", "gpu"))
    assert pairs["pairs"]["protocol"] == "nixl"
    assert {name for name in pairs if pairs[name] != gpu[name]} == {"discovery"}


def test_engines_are_those_without_pairs_and_hand_their_kv_over() -> None:
    plain = workload("gpu", "replica").container("engine")["args"]
    at = plain.index(TRANSFER) + 1
    assert {each.name for each in replicas("pairs")} == set(ROLES)
    for each in replicas("pairs"):
        args: list[str] = each.container("engine")["args"]
        assert args[:at] + args[at + 1 :] == plain[:at] + plain[at + 1 :]
        told: dict[str, Any] = json.loads(args[at])
        nixl, lmcache = told["kv_connector_extra_config"]["connectors"]
        assert (told["kv_connector"], nixl["kv_connector"]) == ("MultiConnector", "NixlConnector")
        assert nixl["kv_load_failure_policy"] == "recompute"
        assert lmcache == json.loads(plain[at])


def test_with_the_component_of_mooncake_gateways_and_decode_reach_the_bootstrap_servers(tmp_path: Path) -> None:
    own = of_ones_own(tmp_path, "resources: [../pairs]\ncomponents: [../pairs/mooncake]\nnamespace: kvgate\n")
    added = [document for document in own if document not in built("pairs")]
    assert {(document["kind"], document["metadata"]["namespace"]) for document in added} == {
        ("NetworkPolicy", "kvgate")
    }
    assert [problem(document, version) for document in added for version in VERSIONS] == [None] * len(added) * len(
        VERSIONS
    )

    def pods(selector: Document) -> set[str]:
        return {each.name for each in selected("pairs", selector)}

    open_ports = {
        (direction, port["port"]): (
            pods(policy["spec"]["podSelector"]),
            set().union(*(pods(peer["podSelector"]) for peer in rule[of])),
        )
        for policy in added
        for direction, of in (("ingress", "from"), ("egress", "to"))
        for rule in policy["spec"].get(direction, ())
        for port in rule["ports"]
    }
    assert open_ports == {
        ("ingress", 8998): ({"replica-prefill"}, {"replica-decode", "gateway"}),
        ("egress", 8998): ({*ROLES, "gateway"}, {"replica-prefill"}),
        ("ingress", 15000): ({*ROLES}, {*ROLES}),
        ("egress", 15000): ({*ROLES}, {*ROLES}),
    }
