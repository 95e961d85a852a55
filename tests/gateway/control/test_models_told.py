"""What a gateway tells of configured models and their backends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import httpx
import pytest
from structlog.testing import capture_logs

from coordinator.store import Store
from gateway.app import Gateway
from gateway.doctor.ask import gateway_evidence
from gateway.replicas.model_states import ModelLog, ModelStates
from gateway.settings.base import ROLE_LABEL
from tests.cluster.clients import chat
from tests.gateway.scripted import ScriptedReplica, gateway_before
from tests.polling import eventually

V1, V2 = {"id": "m", "root": "/v1", "max_model_len": 4096}, {"id": "m", "root": "/v2", "max_model_len": 8192}


class Stage(NamedTuple):
    http: httpx.AsyncClient
    gateway: Gateway

    async def ready(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get("/ready")).json()
        return found

    async def cards(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.http.get("/v1/models")).json()["data"]
        return found


Staged = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture
async def replicas() -> AsyncIterator[list[ScriptedReplica]]:
    """Two versions of a model, under one name."""
    found = [ScriptedReplica(), ScriptedReplica()]
    async with AsyncExitStack() as stack:
        for replica, card in zip(found, (V1, V2), strict=True):
            replica.cards = [card]
            await stack.enter_async_context(replica.running())
        yield found


@pytest.fixture
def before(replicas: list[ScriptedReplica]) -> Staged:
    """A gateway before both, with these models."""

    @asynccontextmanager
    async def staged(*models: dict[str, Any], **settings: Any) -> AsyncIterator[Stage]:
        listed = [{"id": f"r{at}", "url": replica.url} for at, replica in enumerate(replicas)]
        async with gateway_before(replicas[0], replicas=listed, models=list(models), **settings) as (gateway, url):
            await eventually(lambda: len(gateway.fleet.ready_replicas()) == 2)
            async with httpx.AsyncClient(base_url=url) as http:
                yield Stage(http, gateway)

    return staged


def backend(root: str, weight: int, **more: Any) -> dict[str, Any]:
    return {"name": root.strip("/"), "match": {"root": root, **more}, "weight": weight}


async def test_backends_are_told_with_their_weights_and_ready_replicas(before: Staged) -> None:
    async with before({"name": "m", "aliases": ["old"], "backends": [backend("/v1", 9), backend("/v2", 1)]}) as stage:
        told = await stage.ready()
        assert told["models"] == {
            "m": {"v1": {"weight": 9, "ready_replicas": 1}, "v2": {"weight": 1, "ready_replicas": 1}}
        }
        assert told["weights"] == "approximate", "Redis is away"
        assert told.keys().isdisjoint({"models_in_several_pools", "models_down", "backends_without_replicas"})
        page = (await stage.http.get("/metrics")).text
        assert 'kvgate_backend_weight{backend="v1",model="m"} 9.0' in page
        assert 'kvgate_backend_ready_replicas{backend="v2",model="m"} 1.0' in page


async def test_weights_are_exact_while_one_redis_counts(before: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    async with before({"name": "m", "backends": [backend("/v1", 9), backend("/v2", 1)]}) as stage:
        monkeypatch.setattr(Store, "is_up", lambda *_: True)
        assert "weights" not in await stage.ready()
        monkeypatch.setattr(Store, "has_one_slot", False)
        assert (await stage.ready())["weights"] == "approximate"


async def test_a_backend_with_weight_and_without_a_replica_is_named(before: Staged) -> None:
    backends = [backend("/v1", 9), backend("/v3", 1), backend("/v4", 0)]
    async with before({"name": "chat", "backends": backends}) as stage:
        told = await stage.ready()
        assert told["backends_without_replicas"] == {"chat": ["v3"]}
        assert told["models"]["chat"]["v4"] == {"weight": 0, "ready_replicas": 0}
        assert "models_down" not in told
        assert "weights" in told


async def test_a_model_without_a_price_is_named_by_the_doctor_if_there_is_a_budget_in_money(before: Staged) -> None:
    spending = {"name": "a", "budgets": [{"per": "day", "money": 1}]}
    async with before(tenants=[spending], billing={"prices": [{"model": "n", "output_per_mtok": 1}]}) as stage:
        told = gateway_evidence("", await stage.ready(), (await stage.http.get("/version")).json())
        assert told.models_without_price == ("m",)


async def test_a_configured_model_that_nobody_serves_is_down(before: Staged) -> None:
    lone = {"name": "lone", "aliases": ["also"], "backends": [backend("/v3", 1)]}
    async with before(lone, {"name": "nobody", "aliases": ["none"]}) as stage:
        told = await stage.ready()
        assert told["models_down"] == ["lone", "nobody"]
        assert "weights" not in told, "no model has several backends"
        assert told["models_in_several_pools"].keys() == {"m"}


@pytest.mark.parametrize("hold_s", [0, 0.1])
async def test_requests_of_a_model_that_only_prefill_replicas_have_hear_which_role_is_missing(
    replicas: list[ScriptedReplica], hold_s: float
) -> None:
    listed = [{"id": "p0", "url": replicas[0].url, "labels": {ROLE_LABEL: "prefill"}}]
    async with gateway_before(replicas[0], replicas=listed, queue={"hold_s": hold_s}) as (gateway, url):
        await eventually(lambda: gateway.fleet.ready_replicas() == ["p0"])
        async with httpx.AsyncClient(base_url=url) as http:
            answer = await http.post("/v1/chat/completions", json=chat("hello") | {"model": "m"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
            assert "Start one with the role decode or both" in answer.json()["error"]["message"]
            assert (await http.get("/ready")).json()["models_down"] == ["m"]


async def test_so_do_requests_of_a_model_whose_decoding_replicas_have_died(replicas: list[ScriptedReplica]) -> None:
    decode = ScriptedReplica()
    decode.cards = [V1]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(decode.running())
        listed = [
            {"id": name, "url": each.url, "labels": {ROLE_LABEL: name}}
            for name, each in (("prefill", replicas[0]), ("decode", decode))
        ]
        async with gateway_before(replicas[0], replicas=listed) as (gateway, url):
            await eventually(lambda: len(gateway.fleet.ready_replicas()) == 2)
            await stack.aclose()
            await eventually(lambda: gateway.fleet.ready_replicas() == ["prefill"])
            async with httpx.AsyncClient(base_url=url) as http:
                answer = await http.post("/v1/chat/completions", json=chat("hello") | {"model": "m"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
            assert "Start one with the role decode or both" in answer.json()["error"]["message"]


async def test_a_request_that_only_a_dead_replica_could_serve_hears_nothing_of_roles(
    replicas: list[ScriptedReplica],
) -> None:
    decode = ScriptedReplica()
    decode.cards = [V1]
    async with decode.running():
        listed = [
            {"id": "prefill", "url": replicas[0].url, "labels": {ROLE_LABEL: "prefill"}},
            {"id": "decode", "url": decode.url, "labels": {ROLE_LABEL: "decode"}},
        ]
        async with gateway_before(replicas[0], replicas=listed) as (gateway, _):
            await eventually(lambda: len(gateway.fleet.ready_replicas()) == 2)
            assert not gateway.fleet.has_only_prefills(gateway.fleet.backends("m"))


async def test_a_model_that_only_its_fallback_answers_is_listed_and_a_misspelt_fallback_is_named(
    before: Staged, caplog: pytest.LogCaptureFixture
) -> None:
    lone = {"name": "lone", "aliases": ["also"], "backends": [backend("/v3", 1)], "fallback": ["n", "m"]}
    async with before(lone) as stage:
        told = await stage.ready()
        assert (told["models_down"], told["answered_by_fallback"]) == (["lone"], {"lone": ["m"]})
        assert told["unknown_fallbacks"] == {"lone": ["n"]}
        assert [(card["id"], card["max_model_len"]) for card in await stage.cards()] == [
            ("lone", 8192),
            ("also", 8192),
            ("m", 8192),
        ]


def test_the_log_says_whether_a_fallback_answers_and_which_one_nobody_serves() -> None:
    log, up = ModelLog(), ModelStates({}, {}, {}, {})
    with capture_logs() as told:
        for states in (
            up._replace(unknown_fallbacks={"m": ("n",)}, down={"m": ("o",)}),
            up._replace(down={"m": ()}),
            up,
        ):
            log.note(states)
            log.note(states)
    assert [(one["log_level"], one.get("fallbacks")) for one in told] == [
        ("warning", ["o"]),
        ("warning", ["n"]),
        ("error", None),
        ("info", None),
    ]


async def test_a_configured_model_whose_requests_are_held_is_not_down(before: Staged) -> None:
    hold = {"hold_s": 60, "models": [{"name": "asleep"}]}
    async with before({"name": "asleep", "aliases": ["a"]}, queue=hold) as stage:
        assert "models_down" not in await stage.ready()


async def test_explain_names_the_backend_and_who_chooses_it(before: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"name": "both", "backends": [backend("/v1", 9), backend("/v2", 1)]}
    one = {"name": "one", "backends": [backend("/v1", 9), backend("/v3", 1)]}
    async with before(both, one) as stage:

        async def explained(model: str) -> tuple[Any, ...]:
            body = {"model": model, "messages": [{"role": "user", "content": "Hello " * 2000}]}
            told = (await stage.http.post("/v1/route/explain", json=body)).json()
            return tuple(told.get(name) for name in ("backend", "backend_weight", "backend_by"))

        assert await explained("one") == ("v1", 9, "only")
        name, weight, by = await explained("both")
        assert (name, weight) in {("v1", 9), ("v2", 1)}
        assert by == "hash"
        assert await explained("m") == (None, None, None)
        monkeypatch.setattr(Store, "is_up", lambda *_: True)
        assert (await explained("both"))[2] == "count"


async def test_models_are_listed_by_the_names_that_clients_may_use(before: Staged) -> None:
    chat = {"name": "chat", "aliases": ["old"], "backends": [backend("/v1", 9), backend("/v2", 1)]}
    async with before(chat, {"name": "lone", "backends": [backend("/v3", 1)]}) as stage:
        cards = await stage.cards()
        assert [card["id"] for card in cards] == ["chat", "old", "m"]
        assert {card["max_model_len"] for card in cards} == {8192}, "the longest, as for each name"
        assert {card["root"] for card in cards} == {"/v2"}
        assert (await stage.http.get("/v1/models/old")).json() == cards[1]
        assert (await stage.http.get("/v1/models/lone")).status_code == 404


async def test_a_name_that_replicas_serve_is_listed_as_the_configuration_means_it(before: Staged) -> None:
    async with before({"name": "m", "backends": [backend("/v1", 1)]}) as stage:
        assert [(card["id"], card["root"]) for card in await stage.cards()] == [("m", "/v1")]
    m, other = ({"name": name, "backends": [backend(root, 1)]} for name, root in (("m", "/v3"), ("other", "/v1")))
    async with before(m, other) as stage:
        assert [card["id"] for card in await stage.cards()] == ["other"], "no replica may serve m"
