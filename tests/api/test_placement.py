"""Requests go to the replica that has their prefix, through any gateway, or where a policy sends them."""

from __future__ import annotations

from collections import Counter

import pytest
import redis

from bench.cluster import Cluster
from gateway.settings.policies import POLICIES
from tests.api.stage import Stage, chat_body, error_of, text
from tests.polling import wait_until


def test_prompts_that_share_nothing_are_spread_over_the_replicas(stage: Stage) -> None:
    # Cold prompts go to the replica that owns the fewest tokens. These are longer than the prompts of other tests, so
    # that one replica's older tokens do not decide.
    places = Counter(stage.chat(text(16_000), gateway=n % 2).replica for n in range(18))
    assert set(places) == {"r0", "r1", "r2"}
    assert max(places.values()) <= 10


def test_different_tools_or_salts_or_adapters_share_no_prefix(stage: Stage) -> None:
    context = text()
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    stage.chat(context)
    for fields in ({"tools": [tool]}, {"cache_salt": "pepper"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        other = stage.chat(context, **fields)
        assert other.matched_tokens == 0, fields
        assert other.cached_tokens == 0, fields
    assert stage.chat(context).cached_tokens > 900


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_chosen_by_header_where_the_configuration_allows_it(stage: Stage, policy: str) -> None:
    answer = stage.chat(text(), headers={"x-kvgate-policy": policy})
    assert f"policy={policy};" in answer.decision


def test_consistent_hashing_sends_a_prompt_to_one_replica_and_prompts_to_all(stage: Stage) -> None:
    header = {"x-kvgate-policy": "consistent_hash"}
    same = text()
    assert len({stage.chat(same, gateway=n % 2, headers=header).replica for n in range(6)}) == 1
    assert len({stage.chat(text(500), headers=header).replica for _ in range(20)}) == 3


def test_an_unknown_policy_is_refused_by_name(stage: Stage) -> None:
    answer = stage.post("/v1/chat/completions", chat_body("x"), headers={"x-kvgate-policy": "fastest"})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "x-kvgate-policy"


def test_the_policy_header_is_forbidden_unless_the_configuration_allows_it(mixed: Stage) -> None:
    answer = mixed.post("/v1/chat/completions", chat_body("x", model="b"), headers={"x-kvgate-policy": "random"})
    assert answer.status_code == 403
    assert error_of(answer)["code"] == "policy_header_not_allowed"


def test_load_is_given_back_when_requests_end(stage: Stage) -> None:
    for n in range(6):
        stage.chat(text(200), gateway=n % 2)
    probe = chat_body(text(200))

    def is_idle() -> bool:
        replicas = stage.explain(probe)["replicas"]
        return [(one["active"], one["backlog_tokens"]) for one in replicas] == [(0, 0)] * 3

    wait_until(is_idle)


def test_an_address_written_to_the_store_by_somebody_else_gets_no_request(stage: Stage, open_cluster: Cluster) -> None:
    retries = stage.sample("kvgate_retries_total")
    with redis.Redis.from_url(open_cluster.redis_url, decode_responses=True, protocol=2) as client:
        key = f"kvgate:{{{open_cluster.pool}}}:replicas"
        for _ in range(4):
            for replica, record in client.hgetall(key).items():
                client.hset(key, replica, record.rsplit(" ", 1)[0] + " http://127.0.0.1:1")
            assert stage.chat(text(50)).response.status_code == 200
    assert stage.sample("kvgate_retries_total") == retries
