"""A cluster in which every measured event has happened, and a Prometheus with the repo's rules that scrapes it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.cluster import SimReplica, running_gateways, running_replicas
from bench.processes import running
from gateway.ops.local.ports import free_ports
from tests.api.stage import Stage, answers, chat_body, text
from tests.deploy.queries import RULES, Labels
from tests.forked import constants
from tests.polling import wait_until

# Gateways also look for replicas here and fail: no DNS server answers there.
NOWHERE = {"dns": {"names": ["replicas.test"], "port": 8000, "server": "127.0.0.1:9"}}
ROLES = {"r0": "role=decode", "r1": "role=decode", "r2": "role=decode", "r3": "role=prefill"}
LONG_BYTES = 16_000
EACH, MAX_WAITING = 4, 2
"""Requests that a replica serves at once, and requests that may wait."""
CONFIG = {
    "redis": {"budget_ms": 500},
    "health": {"timeout_s": 5},
    "discovery": NOWHERE,
    "models": [{"name": "sim", "backends": [{"name": "v1", "match": {"model": "sim"}}]}],
    "policy": {"max_active_requests": EACH},
    "pairs": {"min_tokens": LONG_BYTES // 8},
    "queue": {"max_waiting": MAX_WAITING, "max_waiting_per_tenant": MAX_WAITING},
    "tenants": [{"name": "-", "budgets": [{"per": "month", "tokens": 10**12}]}],
}


@dataclass(frozen=True)
class Monitored:
    """The monitored cluster, with the URLs of its processes by Prometheus job."""

    targets: dict[str, list[str]]
    stage: Stage
    """Its replicas are those that decode."""
    prefill: SimReplica

    def exposed(self) -> dict[str, Labels]:
        """The labels of each metric's series, by the metric's name. A metric without series is missing."""
        found: dict[str, Labels] = {}
        for url in (url for urls in self.targets.values() for url in urls):
            text = httpx.get(f"{url}/metrics", trust_env=False, verify=False).text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found[sample.name] = found.get(sample.name, frozenset()) | set(sample.labels)
        return found


@contextmanager
def running_monitored(folder: Path) -> Iterator[Monitored]:
    """Two gateways, three simulated replicas that decode, and one that computes long prompts for them."""
    with ExitStack() as stack:
        stack.enter_context(constants({"coordinator.breaker.FAILURES": 1000}))
        replicas = stack.enter_context(running_replicas(folder, len(ROLES), ("--speed", "0", "--nixl")))
        urls = {replica.id: replica.url for replica in replicas}
        cluster = stack.enter_context(running_gateways(urls, gateways=2, config=CONFIG, beside=ROLES))
        targets = {"kvgate": cluster.gateway_urls, "vllm": list(urls.values())}
        http = stack.enter_context(httpx.Client(timeout=20, trust_env=False, verify=False))
        *decodes, prefill = replicas
        stage = Stage(cluster.gateway_urls, decodes, http)
        wait_until(lambda: all(len(stage.get("/ready", each).json()["replicas"]) == len(ROLES) for each in (0, 1)))
        yield Monitored(targets, stage, prefill)


def let_it_all_happen(monitored: Monitored) -> None:
    """Causes hits, streams, a refused request, a retry, a broken stream, a miss after an engine forgot a prompt,
    a prompt that another replica computes, one that it should have computed, queued requests, and one that finds the
    queue full."""
    stage = monitored.stage
    prompt = text()
    for gateway in (0, 1):
        stage.chat(prompt, gateway)
        stage.post("/v1/chat/completions", chat_body(prompt, stream=True), gateway)
        stage.post("/v1/chat/completions", {"model": "sim"}, gateway)
    stage.chat(text(LONG_BYTES))
    monitored.prefill.fail("error", status=500, count=1)
    stage.chat(text(LONG_BYTES))
    for sim in stage.sims:
        sim.fail("error", status=500, count=1)
    stage.post("/v1/chat/completions", chat_body(text()))  # it fails on two replicas in the same way
    for sim in stage.sims:
        sim.fail("cut", after_tokens=1)
    stage.post("/v1/chat/completions", chat_body(text(), stream=True))
    for sim in stage.sims:
        sim.fail("none")
    body = chat_body(forgotten := text())
    first = stage.chat(forgotten)
    stage.until_resident(body, prompt_tokens=first.prompt_tokens)  # exact, so no later report moves its end
    stage.chat(forgotten)  # shows the gateway that this replica reports cached tokens
    next(sim for sim in stage.sims if sim.id == first.replica).fail("amnesia")
    stage.chat(forgotten)
    fill_the_queue(stage)


def fill_the_queue(stage: Stage) -> None:
    """While engines stand still, requests take all slots, and the next ones all places in the queue."""
    count = EACH * len(stage.sims) + MAX_WAITING
    with ThreadPoolExecutor(count) as clients:
        try:
            for sim in stage.sims:
                sim.fail("stall")
            answers = [clients.submit(stage.chat, text(), number % 2) for number in range(count)]
            wait_until(lambda: stage.get("/v1/demand?model=sim").json()["waiting_requests"] == MAX_WAITING)
            assert stage.post("/v1/chat/completions", chat_body(text())).json()["error"]["code"] == "queue_full"
        finally:
            for sim in stage.sims:
                sim.fail("none")
        for answer in answers:
            answer.result()


class Prometheus:
    """A client of a running Prometheus' HTTP API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer. Fails with Prometheus' error message."""
        answer = httpx.get(f"{self._url}/api/v1/{path}", params=parameters, trust_env=False, verify=False).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        assert "warnings" not in answer, f"{parameters}: {answer['warnings']}"
        return answer["data"]

    def series(self, query: str) -> list[Any]:
        found: list[Any] = self.ask("query", query=query)["result"]
        return found


@contextmanager
def running_prometheus(folder: Path, targets: dict[str, list[str]]) -> Iterator[Prometheus]:
    """Runs a Prometheus that scrapes once a second and has the repo's rules."""
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [url.removeprefix("http://") for url in urls]}]}
        for job, urls in targets.items()
    ]
    every_second = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = {"global": every_second, "rule_files": [str(RULES)], "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    files = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
    command = ("prometheus", *files, f"--web.listen-address={address}")
    with (folder / "prometheus.log").open("wb") as log, running(command, log):
        wait_until(lambda: answers(f"http://{address}/-/ready"))
        yield Prometheus(f"http://{address}")
