"""Readers of the store accept any bytes: they leave out unreadable records, and raise only the expected errors."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from coordinator.agent.agent_store import Measured, _agent_of, _binding, _measured, _resident
from coordinator.known_pools import pool_names
from coordinator.registry import AgentRecord, ReplicaFigures, ReplicaRecord, parse_pool_state, readable, surveyed_state

RECORD = ReplicaRecord("r0", "life1", "ready", 5, 1, "http://r0", 2)
WORDS = st.sampled_from(
    (
        *(b"", b"life1", b"r0", b"ready", b"claim", b"resident", b"gpu", b"nan", b"inf", b"-1", b"1e9", b"0x5"),
        *(b"9" * 5000, b"7", b"\xff", b"\x00", b"\xc2\xb2", b"{}", b"[1]", b'{"text_bytes":[1]}', b'{"a":"nan"}'),
        *(b'{"a":[]}', b"null"),
    )
)
TEXTS = st.one_of(st.binary(max_size=20), st.lists(WORDS, max_size=9).map(b" ".join))
NAMES = st.one_of(TEXTS, st.sampled_from([b"r0", b"tick", b"jumped", b"worker"]))
HASHES = st.lists(st.tuples(NAMES, TEXTS), max_size=4).map(lambda pairs: [text for pair in pairs for text in pair])


@given(st.lists(TEXTS, min_size=3, max_size=3), st.lists(TEXTS, max_size=2))
def test_a_heartbeat_brings_what_can_be_read(texts: list[bytes], expired: list[bytes]) -> None:
    worker, facts, record = texts
    lines = [b"good", b"- 0\n" + RECORD.text.encode(), b"facts", facts, b"record", b"- 1\n" + record]
    reply = [b"ok", expired, worker, 5, record, 0, b"1-1", 1, lines, 2, 0]
    fleet = parse_pool_state(reply)
    assert fleet.replicas["good"].url == "http://r0"
    assert all(isinstance(fleet.is_exact(name), bool) for name in fleet.replicas)
    now = parse_pool_state([*reply[:7], 0, [b"good", b"- 0\ngarbage"], 0, 1], fleet)
    assert now.replicas == fleet.replicas, "one that cannot be read is as it was"
    assert (fleet.gateways, now.gateways) == (2, 1)


@given(st.lists(HASHES, min_size=6, max_size=6))
def test_a_survey_brings_what_can_be_read(hashes: list[list[bytes]]) -> None:
    replicas, breakers, active, agents, engines, leases = hashes
    state = surveyed_state(5, [*replicas, b"good", RECORD.text.encode()], breakers, agents, leases)
    assert state.replicas["good"].url == "http://r0"
    assert all(isinstance(state.is_exact(name), bool) for name in state.replicas)
    assert ReplicaFigures.parse([*active, b"good", b"1"], engines).active["good"] == 1


@given(TEXTS)
def test_an_agent_reads_what_was_written_by_its_like_and_nothing_else(text: bytes) -> None:
    assert isinstance(_agent_of(text), AgentRecord | None)
    assert isinstance(_measured(text), Measured | None)
    assert _binding("tip", text) is None or len(text.split(b" ")) > 5
    assert _resident("key", readable(text), RECORD) is None or text.startswith(b"life1 resident ")
    assert all(name in readable(text) for name in pool_names([text]))


@given(st.recursive(st.none() | st.floats() | st.integers() | st.text(max_size=3), lambda each: st.lists(each)))
def test_what_was_measured_is_a_length_or_nothing(value: Any) -> None:
    for said in (value, {"tip": value, "prompt_tokens": value}):
        try:
            text = orjson.dumps(said)
        except orjson.JSONEncodeError:
            continue
        told = _measured(text)
        assert told is None or 0 <= told.prompt_tokens < 2**32


def test_what_an_agent_and_a_gateway_wrote_is_read() -> None:
    assert AgentRecord.parse("agent0 life1 5 session 0 1 -1 more") == AgentRecord(
        "agent0", "life1", 5, "session", is_relearning=False, waiting=1, seq=-1
    )
    assert ReplicaRecord.parse("r0", RECORD.text) == RECORD
