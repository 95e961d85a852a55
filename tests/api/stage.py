"""The API tests' view of a running cluster: HTTP requests to its gateways, and the requests that its replicas saw."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import openai
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.cluster import SimReplica
from bench.processes import running
from gateway.ops.local.ports import free_ports
from tests.polling import wait_until

Json = dict[str, Any]

PATIENT_REDIS: Json = {"budget_ms": 2000}
"""A gateway waits long: on a machine that stalls Redis is late, and a request that goes without it shows nothing."""

_serial = itertools.count(1)


def fresh(what: str = "subject") -> str:
    """A word that no other test has sent."""
    return f"{what}-{next(_serial):06d}"


def text(size_bytes: int = 4000) -> str:
    """A text that shares no prefix with any other test's."""
    word = fresh()
    return (f"{word} " * (size_bytes // (len(word) + 1) + 1))[:size_bytes]


def user(content: Any) -> Any:
    """A conversation of one user message."""
    return [{"role": "user", "content": content}]


def chat_body(content: Any, **fields: Any) -> Json:
    return {"model": "sim", "max_tokens": 4, "messages": user(content), **fields}


class Server(Protocol):
    """A replica, or what stands before one."""

    id: str

    @property
    def url(self) -> str: ...


@dataclass
class Stage:
    """Some gateways in front of some replicas. Methods return answers of any status; tests check the status."""

    gateways: list[str]
    sims: list[SimReplica]
    http: httpx.Client
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of every request. A test's own headers override them."""

    def taught(self, headers: dict[str, str] | None = None) -> Stage:
        """Sends each replica its first stream through each gateway: gateways do not ask for the usage of that one.
        `headers` are those of a caller who is told where a request went."""
        for gateway in range(len(self.gateways)):
            unseen = {sim.id for sim in self.sims}

            def saw_all(gateway: int = gateway, unseen: set[str] = unseen) -> bool:
                body = chat_body(text(), stream=True, max_tokens=2)
                answer = self.post("/v1/chat/completions", body, gateway, headers=headers or {})
                unseen.discard(answer.headers["x-kvgate-replica"])
                return not unseen

            wait_until(saw_all)
        return self

    def post(self, path: str, body: Any = None, gateway: int = 0, **request: Any) -> httpx.Response:
        if body is not None:
            request["json"] = body
        return self.send("POST", path, gateway, **request)

    def get(self, path: str, gateway: int = 0, **request: Any) -> httpx.Response:
        return self.send("GET", path, gateway, **request)

    def send(self, method: str, path: str, gateway: int = 0, **request: Any) -> httpx.Response:
        headers = {**self.headers, **request.pop("headers", {})}
        return self.http.request(method, self.gateways[gateway] + path, headers=headers, **request)

    def chat(self, content: Any, gateway: int = 0, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        """A chat request that must succeed."""
        answer = self.post("/v1/chat/completions", chat_body(content, **fields), gateway, headers=headers or {})
        assert answer.status_code == 200, answer.text
        return Answer(answer)

    def explain(self, body: Any, gateway: int = 0, path: str | None = None, **request: Any) -> Json:
        query = {"path": path} if path else {}
        answer = self.post("/v1/route/explain", body, gateway, params=query, **request)
        assert answer.status_code == 200, answer.text
        explained: Json = answer.json()
        return explained

    def seen(self, answer: httpx.Response) -> Json:
        """The replica's record of the request with this answer, with the replica's id as `replica`."""
        request_id = answer.headers["x-request-id"]
        for sim in self.sims:
            for request in self.state_of(sim)["recent"]:
                if request["request_id"] == request_id:
                    return {"replica": sim.id, **request}
        raise AssertionError(f"no replica saw request {request_id}")

    def requests_seen(self) -> int:
        """The number of inference requests that reached any replica."""
        return self.counted("requests")

    def counted(self, name: str) -> int:
        """One of the counts in /sim/state, summed over all replicas."""
        return sum(self.state_of(sim)[name] for sim in self.sims)

    def state_of(self, sim: SimReplica) -> Json:
        state: Json = self.http.get(f"{sim.url}/sim/state").raise_for_status().json()
        return state

    def sample(self, name: str, gateway: int = 0, **labels: str) -> float:
        """A metric's value, summed over the samples that have these labels."""
        families = text_string_to_metric_families(self.get("/metrics", gateway).text)
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def exact(self, gateway: int = 0) -> list[str]:
        """The replicas whose agents the gateway hears."""
        found: list[str] = self.get("/ready", gateway).json()["exact"]
        return found

    def owners(self, body: Any, gateway: int = 0) -> list[Json]:
        """The owners of a chat's deepest key, as the gateway finds them."""
        found: list[Json] = self.explain(body, gateway)["chain"][-1]["owners"]
        return found

    def until_resident(self, body: Any, gateway: int = 0, prompt_tokens: int = 0) -> Json:
        """Wait until the engine's events have confirmed a chat's whole prompt; returns the owner's record. With the
        engine's `prompt_tokens`, also wait until the map has that many, exact to the last block that can be served.
        Before that the map knows only whole blocks."""

        def confirmed() -> Json | None:
            owners = [owner for owner in self.owners(body, gateway) if owner["kind"] == "resident"]
            if prompt_tokens:
                owners = [owner for owner in owners if (owner["tokens"] - 1) // 16 == (prompt_tokens - 1) // 16]
            return owners[0] if owners else None

        found: Json = wait_until(confirmed)
        return found

    @contextmanager
    def failing(self, mode: str, **details: Any) -> Iterator[None]:
        """Inside the context, every replica fails in this mode."""
        try:
            self._fail({"mode": mode, "count": -1, **details})
            yield
        finally:
            self._fail({"mode": "none"})

    def _fail(self, how: Json) -> None:
        for sim in self.sims:
            self.http.post(f"{sim.url}/sim/fail", json=how).raise_for_status()


def cached_tokens_of(body: Json) -> int:
    """The number of cached tokens in a completion's answer. Like vLLM, the simulator leaves out a zero."""
    details = body["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens", 0))


class Answer:
    """The answer to a successful completion, and the replica that gave it."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.body: Json = response.json()

    @property
    def replica(self) -> str:
        return str(self.response.headers["x-kvgate-replica"])

    @property
    def matched_tokens(self) -> int:
        return int(self.response.headers["x-kvgate-matched-tokens"])

    @property
    def cached_tokens(self) -> int:
        return cached_tokens_of(self.body)

    @property
    def prompt_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens"])

    @property
    def decision(self) -> str:
        return str(self.response.headers["x-kvgate-decision"])


def error_of(answer: httpx.Response) -> Json:
    """The error in an answer. It must have the shape of its path's API."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    if answer.request.url.path.startswith("/v1/messages"):
        assert (set(body), body["type"]) == ({"type", "error", "request_id"}, "error"), body
        assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    else:
        assert list(body) == ["error"], body
    error: Json = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"]
    assert isinstance(error["code"], str)
    return error


def sdk(url: str, api_key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=20)


def api_key(name: str, tenant: str, **fields: Any) -> Json:
    """The configuration of an API key whose secret is `secret-<name>`."""
    digest = hashlib.sha256(f"secret-{name}".encode()).hexdigest()
    return {"name": name, "tenant": tenant, "sha256": digest, **fields}


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer secret-{name}"}


@contextmanager
def running_sims(folder: Path, arguments: Mapping[str, Sequence[str]]) -> Iterator[list[SimReplica]]:
    """Simulated replicas by id, without delays."""
    ports = free_ports(len(arguments))
    sims = [
        SimReplica(name, port, ("--speed", "0", *own), folder / f"{name}.log")
        for port, (name, own) in zip(ports, arguments.items(), strict=True)
    ]
    with ExitStack() as stack:
        for sim in sims:
            sim.start()
            stack.callback(sim.kill)
        yield sims


@contextmanager
def running_gateway(
    folder: Path, redis_url: str, sims: Sequence[Server], config: Json, wait: bool = True
) -> Iterator[str]:
    """Runs another gateway with its own configuration. Yields its URL once the gateway has the store and all of these
    replicas, or, without `wait`, once it answers."""
    port = free_ports(1)[0]
    file = folder / f"gateway-{port}.yaml"
    replicas = [{"id": sim.id, "url": sim.url} for sim in sims]
    network = {"id": f"gw-{port}", "host": "127.0.0.1", "port": port, "redis": {"url": redis_url, **PATIENT_REDIS}}
    file.write_text(yaml.safe_dump({"replicas": replicas, **network, **config}))
    command = (sys.executable, "-P", "-m", "gateway.ops.cli", "gateway", "--config", str(file))
    url = f"{'https' if 'tls' in config else 'http'}://127.0.0.1:{port}"
    with (folder / f"gateway-{port}.log").open("wb") as log, running(command, log):
        wait_until(lambda: has_store(url, {sim.id for sim in sims}) if wait else answers(f"{url}/health"))
        yield url


@contextmanager
def running_agent(folder: Path, redis_url: str, sim: Server, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the agent of a replica. `Stage.exact` tells when a gateway hears it."""
    command = (sys.executable, "-P", "-m", "gateway.ops.cli", "agent", "--replica", sim.id, "--url", sim.url)
    with (folder / f"agent-{sim.id}.log").open("ab") as log:
        process = subprocess.Popen((*command, "--redis-url", redis_url, *options), stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def has_store(url: str, replicas: Set[str] = frozenset()) -> bool:
    """Whether a gateway is ready, connected to Redis and has found these replicas. One that starts on a busy machine
    may be ready before."""
    answer = _get(f"{url}/ready")
    return answer is not None and answer.json()["store"] == "up" and replicas <= set(answer.json()["replicas"])


def answers(url: str) -> bool:
    """Whether a GET is answered with 200."""
    return _get(url) is not None


def _get(url: str) -> httpx.Response | None:
    """The answer, if it is a 200."""
    try:
        answer = httpx.get(url, timeout=2, trust_env=False, verify=False)
    except httpx.TransportError:
        return None
    return answer if answer.status_code == 200 else None
