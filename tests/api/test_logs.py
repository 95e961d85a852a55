"""Logs contain events, never content: no log may contain the canaries that fill every field a client can set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("status", [200, 400])
def test_a_request_is_one_line_with_what_an_operator_needs(stage: Stage, open_cluster: Cluster, status: int) -> None:
    body = chat_body("hello") if status == 200 else {"model": "sim"}
    request_id = stage.post("/v1/chat/completions", body).headers["x-request-id"]

    def logged() -> list[dict[str, object]]:
        lines = logs_of(open_cluster)[0].read_text().splitlines()
        return [json.loads(line) for line in lines if request_id in line]

    (line,) = wait_until(logged)
    wanted = {"gateway", "event", "level", "timestamp", "request_id", "path", "status", "duration_ms"}
    assert wanted <= line.keys()
    assert (line["status"], line["path"], line["level"]) == (status, "/v1/chat/completions", "debug")
    assert bool(line["replica"]) == (status == 200)
    assert bool(line["code"]) == (status == 400)
