"""Replicas share KV through Redis. They reuse each other's prompts, and no failure of Redis costs an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bench.vllm.replicas import BLOCK_TOKENS
from gateway.ops.local.processes import tail
from tests.lmcache.conftest import Stage
from tests.lmcache.stage import CHUNK_TOKENS, PREFIX, TTL_SECONDS, Answer
from tests.vllm.workload import text

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(600)]

MIB = 2**20
PROMPT_BYTES = 7500  # six chunks and a half: three rounds for two workers
BURST = 6
STALL_S = 2.0


def prompt(name: str) -> str:
    return text(name, PROMPT_BYTES)


def whole_chunks(answer: Answer) -> int:
    return answer.prompt_tokens // CHUNK_TOKENS


def computed(stage: Stage, name: str) -> tuple[Answer, set[bytes]]:
    """The first replica's answer to a new prompt, and the keys of the prompt's chunks once they are in Redis."""
    before = stage.chunks.keys()
    answer = stage.first.ask(prompt(name))
    assert answer.cached_tokens < CHUNK_TOKENS
    assert whole_chunks(answer) >= 3
    return answer, stage.chunks.new_since(before, whole_chunks(answer))


def test_a_replica_serves_from_redis_what_another_has_computed(stage: Stage) -> None:
    computed_there, keys = computed(stage, "a shared prompt")
    served, plain = stage.second.ask(prompt("a shared prompt")), stage.alone.ask(prompt("a shared prompt"))
    print(f"\nfirst {computed_there}\nsecond {served}\nalone {plain}")
    assert served.cached_tokens == whole_chunks(served) * CHUNK_TOKENS
    assert plain.cached_tokens < BLOCK_TOKENS
    assert computed_there.says_what(plain)
    assert served.says_what(plain)
    assert len(keys) == whole_chunks(served)


def test_the_agent_hears_an_engine_that_only_its_own_host_can_hear(stage: Stage) -> None:
    stage.alone.agent.start()
    try:
        record = told_of(stage, "alone")
        while (mode := record()[3]) == "none":
            pass
        before = int(record()[6])
        stage.alone.ask(prompt("something to tell of"))
        while int(record()[6]) <= before:
            pass
    finally:
        stage.alone.agent.kill()
    assert mode == "session"
    # In /proc/net/tcp, 0A is a listening socket, and addresses are in reverse byte order: 127.0.0.1 is 0100007F.
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = dict(reversed(local.split(":")) for _, local, _, state, *_ in sockets if state == "0A")
    endpoints = [urlsplit(each) for each in stage.alone.agent.argv if each.startswith("tcp://")]
    assert [listening[f"{endpoint.port:04X}"] for endpoint in endpoints] == ["0100007F"] * 2


def told_of(stage: Stage, replica: str, within_s: float = 30) -> Callable[[], list[str]]:
    """A function that reads the agent's record of this replica. It waits for the record, and fails after `within_s`."""
    deadline = time.monotonic() + within_s

    def record() -> list[str]:
        while time.monotonic() < deadline:
            for key in stage.chunks.client.scan_iter("kvgate:*:agents"):
                if told := stage.chunks.client.hget(key, replica):
                    return told.decode().split()
        raise AssertionError(f"nothing of {replica}'s agent; its log ends with\n{tail(stage.alone.agent.log)}")

    return record


def test_every_chunk_in_redis_has_a_ttl_and_1_to_4_mib_and_nothing_else_has(stage: Stage) -> None:
    computed(stage, "a prompt to look at")
    assert stage.chunks.keys()
    for key in stage.chunks.client.scan_iter("*"):
        size, ttl = stage.chunks.client.memory_usage(key), stage.chunks.client.ttl(key)
        if key.startswith(PREFIX.encode() + b"@"):
            assert 0 < ttl <= TTL_SECONDS
            assert MIB <= stage.chunks.client.strlen(key) <= 4 * MIB
        else:
            assert key.startswith(b"kvgate:")
            assert (ttl, size < MIB) == (-1, True)


def test_a_chunk_that_is_gone_is_computed_again_and_so_is_what_follows_it(stage: Stage) -> None:
    answer, keys = computed(stage, "a prompt with a gap")
    # A chunk's name does not tell its position. So the test removes each in turn, and restores all from a copy.
    values = {key: stage.chunks.client.get(key) for key in keys}
    plain = stage.alone.ask(prompt("a prompt with a gap"))
    found = set()
    for gone in keys:
        stage.chunks.client.delete(gone)
        stage.second.forget()
        stage.second.forget_cpu()
        served = stage.second.ask(prompt("a prompt with a gap"))
        assert served.says_what(plain)
        assert served.seconds < answer.seconds + STALL_S
        found.add(served.cached_tokens)
        for key, value in values.items():
            stage.chunks.client.set(key, value, ex=TTL_SECONDS)
    print(f"\ncached tokens with one chunk gone: {sorted(found)}")
    assert found == {chunk * CHUNK_TOKENS for chunk in range(len(keys))}


def test_redis_restarted_empty_costs_no_answer_and_sharing_goes_on(stage: Stage) -> None:
    held, _ = computed(stage, "before the restart")
    stage.redis.restart_empty()
    again = stage.first.ask(prompt("before the restart"))
    assert again.cached_tokens > 0
    _, keys = computed(stage, "after the restart")
    assert stage.chunks.keys() == keys  # LMCache did not store again the chunks that the replica still held
    served = stage.second.ask(prompt("after the restart"))
    assert served.cached_tokens == whole_chunks(served) * CHUNK_TOKENS
    assert served.says_what(stage.alone.ask(prompt("after the restart")))
    for answer in (held, again, stage.second.ask(prompt("before the restart"))):
        assert answer.says_what(stage.alone.ask(prompt("before the restart")))


def test_a_redis_that_does_not_answer_holds_a_cold_request_up_for_2_s_at_most(stage: Stage) -> None:
    usual = max(computed(stage, f"while it answers, {number}")[0].seconds for number in range(3))
    stage.redis.pause()
    try:
        stopped = [stage.first.ask(prompt(f"while it is stopped, {number}")) for number in range(4)]
    finally:
        stage.redis.resume()
    print(f"\nusual {usual:.2f} s, while Redis is stopped {[round(each.seconds, 2) for each in stopped]} s")
    assert all(each.seconds < usual + STALL_S for each in stopped)
    assert stopped[0].says_what(stage.alone.ask(prompt("while it is stopped, 0")))
    computed(stage, "when it answers again")
    assert stage.second.ask(prompt("when it answers again")).cached_tokens > 0


def test_many_cold_requests_at_once_wait_for_a_redis_that_does_not_answer_but_none_fails(stage: Stage) -> None:
    """The limit applies to one request. LMCache's workers ask Redis for each request, so their waits add up."""
    prompts = [prompt(f"one of many, {number}") for number in range(2 * BURST)]
    with ThreadPoolExecutor(BURST) as pool:
        usual = list(pool.map(stage.first.ask, prompts[:BURST]))
        stage.redis.pause()
        try:
            stopped = list(pool.map(stage.first.ask, prompts[BURST:]))
        finally:
            stage.redis.resume()
    for what, answers in (("usual", usual), ("while Redis is stopped", stopped)):
        print(f"\n{BURST} at once, {what}: {sorted(round(each.seconds, 1) for each in answers)} s", flush=True)
    assert stopped[-1].says_what(stage.alone.ask(prompts[-1]))
