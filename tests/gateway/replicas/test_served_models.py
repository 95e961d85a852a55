"""Which replicas serve a model's name."""

from __future__ import annotations

from typing import Any

from coordinator.engine.facts import parse_models
from gateway.replicas.member import Member
from gateway.replicas.served import Backends, served_names
from gateway.replicas.told_role import ToldRole
from gateway.settings.base import ROLE_LABEL


def member(name: str, root: str, *others: dict[str, Any], length: int | None = None, served: str = "prod") -> Member:
    base = {"id": served, "root": root, "parent": None, "max_model_len": length}
    cards = parse_models({"data": [base, *others]})
    return Member(name, f"http://{name}", cards=cards, pool=f"pool-{root}")


def replicas(backends: Backends) -> dict[str, set[str]]:
    return {each.backend: set(each.replicas) for each in backends}


def test_a_name_has_all_of_its_replicas_whatever_their_order() -> None:
    members = member("r0", "v1"), member("r1", "v2"), member("r2", "v1")
    assert replicas(served_names(members)["prod"]) == {"pool-v1": {"r0", "r2"}, "pool-v2": {"r1"}}


def test_an_adapter_of_one_replica_and_the_base_model_of_another_are_two_backends() -> None:
    adapter = {"id": "sql", "root": "/adapters/sql", "parent": "prod"}
    served = served_names((member("r0", "v1", adapter), member("r1", "v1", served="sql")))
    assert replicas(served["sql"]) == {"pool-v1 sql": {"r0"}, "pool-v1": {"r1"}}


def test_a_server_that_only_decodes_serves_nothing_unless_another_one_computes_prompts() -> None:
    """Nor does it then serve what cannot be paired."""
    plain, decode, prefill = (member(name, "v1") for name in ("r0", "r1", "r2"))
    decode.told_role, prefill.told_role = ToldRole("decode", 3, True), ToldRole("prefill", 0, False)
    assert replicas(served_names((plain, decode, prefill))["prod"]) == {"pool-v1": {"r0"}}
    prefill.told_role = ToldRole("prefill", 1, True)
    (model,) = served_names((plain, decode, prefill))["prod"]
    assert (set(model.replicas), set(model.computing.replicas)) == ({"r0", "r1"}, {"r0"})
    assert replicas(served_names((decode,))["prod"]) == {"pool-v1": set()}, "that is a 503, and no 404"


def test_a_model_whose_replicas_all_compute_prompts_for_others_is_known_and_answered_by_nobody() -> None:
    prefill, decode = member("r0", "v1"), member("r1", "v1")
    prefill.labels = {ROLE_LABEL: "prefill"}
    (model,) = served_names((prefill,))["prod"]
    assert (model.replicas, set(model.prefills)) == ({}, {"r0"}), "that is a 503, and no 404"
    assert replicas(served_names((prefill, member("r2", "v2")))["prod"]) == {"pool-v2": {"r2"}}
    (model,) = served_names((prefill, decode))["prod"]
    assert (set(model.replicas), model.prefills) == ({"r1"}, {}), "it computes its own prompts"


def test_a_prompt_fits_the_replicas_that_take_its_tokens() -> None:
    (model,) = served_names((member("r0", "v1", length=4096), member("r1", "v1", length=65536), member("r2", "v1")))[
        "prod"
    ]
    assert model.fitting(4096) is model
    assert set(model.fitting(4097).replicas) == {"r1", "r2"}
    assert set(model.fitting(65537).replicas) == {"r2"}, "it does not tell how many it takes"
    assert model.fitting(4097) is model.fitting(5000), "each length makes one subset, however many prompts have it"


def test_the_longest_get_a_prompt_that_fits_none() -> None:
    (model,) = served_names((member("r0", "v1", length=4096), member("r1", "v1", length=8192)))["prod"]
    assert set(model.fitting(9000).replicas) == {"r1"}
    assert not model.takes(9000, ())


def test_replicas_that_refused_are_left_out_unless_none_is_left() -> None:
    (model,) = served_names((member("r0", "v1"), member("r1", "v1")))["prod"]
    assert set(model.fitting(10, {"r0"}).replicas) == {"r1"}
    assert set(model.fitting(10, {"r0", "r1"}).replicas) == {"r0", "r1"}
    assert model.takes(10, {"r0"})
    assert not model.takes(10, {"r0", "r1"})
