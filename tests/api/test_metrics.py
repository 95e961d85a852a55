"""GET /metrics: Prometheus can read it, and its values follow the requests."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.cluster import Cluster, SimReplica
from coordinator.keys import pool_slug
from gateway.ops.local.ports import free_ports
from tests.api.stage import Stage, chat_body, running_gateway, text, user
from tests.forked import constants
from tests.polling import wait_until

CHAT = "/v1/chat/completions"


def test_names_follow_the_conventions(stage: Stage) -> None:
    stage.chat(text(100))
    answer = stage.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    for name, family in families.items():
        assert re.fullmatch(r"kvgate_[a-z_]+", name)
        assert family.documentation.endswith("."), name
        assert family.type in ("counter", "gauge", "histogram")
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_tokens")), name
        if family.type == "counter":
            assert {sample.name for sample in family.samples} <= {f"{name}_total", f"{name}_created"}
    wanted = ["requests", "requests_in_flight", "time_to_first_token_seconds", "request_duration_seconds"]
    wanted += ["placement_seconds", "decisions", "prompt_tokens", "cached_tokens", "predicted_cached_tokens"]
    wanted += ["prediction_error_tokens", "retries", "broken_streams", "client_disconnects", "store_up"]
    wanted += ["breaker_open", "replica_ready", "replica_active_requests", "replica_exact", "replica_info"]
    wanted += [f"engine_{name}" for name in ("running_requests", "waiting_requests", "kv_cache_usage_ratio")]
    wanted += ["engine_prefix_cache_queries_tokens", "engine_prefix_cache_hits_tokens"]
    wanted += ["engine_event_delay_seconds", "engine_key_transitions", "wrong_predictions", "residency_doubts"]
    assert [name for name in wanted if f"kvgate_{name}" not in families] == []


def test_requests_are_counted_by_path_and_status(stage: Stage) -> None:
    def counts() -> dict[str, float]:
        name = "kvgate_requests_total"
        return {
            "chat": stage.sample(name, path=CHAT, status="200"),
            "bad": stage.sample(name, path=CHAT, status="400"),
            "unknown": stage.sample(name, path="other", status="404"),
            "durations": stage.sample("kvgate_request_duration_seconds_count", path=CHAT),
        }

    before = counts()
    stage.chat(text(50))
    stage.post(CHAT, {"model": "sim"})
    stage.post(CHAT, chat_body("x", max_tokens=-1))
    stage.post("/v1/any/path/a/client/chooses", {"model": "sim"})
    moved = {name: value + 2 if name == "bad" else value + 1 for name, value in before.items()}
    moved["durations"] = before["durations"] + 3
    wait_until(lambda: counts() == moved)
    assert stage.sample("kvgate_requests_in_flight") == 0


def test_requests_tokens_and_first_tokens_are_counted_by_model_and_tenant(guarded: Stage) -> None:
    def counts() -> list[float]:
        named = {"model": "sim", "tenant": "sales"}
        return [
            guarded.sample("kvgate_requests_total", path=CHAT, status="200", **named),
            guarded.sample("kvgate_tokens_total", kind="output", **named),
            guarded.sample("kvgate_tokens_total", kind="prompt", **named),
            guarded.sample("kvgate_time_to_first_token_seconds_count", path=CHAT, model="sim"),
            guarded.sample("kvgate_requests_total", path=CHAT, status="404", model="others", tenant="sales"),
            guarded.sample("kvgate_requests_total", path=CHAT, status="401", model="", tenant=""),
        ]

    before = counts()
    bob = {"authorization": "Bearer secret-bob"}
    answer = guarded.post(CHAT, chat_body(text(50), stream=True, max_tokens=7, ignore_eos=True), headers=bob)
    assert answer.status_code == 200
    prompt_tokens = guarded.post(CHAT, chat_body(text(50), max_tokens=7, ignore_eos=True), headers=bob).json()["usage"]
    guarded.post(CHAT, chat_body("x", model="a-name-of-the-clients-own"), headers=bob)
    guarded.post(CHAT, chat_body("x"), headers={"authorization": "Bearer wrong"})
    wait_until(
        lambda: (
            [now - then for now, then in zip(counts(), before, strict=True)]
            == [2, 14, 2 * prompt_tokens["prompt_tokens"], 1, 1, 1]
        )
    )


def test_first_tokens_are_timed_for_streams(stage: Stage) -> None:
    before = stage.sample("kvgate_time_to_first_token_seconds_count", path=CHAT)
    stage.chat(text(50))
    stage.post(CHAT, chat_body(text(50), stream=True))
    wait_until(lambda: stage.sample("kvgate_time_to_first_token_seconds_count", path=CHAT) == before + 1)


def test_decisions_are_counted_by_policy_kind_and_state(stage: Stage) -> None:
    def count(**labels: str) -> float:
        return stage.sample("kvgate_decisions_total", **labels)

    cold, hits = count(why="cold", policy="prefix_kv_aware"), count(why="hit", state="exact")
    rounds, placements = count(policy="round_robin"), stage.sample("kvgate_placement_seconds_count")
    context = text()
    stage.chat(context)
    stage.chat(context)
    stage.chat(text(50), headers={"x-kvgate-policy": "round_robin"})
    assert count(why="cold", policy="prefix_kv_aware") == cold + 1
    assert count(why="hit", state="exact") == hits + 1
    assert count(policy="round_robin") == rounds + 1
    assert stage.sample("kvgate_placement_seconds_count") == placements + 3


def test_without_an_agent_decisions_are_counted_as_degraded(unfollowed: Stage) -> None:
    before = unfollowed.sample("kvgate_decisions_total", why="cold", state="degraded")
    unfollowed.chat(text())
    assert unfollowed.sample("kvgate_decisions_total", why="cold", state="degraded") == before + 1
    assert unfollowed.sample("kvgate_decisions_total", state="exact") == 0
    assert unfollowed.sample("kvgate_replica_exact") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_counted_as_the_engines_report_them(stage: Stage, stream: bool) -> None:
    context = text(6000)
    body = chat_body(context, stream=stream)
    first = stage.chat(context)  # its usage has the prompt's tokens

    def counts() -> list[float]:
        names = ("prompt_tokens", "cached_tokens", "predicted_cached_tokens")
        return [stage.sample(f"kvgate_{name}_total", replica=first.replica) for name in names]

    before = wait_until(counts)
    answer = stage.post(CHAT, body)

    def all_moved() -> list[float] | None:
        moved = [after - earlier for after, earlier in zip(counts(), before, strict=True)]
        return moved if all(moved) else None

    prompt, cached, predicted = wait_until(all_moved)
    assert prompt == first.prompt_tokens
    assert 0 < prompt - cached <= 32
    assert predicted == int(answer.headers["x-kvgate-matched-tokens"])


def test_retries_are_counted_by_reason(stage: Stage) -> None:
    before = stage.sample("kvgate_retries_total", reason="status_503")
    with stage.failing("error", status=503):
        assert stage.post(CHAT, chat_body(text(50))).status_code == 503
    assert stage.sample("kvgate_retries_total", reason="status_503") == before + 2  # of three attempts, two are retries
    assert stage.sample("kvgate_retries_withheld_total") == 0


def test_the_fleet_is_shown(stage: Stage, open_cluster: Cluster) -> None:
    for replica in ("r0", "r1", "r2"):
        assert stage.sample("kvgate_replica_ready", replica=replica) == 1
        assert wait_until(lambda one=replica: stage.sample("kvgate_breaker_open", replica=one) == 0)
        assert stage.sample("kvgate_replica_exact", replica=replica) == 1
        assert stage.sample("kvgate_replica_info", replica=replica, pool=open_cluster.pool, role="both") == 1
    assert stage.sample("kvgate_store_up") == 1
    assert stage.sample("kvgate_store_connections_total") >= 1


def test_of_a_pool_that_a_replica_has_left_nothing_stays(open_cluster: Cluster, tmp_path: Path) -> None:
    def started(model: str) -> SimReplica:
        sim = SimReplica("moved", port, ("--speed", "0", "--model", model), tmp_path / "moved.log")
        sim.start()
        return sim

    def pools() -> set[str]:
        text = httpx.get(f"{url}/metrics", trust_env=False, verify=False).text
        families = text_string_to_metric_families(text)
        found = (family.samples for family in families if family.name == "kvgate_replica_info")
        return {sample.labels["pool"] for samples in found for sample in samples}

    port = free_ports(1)[0]
    sim = started("org/before")
    try:
        fast = constants({"gateway.replicas.health_checks.INTERVAL_S": 0.2})
        with fast, running_gateway(tmp_path, open_cluster.redis_url, [sim], {}) as url:
            wait_until(lambda: pools() == {pool_slug("org/before")})
            sim.kill()
            sim = started("org/after")
            wait_until(lambda: pools() == {pool_slug("org/after")})
    finally:
        sim.kill()


def test_what_engines_tell_is_shown(stage: Stage) -> None:
    """All gateways show the figures of a replica's agent."""

    def transitions(replica: str) -> list[float]:
        return [stage.sample("kvgate_engine_key_transitions", gateway, replica=replica) for gateway in (0, 1)]

    before = {sim.id: transitions(sim.id) for sim in stage.sims}
    context = text()
    replica = stage.chat(context).replica
    stage.until_resident(chat_body(context))
    wait_until(lambda: all(now > then for now, then in zip(transitions(replica), before[replica], strict=True)))
    for gateway in (0, 1):
        assert stage.sample("kvgate_engine_prefix_cache_queries_tokens", gateway, replica=replica) > 0
        assert 0 < stage.sample("kvgate_engine_event_delay_seconds", gateway, replica=replica) < 10
        assert stage.sample("kvgate_engine_running_requests", gateway, replica=replica) >= 0
        assert 0 <= stage.sample("kvgate_engine_kv_cache_usage_ratio", gateway, replica=replica) <= 1


def test_a_client_chooses_no_labels(stage: Stage) -> None:
    for n in range(5):
        stage.get(f"/v1/made-up-{n}", headers={"x-request-id": "made-up"})
        stage.post(CHAT, chat_body("x", model=f"made-up-{n}"))
        stage.post(CHAT, {"model": "sim", "messages": user("made-up")}, headers={"x-kvgate-policy": "made-up"})
    assert "made-up" not in stage.get("/metrics").text
