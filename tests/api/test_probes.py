"""The probes of orchestrators and load balancers: is the gateway alive, can it serve, and if not, why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.cluster import Cluster
from gateway import __version__
from gateway.ops.local.ports import free_ports
from tests.api.stage import Stage, chat_body, error_of, running_gateway, running_sims
from tests.polling import wait_until
from tests.redis_server import running_redis


def test_the_process_is_healthy_and_knows_its_version(stage: Stage) -> None:
    assert stage.get("/health").json() == {"status": "ok"}
    assert stage.get("/version").json()["version"] == __version__


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/version", "/metrics", "/openapi.json", "/v1/models", "/v1/models/sim"]
)
def test_what_answers_get_answers_head_without_a_body(stage: Stage, path: str) -> None:
    answer = stage.send("HEAD", path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == stage.get(path).headers["content-type"]
    assert int(answer.headers["content-length"]) > 0


def test_ready_says_with_whom(stage: Stage) -> None:
    answer = stage.get("/ready", gateway=1)
    assert answer.status_code == 200
    body = answer.json()
    assert re.fullmatch(r"gw1\.[0-9a-f]{6}", body.pop("gateway"))
    replicas = ["r0", "r1", "r2"]
    assert body == {
        "ready": True,
        "store": "up",
        "replicas": replicas,
        "exact": replicas,
        "pools": ["kvgate-sim-vlm-63845a77"],
        "reasons": [],
    }


def test_ready_says_which_replicas_no_agent_follows(unfollowed: Stage) -> None:
    body = unfollowed.get("/ready").json()
    assert (body["ready"], body["replicas"], body["exact"]) == (True, ["u0", "u1"], [])


def test_without_a_replica_it_is_not_ready_and_says_why(stage: Stage, open_cluster: Cluster, tmp_path: Path) -> None:
    replicas = [{"id": "gone", "url": f"http://127.0.0.1:{free_ports(1)[0]}"}]
    with running_gateway(tmp_path, open_cluster.redis_url, [], {"replicas": replicas}, wait=False) as url:
        wait_until(lambda: stage.http.get(url + "/ready").json()["store"] == "up")
        wait_until(lambda: "refused" in str(stage.http.get(url + "/ready").json()["reasons"]))
        answer = stage.http.get(url + "/ready")
        assert answer.status_code == 503
        body = answer.json()
        assert (body["ready"], body["replicas"]) == (False, [])
        assert len(body["reasons"]) == 1
        assert body["reasons"][0].startswith("replica gone: refused")
        assert stage.http.get(url + "/health").status_code == 200
        assert stage.http.get(url + "/v1/models").json() == {"object": "list", "data": []}
        refused = stage.http.post(url + "/v1/chat/completions", json=chat_body("x"))
        assert refused.status_code == 503
        assert error_of(refused)["code"] == "no_replica"
        assert int(refused.headers["retry-after"]) >= 1


def test_without_any_configured_it_says_so(stage: Stage, open_cluster: Cluster, tmp_path: Path) -> None:
    with running_gateway(tmp_path, open_cluster.redis_url, [], {}, wait=False) as url:
        assert stage.http.get(url + "/ready").json()["reasons"] == [
            "no replica is known: configure `replicas` or `discovery`"
        ]


def test_who_watches_redis_names_what_does_not_fit_and_says_it_in_words(stage: Stage, tmp_path: Path) -> None:
    with (
        running_redis(options=("--maxmemory-policy", "allkeys-lru")) as server,
        running_gateway(tmp_path, server.url, [], {}, wait=False) as url,
    ):
        wait_until(lambda: "store_conditions" in stage.http.get(url + "/ready").json())
        body = stage.http.get(url + "/ready").json()
    told = dict(zip(body["store_conditions"], body["store_warnings"], strict=True))
    assert "allkeys-lru" in told["policy_unfit"]


def test_a_replica_that_comes_up_later_makes_it_ready(stage: Stage, open_cluster: Cluster, tmp_path: Path) -> None:
    with running_sims(tmp_path, {"late": ("--model", "org/late", "--served-name", "late")}) as (sim,):
        sim.kill()
        with running_gateway(tmp_path, open_cluster.redis_url, [sim], {}, wait=False) as url:
            assert stage.http.get(url + "/ready").status_code == 503
            sim.start()
            wait_until(lambda: stage.http.get(url + "/ready").status_code == 200)
            assert stage.http.post(url + "/v1/chat/completions", json=chat_body("x", model="late")).status_code == 200
