"""Logs contain events, never content: no log may contain the canaries that fill every field a client can set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

from bench.cluster import Cluster
from tests.api.stage import Stage, chat_body, user
from tests.gateway.simulator.pictures import data_url
from tests.polling import wait_until

CANARY = "canary-4f1d"


def send_canaries(stage: Stage) -> None:
    """Sends requests that succeed, fail, break off or are invalid. Every field that a client can set has a canary."""
    headers = {"authorization": f"Bearer {CANARY}-key", "x-session-id": f"{CANARY}-session", "cookie": f"{CANARY}=1"}
    image = {"type": "image_url", "image_url": {"url": f"https://{CANARY}.example/a.png?token={CANARY}"}}
    bodies = [
        chat_body(f"{CANARY} prompt", user=f"{CANARY}-user", cache_salt=f"{CANARY}-salt"),
        chat_body([{"type": "text", "text": CANARY}, image], stream=True),
        chat_body([{"type": "image_url", "image_url": {"url": data_url(1) + CANARY}}]),
        chat_body(CANARY, max_tokens=-1),
        chat_body(CANARY, model=f"{CANARY}-model"),
        {"model": "sim", "messages": {CANARY: CANARY}},
        {"model": "sim", "messages": user([{"type": CANARY, CANARY: CANARY}])},
    ]
    for body in bodies:
        stage.post("/v1/chat/completions", body, headers=headers)
    stage.post("/v1/chat/completions", content=f'{{"model":"sim","{CANARY}'.encode(), headers=headers)
    stage.post(f"/v1/{CANARY}?{CANARY}=1", {"model": "sim", "input": CANARY}, headers=headers)
    stage.get(f"/{CANARY}", headers=headers)
    stage.get(f"/v1/models/{CANARY}", headers=headers)
    stage.post("/v1/route/explain", bodies[0], headers=headers)
    for mode in ("error", "reset", "cut", "truncate"):
        for stream in (False, True):
            with stage.failing(mode, after_tokens=2):
                stage.post("/v1/chat/completions", chat_body(CANARY, stream=stream), headers=headers)


def logs_of(cluster: Cluster) -> list[Path]:
    return sorted(cluster.state_dir.glob("logs/gw*.log"))


def test_no_log_holds_what_a_request_carried(stage: Stage, open_cluster: Cluster) -> None:
    send_canaries(stage)
    logs = logs_of(open_cluster)
    assert len(logs) == 2
    for log in logs:
        assert CANARY not in log.read_text()


def test_no_log_of_a_guarded_gateway_holds_a_key_or_secret(guarded: Stage, guarded_cluster: Cluster) -> None:
    for key in ("secret-alice", "secret-root", f"{CANARY}-unknown"):
        guarded.post("/v1/chat/completions", chat_body("x"), headers={"authorization": f"Bearer {key}"})
        guarded.get("/v1/models", headers={"x-api-key": key})
    for log in logs_of(guarded_cluster):
        text = log.read_text()
        assert text
        assert not [word for word in ("secret-", CANARY, "canary-cache-salt-secret") if word in text]


def access_line(cluster: Cluster, request_id: str) -> dict[str, Any]:
    """The line of a request in the access log of the first gateway."""

    def logged() -> list[dict[str, Any]]:
        lines = logs_of(cluster)[0].read_text().splitlines()
        return [json.loads(line) for line in lines if request_id in line]

    (line,) = wait_until(logged)
    return line


def test_the_access_log_has_a_line_with_the_same_fields_for_each_request(stage: Stage, open_cluster: Cluster) -> None:
    prompt = f"access {uuid4()} " * 200
    lines = {}
    for name, body in {
        "cold": chat_body(prompt),
        "first stream": chat_body(prompt, stream=True),  # nobody asks for its usage
        "stream": chat_body(prompt, stream=True),
        "wrong": {"model": "sim"},
    }.items():
        answer = stage.post("/v1/chat/completions", body)
        lines[name] = access_line(open_cluster, answer.headers["x-request-id"])
    cold, _, stream, wrong = lines.values()
    assert cold.keys() == stream.keys() == wrong.keys()
    for line, status in ((cold, 200), (stream, 200), (wrong, 400)):
        assert (line["status"], line["method"], line["path"]) == (status, "POST", "/v1/chat/completions")
        assert line["gateway"] == "gw0"
        assert line["duration_ms"] > 0
        assert line["model"] == line["served_model"] == (None if line is wrong else "sim")
    assert (cold["why"], cold["first_byte_ms"], cold["stream"]) == ("cold", None, False)
    assert not cold["cached_tokens"]  # not known of an engine that has never told some: vLLM leaves out a 0
    assert (stream["why"], stream["replica"], stream["stream"]) == ("hit", cold["replica"], True)
    assert stream["cached_tokens"] >= stream["matched_tokens"] > 0
    assert stream["prompt_tokens"] == cold["prompt_tokens"] > stream["cached_tokens"]
    assert 0 < stream["first_byte_ms"] <= stream["duration_ms"]
    assert stream["output_tokens"] > 0
    assert (wrong["code"], wrong["attempts"], wrong["replica"]) == ("invalid_value", 0, None)


def test_the_access_log_names_the_key_and_its_tenant(guarded: Stage, guarded_cluster: Cluster) -> None:
    headers = {"authorization": "Bearer secret-alice"}
    answer = guarded.post("/v1/chat/completions", chat_body("x"), headers=headers)
    line = access_line(guarded_cluster, answer.headers["x-request-id"])
    assert (line["tenant"], line["key"]) == ("research", "alice")
