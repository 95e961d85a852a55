"""Local clusters of real processes, started by `kvgate up`."""

from __future__ import annotations

import http.server
import json
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.cluster import SimReplica
from gateway.ops.local.ports import free_ports
from gateway.ops.local.processes import wait_until
from gateway.ops.local.state_dir import read_processes
from tests import polling
from tests.gateway.ops.cli.conftest import Kvgate
from tests.redis_server import RedisServer, running_redis
from tests.threaded_server import SilentHandler, in_thread

MEMBERS = ["redis", "r0", "r1", "agent-r0", "agent-r1", "gw0", "gw1"]
OF_A_LARGER_CLUSTER = ["gw2.yaml", "logs/gw2.log", "logs/r2.log", "logs/agent-r2.log"]


def ask(url: str, content: str = "Hello") -> httpx.Response:
    body = {"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    return httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, verify=False, timeout=30)


@pytest.fixture(scope="module")
def cluster(shared_kvgate: Kvgate) -> dict[str, Any]:
    """A detached cluster of 2 gateways and 2 replicas. The tests that use it do not change it.

    Its state directory holds the files of a larger, stopped cluster, and a file of the user. The environment names a
    gateway and a Redis that are not those of a local cluster.
    """
    (shared_kvgate.state_dir / "logs").mkdir(parents=True)
    for name in (*OF_A_LARGER_CLUSTER, "gw.yaml"):
        (shared_kvgate.state_dir / name).touch()
    environment = {"KVGATE_ID": "same", "KVGATE_REDIS_URL": "redis://127.0.0.1:9/0"}
    result = shared_kvgate.up("--detach", env=environment)
    assert result.returncode == 0, result.stderr
    return shared_kvgate.cluster()


def test_cluster_json_says_where_everything_is(shared_kvgate: Kvgate, cluster: dict[str, Any]) -> None:
    assert cluster.keys() == {"url", "redis_url", "redis_namespace", "base_config", "gateways", "replicas"}
    assert cluster["url"] == f"http://127.0.0.1:{shared_kvgate.port}"
    assert cluster["redis_url"].startswith("redis://127.0.0.1:")
    assert not cluster["redis_url"].startswith("redis://127.0.0.1:9/")
    assert [gateway["id"] for gateway in cluster["gateways"]] == ["gw0", "gw1"]
    assert [replica["id"] for replica in cluster["replicas"]] == ["r0", "r1"]
    assert all(member.keys() == {"id", "url", "pid"} for member in cluster["gateways"] + cluster["replicas"])


def test_every_gateway_and_the_shared_address_answer(cluster: dict[str, Any]) -> None:
    for url in [cluster["url"], *(gateway["url"] for gateway in cluster["gateways"])]:
        response = ask(url)
        assert response.status_code == 200, response.text
        assert response.headers["x-kvgate-replica"] in {"r0", "r1"}


def test_files_that_may_hold_a_password_are_their_owners_alone(shared_kvgate: Kvgate, cluster: dict[str, Any]) -> None:
    for name in ("cluster.json", "processes.json", "gw0.yaml", "gw1.yaml"):
        assert stat.S_IMODE((shared_kvgate.state_dir / name).stat().st_mode) == 0o600


def test_every_process_has_a_log_of_its_own(shared_kvgate: Kvgate, cluster: dict[str, Any]) -> None:
    logs = {path.name for path in (shared_kvgate.state_dir / "logs").iterdir()}
    assert logs == {f"{name}.log" for name in MEMBERS}


def test_only_what_a_larger_cluster_left_is_removed(shared_kvgate: Kvgate, cluster: dict[str, Any]) -> None:
    assert [name for name in OF_A_LARGER_CLUSTER if (shared_kvgate.state_dir / name).exists()] == []
    assert sorted(path.name for path in shared_kvgate.state_dir.glob("*.yaml")) == ["gw.yaml", "gw0.yaml", "gw1.yaml"]


def test_status_shows_a_healthy_cluster(shared_kvgate: Kvgate, cluster: dict[str, Any]) -> None:
    result = shared_kvgate.call("status", "--state-dir", str(shared_kvgate.state_dir), "--json")
    assert result.returncode == 0, result.stdout
    members = json.loads(result.stdout)
    assert [member["id"] for member in members] == MEMBERS
    assert {member["state"] for member in members} == {"ready"}
    agents = {member["id"]: member for member in members if member["kind"] == "agent"}
    assert [agents[f"agent-{replica['id']}"]["url"] for replica in cluster["replicas"]] == [
        replica["url"] for replica in cluster["replicas"]
    ]
    table = shared_kvgate.call("status", "--state-dir", str(shared_kvgate.state_dir))
    assert table.returncode == 0
    assert cluster["gateways"][1]["url"] in table.stdout


def test_a_drained_replica_is_no_trouble_for_status(shared_kvgate: Kvgate, cluster: dict[str, Any]) -> None:
    replica, where = cluster["replicas"][0]["id"], ("--state-dir", str(shared_kvgate.state_dir))

    def details() -> list[str]:
        members = json.loads(shared_kvgate.call("status", *where, "--json").stdout)
        assert {member["state"] for member in members} == {"ready"}
        return [member["id"] for member in members if member["detail"].startswith("drained: ")]

    try:
        assert shared_kvgate.call("drain", replica, *where).returncode == 0
        polling.wait_until(lambda: details() == [replica])
    finally:
        shared_kvgate.call("undrain", replica, *where)
    polling.wait_until(lambda: details() == [])


@pytest.mark.parametrize("state_dir", ["state", "other"])
def test_a_second_cluster_is_refused_and_told_whose_port_it_is(
    shared_kvgate: Kvgate, cluster: dict[str, Any], state_dir: str
) -> None:
    command = ["up", "--detach", "--port", str(shared_kvgate.port), "--state-dir", state_dir]
    result = shared_kvgate.call(*command)
    assert result.returncode == 1
    assert f"port {shared_kvgate.port} belongs to the cluster of pid {cluster['gateways'][0]['pid']}" in result.stderr
    assert f"kvgate down --state-dir {shared_kvgate.state_dir}" in result.stderr
    assert len(shared_kvgate.alive()) == len(MEMBERS)


def test_owners_shows_the_chain_of_a_prompt_and_who_owns_it(shared_kvgate: Kvgate, cluster: dict[str, Any]) -> None:
    prompt = "A prompt that is asked about. " * 40
    replica = ask(cluster["url"], prompt).headers["x-kvgate-replica"]
    options = ["owners", "--state-dir", str(shared_kvgate.state_dir), "--model", "sim", "--text", prompt]
    explanation = json.loads(shared_kvgate.call(*options, "--json").stdout)
    assert replica in {owner["replica"] for owner in explanation["chain"][-1]["owners"]}
    table = shared_kvgate.call(*options)
    assert table.returncode == 0, table.stderr
    assert explanation["chain"][-1]["key"] in table.stdout
    costs, legend = table.stdout.partition("costs in tokens")[2].split("cost = 3 x to compute + displaced", 1)
    assert costs.split()[1:7] == ["replica", "cost", "matched", "to", "compute", "displaced"]
    assert "to compute: tokens of the prompt" in legend


def test_owners_takes_a_request_body_with_an_image(shared_kvgate: Kvgate, cluster: dict[str, Any]) -> None:
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{pixel}"}}
    body = {"model": "sim", "messages": [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]}
    options = ["owners", "--state-dir", str(shared_kvgate.state_dir), "--json", "-"]
    result = shared_kvgate.call(*options, stdin=json.dumps(body))
    assert json.loads(result.stdout)["chain"][-1]["images"] == 1


def output_until(process: subprocess.Popen[str], wanted: str) -> str:
    """The output of a foreground `up`, up to the line that contains `wanted`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if wanted in line:
            return "".join(lines)
    raise AssertionError(f"{wanted!r} was not printed:\n{''.join(lines)}")


NUMBERS = " ".join(map(str, range(1, 501)))


def body_sent_by(command: str) -> Any:
    """The body that curl sends if a user pastes this command into a shell."""
    script = 'curl() { for last; do :; done; printf %s "$last"; }\n' + command
    return json.loads(subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout)


def test_the_foreground_shows_two_requests_and_stops_cleanly(kvgate: Kvgate) -> None:
    with kvgate.up_in_foreground() as up:
        shown = output_until(up, "Ctrl-C stops everything")
        answers = [line for line in shown.splitlines() if " via gw" in line]
        assert [line.split()[:3] for line in answers] == [
            ["text", "via", "gw0"],
            ["text", "via", "gw1"],
            ["image", "via", "gw0"],
            ["image", "via", "gw1"],
        ]
        for first, second in (answers[0:2], answers[2:4]):
            assert first.split("→")[1].split(",")[0] == second.split("→")[1].split(",")[0]
            assert ", 0 tokens matched" not in second
        assert "/console in a browser" in shown
        curl = re.search(r"curl (?:.*\\\n)?.*", shown)
        assert curl is not None
        assert body_sent_by(curl[0]) == {"model": "sim", "messages": [{"role": "user", "content": NUMBERS}]}
        up.send_signal(signal.SIGINT)
        stopped = output_until(up, "stopped").splitlines()[-1]
        assert re.fullmatch(r"stopped 7 processes in ([0-4]\.\d|5\.0) s", stopped), stopped
        assert up.wait(20) == 0
    assert kvgate.alive() == []
    assert not (kvgate.state_dir / "cluster.json").exists()


def test_a_cluster_of_a_file_with_keys_says_how_to_send_requests_and_when_the_file_becomes_wrong(
    kvgate: Kvgate, tmp_path: Path
) -> None:
    config = file_with_a_key(tmp_path)
    of_one = ("--config", str(config), "--gateways", "1", "--replicas", "1")
    with kvgate.up_in_foreground(*of_one) as up:
        shown = output_until(up, "Ctrl-C stops everything")
        assert "no request was sent: this cluster asks for API keys, and only their hashes are known here. Set" in shown
        steps = shown.partition("Try next")[2].replace("YOUR_KEY", "secret-of-me")
        export, curl = re.search(r"export .*", steps), re.search(r"curl (?:.*\\\n)?.*", steps)
        assert export is not None
        assert curl is not None
        key = export[0].partition("=")[2]
        assert '-H "Authorization: Bearer $KVGATE_API_KEY"' in curl[0]
        url, headers = kvgate.cluster()["url"], {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body_sent_by(curl[0]), headers=headers, timeout=30)
        assert answer.status_code == 200
        text = config.read_text()
        write_and_tell(config, "prot: 1", kvgate)
        assert f"{config} is wrong and not used (prot)" in output_until(up, "not used")
        status = kvgate.call("status", "--state-dir", str(kvgate.state_dir))
        assert (status.returncode, f"store: up; {config} is wrong and not used (prot)" in status.stdout) == (0, True)
        write_and_tell(config, text, kvgate)
        output_until(up, f"{config} is used again")
        up.send_signal(signal.SIGINT)
        assert up.wait(20) == 0
    with kvgate.up_in_foreground(*of_one, env={"KVGATE_API_KEY": "secret-of-me"}) as up:
        shown = output_until(up, "Ctrl-C stops everything")
        assert "  text  via gw0 → answered (where and why, only an admin's key is told)" in shown
        assert "secret-of-me" not in shown
        assert '-H "Authorization: Bearer $KVGATE_API_KEY"' in shown


def test_a_detached_cluster_with_keys_says_how_to_send_a_request_and_not_that_none_was_sent(
    kvgate: Kvgate, tmp_path: Path
) -> None:
    config = file_with_a_key(tmp_path)
    result = kvgate.up("--detach", "--config", str(config), "--gateways", "1", "--replicas", "1")
    assert result.returncode == 0, result.stderr
    assert "no request was sent" not in result.stdout
    assert "this cluster asks for API keys, and only their hashes are known here" in result.stdout
    export, _, curl = result.stdout.partition("send it a request with:\n")[2].partition("\n")
    assert export.strip() == "export KVGATE_API_KEY=YOUR_KEY"
    assert '-H "Authorization: Bearer $KVGATE_API_KEY"' in curl
    url, headers = kvgate.cluster()["url"], {"authorization": "Bearer secret-of-me"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body_sent_by(curl), headers=headers, timeout=30)
    assert answer.status_code == 200


def file_with_a_key(folder: Path) -> Path:
    """A configuration that asks for the key `secret-of-me`."""
    config = folder / "keys.yaml"
    entry = {"name": "me", "sha256": sha256(b"secret-of-me").hexdigest(), "tenant": "us"}
    config.write_text(json.dumps({"security": {"api_keys": [entry], "cache_salt_secret": "salt" * 8}}))
    return config


def write_and_tell(file: Path, text: str, kvgate: Kvgate) -> None:
    """Writes the file that gateways follow. They read it at once."""
    file.write_text(text)
    for process in read_processes(kvgate.state_dir):
        if process.kind == "gateway":
            process.signal(signal.SIGHUP)


async def test_down_stops_a_cluster_that_runs_in_the_foreground(kvgate: Kvgate) -> None:
    with kvgate.up_in_foreground("--no-demo", "--gateways", "1", "--replicas", "1") as up:
        output_until(up, "Ctrl-C stops everything")
        assert kvgate.run("down", "--state-dir", str(kvgate.state_dir)).stdout == "stopped 4 processes\n"
        assert up.wait(20) == 0
    assert kvgate.alive() == []


async def test_nothing_outlives_a_foreground_that_is_killed(kvgate: Kvgate) -> None:
    with kvgate.up_in_foreground("--no-demo", "--gateways", "1", "--replicas", "1") as up:
        output_until(up, "Ctrl-C stops everything")
        up.kill()
        assert await wait_until(lambda: kvgate.alive() == [], 20)
    assert kvgate.up("--detach", "--gateways", "1", "--replicas", "1").returncode == 0, "its locks are free again"


async def test_an_agent_that_dies_is_reported_and_its_replica_is_degraded(kvgate: Kvgate) -> None:
    with kvgate.up_in_foreground("--no-demo", "--gateways", "1", "--replicas", "1") as up:
        output_until(up, "Ctrl-C stops everything")
        url = kvgate.cluster()["url"]
        assert ask(url).headers["x-kvgate-decision"].endswith("state=exact")
        (agent,) = (process for process in read_processes(kvgate.state_dir) if process.kind == "agent")
        agent.signal(signal.SIGKILL)
        assert "agent-r0 exited with code -9; it is not restarted" in output_until(up, "agent-r0 exited")
        ready = f"{url}/ready"
        assert await wait_until(lambda: httpx.get(ready, trust_env=False, verify=False).json()["exact"] == [], 20)
        assert ask(url).headers["x-kvgate-decision"].endswith("state=degraded")
        status = kvgate.run("status", "--state-dir", str(kvgate.state_dir), "--json")
        states = {member["id"]: (member["state"], member["detail"]) for member in json.loads(status.stdout)}
        assert states["agent-r0"] == ("dead", "no gateway hears it: Redis is away, or its replica is not ready")
        assert states["gw0"][0] == "ready"


def stall(url: str) -> None:
    """The engine of a replica stands still, and its server goes on."""
    httpx.post(f"{url}/sim/fail", json={"mode": "stall"}, trust_env=False).raise_for_status()


@pytest.mark.slow
async def test_status_says_why_gateways_do_not_use_a_replica_that_answers(kvgate: Kvgate, tmp_path: Path) -> None:
    config = tmp_path / "base.yaml"
    config.write_text("health: {hang_s: 1}")
    assert kvgate.up("--detach", "--gateways", "2", "--replicas", "3", "--config", str(config)).returncode == 0
    cluster = kvgate.cluster()
    stuck, *others = cluster["replicas"]
    stall(stuck["url"])

    def states() -> dict[str, tuple[str, str]]:
        told = json.loads(kvgate.run("status", "--state-dir", str(kvgate.state_dir), "--json").stdout)
        return {member["id"]: (member["state"], member["detail"]) for member in told}

    with ThreadPoolExecutor(6) as clients:
        answers = clients.map(lambda n: ask(cluster["url"], f"question {n}"), range(6))
        assert await wait_until(lambda: states()[stuck["id"]][0] == "not ready", 20)
        found = states()
        assert found[stuck["id"]] == ("not ready", "it has work, and shows no progress")
        assert found[f"agent-{stuck['id']}"] == ("ready", "")
        assert {answer.status_code for answer in answers} == {200}
        for other in others:
            stall(other["url"])
        waiting = clients.map(lambda n: ask(cluster["url"], f"later question {n}"), range(6))
        assert await wait_until(lambda: all(states()[each["id"]][0] == "not ready" for each in others), 20)
        assert {states()[f"agent-{each['id']}"] for each in others} == {("ready", "")}
        kvgate.run("down", "--state-dir", str(kvgate.state_dir))
        del waiting


class NotAnEngine(SilentHandler):
    """A server that is not vLLM: its /metrics is not in Prometheus' format, and it has neither /health nor KV
    events."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path in ("/metrics", "/v1/models") else 404)
        body = b'{"object": "list", "data": [{"id": "other", "object": "model"}]}'
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def other_server() -> Iterator[str]:
    with in_thread(http.server.ThreadingHTTPServer(("127.0.0.1", 0), NotAnEngine)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


def test_servers_and_a_redis_that_were_there_before_are_fronted(
    kvgate: Kvgate, other_server: str, redis: RedisServer
) -> None:
    result = kvgate.up("--detach", "--gateways", "1", "--redis-url", redis.url, "--replica", other_server)
    assert result.returncode == 0, result.stderr
    cluster = kvgate.cluster()
    assert cluster["replicas"] == [{"id": "r0", "url": other_server, "pid": None}]
    assert cluster["redis_url"] == redis.url
    assert [process.id for process in read_processes(kvgate.state_dir)] == ["gw0"]
    assert httpx.get(f"{cluster['url']}/v1/models", trust_env=False, verify=False).json()["data"][0]["id"] == "other"
    assert kvgate.call("status", "--state-dir", str(kvgate.state_dir)).returncode == 0


def test_a_replica_that_is_fronted_with_its_events_gets_an_agent(
    kvgate: Kvgate, redis: RedisServer, tmp_path: Path
) -> None:
    """An engine before 0.32 does not report its event endpoints."""
    port, events, replay = free_ports(3)
    arguments = ("--vllm-version", "0.31.0", "--events-port", str(events), "--replay-port", str(replay))
    sim = SimReplica("mine", port, ("--speed", "0", *arguments), tmp_path / "sim.log")
    sim.start()
    try:
        replica = f"id=mine,url={sim.url},events=tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay}"
        result = kvgate.up("--detach", "--gateways", "1", "--redis-url", redis.url, "--replica", replica)
        assert result.returncode == 0, result.stderr
        assert [process.id for process in read_processes(kvgate.state_dir)] == ["agent-mine", "gw0"]
        assert kvgate.run("down", "--state-dir", str(kvgate.state_dir)).returncode == 0
    finally:
        sim.kill()
