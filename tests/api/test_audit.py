"""The gateway learns from usage: which prompts a replica has evicted, and how many tokens a prompt has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from bench.cluster import Cluster
from coordinator.keys import PoolKeys
from tests.api.stage import Stage, chat_body, running_agent, running_gateway, running_sims, text
from tests.polling import wait_until


@pytest.fixture
def alone(open_cluster: Cluster, http: httpx.Client, tmp_path: Path) -> Iterator[Stage]:
    """One gateway and one replica without events, in their own pool."""
    arguments = {"audited": ("--model", "org/audited", "--served-name", "sim", "--no-events")}
    with (
        running_sims(tmp_path, arguments) as sims,
        running_gateway(tmp_path, open_cluster.redis_url, sims, {}) as url,
    ):
        yield Stage([url], sims, http)


class Past:
    """Moves the store's times of one replica into the past."""

    def __init__(self, stage: Stage, redis_url: str) -> None:
        self._stage = stage
        self._client = redis.Redis.from_url(redis_url, decode_responses=True)
        self._replica = stage.sims[0].id
        self._keys = PoolKeys(stage.explain(chat_body("which pool?"))["pool"])

    def register(self, age_s: int) -> None:
        """Makes the replica older. None of its prompts can have been used before it registered."""
        record = str(wait_until(lambda: self._client.hget(self._keys.replicas, self._replica))).split(" ")
        record[3] = str(int(record[3]) - age_s * 1000)
        self._client.hset(self._keys.replicas, self._replica, " ".join(record))

    def use(self, prompt: str, age_s: int) -> None:
        """Makes the last use of a prompt older."""
        for link in self._stage.explain(chat_body(prompt))["chain"]:
            own = self._keys.own(link["key"])
            fields = str(self._client.hget(own, self._replica)).split(" ")
            fields[5] = str(int(fields[5]) - age_s * 1000)
            self._client.hset(own, self._replica, " ".join(fields))
            self._client.zadd(self._keys.held(self._replica), {link["key"]: int(fields[5])})


@pytest.fixture
def followed(open_cluster: Cluster, http: httpx.Client, tmp_path: Path) -> Iterator[Stage]:
    """One gateway and one replica with its agent, in their own pool."""
    arguments = {"doubted": ("--model", "org/doubted", "--served-name", "sim")}
    with (
        running_sims(tmp_path, arguments) as sims,
        running_gateway(tmp_path, open_cluster.redis_url, sims, {}) as url,
        running_agent(tmp_path, open_cluster.redis_url, sims[0]),
    ):
        stage = Stage([url], sims, http)
        wait_until(lambda: stage.exact() == ["doubted"])
        yield stage


def is_owned(stage: Stage, prompt: str) -> bool:
    return bool(stage.explain(chat_body(prompt))["chain"][-1]["owners"])


def test_a_miss_drops_what_the_replica_used_before_the_missed_prefix(alone: Stage, open_cluster: Cluster) -> None:
    past = Past(alone, open_cluster.redis_url)
    past.register(age_s=600)
    older, missed, newer = text(), text(), text()
    for prompt in (older, missed, newer):
        alone.chat(prompt)
    assert alone.chat(missed).cached_tokens > 900  # this replica reports cached tokens
    past.use(older, age_s=120)
    past.use(missed, age_s=60)
    assert is_owned(alone, older)

    alone.http.post(f"{alone.sims[0].url}/sim/reset_cache").raise_for_status()
    answer = alone.chat(missed)
    assert (answer.matched_tokens > 900, answer.cached_tokens) == (True, 0)
    wait_until(lambda: not is_owned(alone, older))
    assert is_owned(alone, missed)
    assert is_owned(alone, newer)


def test_a_miss_is_counted_with_its_cause(alone: Stage, open_cluster: Cluster) -> None:
    past = Past(alone, open_cluster.redis_url)
    past.register(age_s=600)
    early, late = text(), text()
    for prompt in (early, late):
        alone.chat(prompt)
        assert alone.chat(prompt).cached_tokens > 900
    past.use(early, age_s=60)
    alone.http.post(f"{alone.sims[0].url}/sim/reset_cache").raise_for_status()
    assert [alone.chat(prompt).cached_tokens for prompt in (early, late)] == [0, 0]
    for cause in ("evicted", "in_flight"):  # the prompt of so young a claim may still be computing
        wait_until(lambda one=cause: alone.sample("kvgate_wrong_predictions_total", replica="audited", cause=one) == 1)


def test_what_events_tell_of_is_dropped_without_a_miss(followed: Stage) -> None:
    prompt = text()
    followed.chat(prompt)
    followed.until_resident(chat_body(prompt))
    followed.http.post(f"{followed.sims[0].url}/reset_prefix_cache").raise_for_status()
    followed.chat(text())  # vLLM publishes a reset with its next step
    wait_until(lambda: not is_owned(followed, prompt))
    answer = followed.chat(prompt)
    assert (answer.matched_tokens, answer.cached_tokens) == (0, 0)
    assert followed.sample("kvgate_wrong_predictions_total") == 0


def test_an_engine_that_forgot_without_saying_so_is_found_out_and_believed_no_more(followed: Stage) -> None:
    *forgotten, other = [text() for _ in range(4)]
    for prompt in (*forgotten, other):
        answer = followed.chat(prompt)
        followed.until_resident(chat_body(prompt), prompt_tokens=answer.prompt_tokens)
        assert followed.chat(prompt).cached_tokens > 900  # this replica reports cached tokens
    followed.sims[0].fail("amnesia")
    for prompt in forgotten:
        assert is_owned(followed, other)
        answer = followed.chat(prompt)
        assert (answer.matched_tokens > 900, answer.cached_tokens) == (True, 0)
    wait_until(lambda: not is_owned(followed, other))
    assert followed.sample("kvgate_residency_doubts_total", replica="doubted") == 3
    assert followed.sample("kvgate_wrong_predictions_total", replica="doubted", cause="evicted") == 3
    followed.chat(other)
    followed.until_resident(chat_body(other))


def test_of_a_hybrid_engine_misses_decide_where_events_cannot(
    open_cluster: Cluster, http: httpx.Client, tmp_path: Path
) -> None:
    kinds = ("--attention", "full_attention", "--attention", "sliding_window")
    arguments = {"mixed": ("--model", "org/mixed", "--served-name", "sim", *kinds)}
    with (
        running_sims(tmp_path, arguments) as sims,
        running_gateway(tmp_path, open_cluster.redis_url, sims, {}) as url,
        running_agent(tmp_path, open_cluster.redis_url, sims[0]),
    ):
        stage, prompt = Stage([url], sims, http), text()
        wait_until(lambda: stage.exact() == ["mixed"])
        stage.chat(prompt)
        stage.until_resident(chat_body(prompt))
        assert stage.chat(prompt).cached_tokens > 900
        wait_until(lambda: stage.exact() == [])  # it has published blocks of another kind
        sims[0].fail("no_hits", count=-1)
        wait_until(lambda: stage.chat(prompt).matched_tokens == 0)
        sims[0].fail("none")
        wait_until(lambda: stage.chat(prompt).matched_tokens > 900)
        assert stage.sample("kvgate_residency_doubts_total", replica="mixed") == 0
