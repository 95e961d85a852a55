"""The overlay `pairs`: prefill and decode on replicas of two StatefulSets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.settings.base import ROLE_LABEL
from tests.deploy.manifests import discovered, endpoint_slice, gateway_settings, replicas, workload

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
