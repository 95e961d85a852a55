"""Whoever watches sees the requests of all gateways as they end, and costs nothing when gone."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
import redis

from bench.cluster import Cluster
from coordinator.keys import decisions_key
from gateway.control.decisions import AT_ONCE
from gateway.ops.cli.watch import parsed_events
from tests.api.stage import Stage, chat_body, fresh
from tests.polling import wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture
def store(open_cluster: Cluster) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(open_cluster.redis_url, decode_responses=True) as client:
        yield client


class Seen:
    """The events that a watcher has got so far."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    @property
    def records(self) -> list[dict[str, Any]]:
        return [data for name, data in self.events if name == ""]

    def ids(self) -> set[str]:
        return {str(record["request_id"]) for record in self.records}

    def read(self, response: httpx.Response) -> None:
        with suppress(httpx.HTTPError):  # the test has closed it
            for event in parsed_events(response.iter_lines()):
                self.events.append(event)


@contextmanager
def watching(stage: Stage, gateway: int = 0, **wanted: str) -> Iterator[Seen]:
    """Somebody who watches one gateway."""
    seen, url = Seen(), stage.gateways[gateway] + "/v1/decisions"
    with httpx.Client(timeout=30) as http, http.stream("GET", url, params=wanted, headers=stage.headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        reader = threading.Thread(target=seen.read, args=(response,))
        reader.start()
        yield seen
        response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        reader.join()


def ask(stage: Stage, request_id: str, gateway: int, **fields: Any) -> httpx.Response:
    return stage.post(CHAT, chat_body(fresh(), **fields), gateway, headers={"x-request-id": request_id})


class Asking:
    """Sends requests through a gateway, which tells of them soon after somebody began to watch."""

    def __init__(self, stage: Stage, gateway: int) -> None:
        self._stage, self._gateway = stage, gateway
        self._ids = set[str]()

    def shown(self, seen: Seen) -> list[dict[str, Any]]:
        """Sends one more. The records of these requests that have come: those of others prove nothing."""
        self._ids.add(request_id := fresh("seen"))
        ask(self._stage, request_id, self._gateway)
        return [record for record in seen.records if record["request_id"] in self._ids]


def test_it_shows_the_requests_of_all_gateways_and_ends_without_a_trace(stage: Stage, store: redis.Redis) -> None:
    key = decisions_key()
    wait_until(lambda: not store.exists(key), within_s=10)
    with watching(stage) as seen:
        for gateway in (0, 1):
            asking = Asking(stage, gateway)
            record, *_ = wait_until(lambda asking=asking: asking.shown(seen))
            assert (record["gateway"], record["status"], record["path"]) == (f"gw{gateway}", 200, CHAT)
            assert (record["model"], record["why"]) == ("sim", "cold")
        asking = Asking(stage, 0)
        record, *_ = wait_until(lambda: [each for each in asking.shown(seen) if each["costs"]])
        costs = {each["replica"]: each["cost"] for each in record["costs"]}
        assert set(costs) <= {"r0", "r1", "r2"}
        assert costs[record["replica"]] == min(costs.values())
        assert store.exists(key)
    wait_until(lambda: not store.exists(key), within_s=10)


def test_it_shows_only_what_is_asked_for(stage: Stage) -> None:
    wanted = fresh("wanted")
    with watching(stage, 1, request_id=wanted) as seen:
        wait_until(lambda: ask(stage, fresh("other"), 0) and ask(stage, wanted, 0) and seen.records)
        assert seen.ids() == {wanted}


def test_what_is_too_much_is_counted(stage: Stage) -> None:
    with watching(stage) as seen:
        asking = Asking(stage, 0)
        wait_until(lambda: asking.shown(seen))
        before, many = len(seen.records), 4 * AT_ONCE
        for number in range(many):
            stage.post(CHAT, content=b"{", headers={"x-request-id": f"many-{number}"})
        wait_until(lambda: counted(seen) >= before + many)
        assert {name for name, _ in seen.events} <= {"", "dropped"}


def counted(seen: Seen) -> int:
    return len(seen.records) + sum(data for name, data in seen.events if name == "dropped")


def test_a_misspelt_selection_is_refused(stage: Stage) -> None:
    refused = stage.get("/v1/decisions?tenat=a")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tenat")


def test_it_is_for_admins(guarded: Stage) -> None:
    refused = guarded.get("/v1/decisions", headers={"authorization": "Bearer secret-alice"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")


def test_garbage_in_the_stream_is_passed_over(stage: Stage, store: redis.Redis) -> None:
    with watching(stage) as seen:
        asking = Asking(stage, 0)
        wait_until(lambda: asking.shown(seen))
        for fields in ({"r": "no json"}, {"r": '{"a":1}'}, {"d": "-5", "r": "[7]"}, {"x": "y"}):
            store.xadd(decisions_key(), fields)
        store.xadd(decisions_key(), {"r": json.dumps([{"request_id": "after", "gateway": "?"}])})
        wait_until(lambda: "after" in seen.ids())
        assert all(name == "" for name, _ in seen.events)


@contextmanager
def kvgate_watch(stage: Stage) -> Iterator[subprocess.Popen[str]]:
    """`kvgate watch` at the second gateway, which is gone afterwards."""
    words = [sys.executable, "-P", "-m", "gateway.ops.cli", "watch", "--gateway", stage.gateways[1]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_kvgate_watch_prints_a_line_for_each(stage: Stage) -> None:
    with kvgate_watch(stage) as process:
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
        reader.start()
        request_id = fresh("watched")
        wait_until(lambda: ask(stage, request_id, 0) and any(request_id in line for line in lines))
        process.send_signal(signal.SIGINT)
        reader.join()
        assert process.stderr is not None
        assert process.stderr.read().startswith("time  request id  gateway")
        assert process.wait() == 0
    line = next(line for line in lines if request_id in line)
    for part in ("gw0", "200", CHAT, "sim", "→ r", "waited 0"):
        assert part in line
