"""Commands that need no cluster, and the result of mistakes on the command line."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from gateway.ops.cli import app
from gateway.ops.local.state_dir import Cluster, ClusterProcess, write_cluster
from tests.gateway.ops.cli.conftest import COMMAND, Kvgate
from tests.threaded_server import SilentHandler, in_thread

ROOT = Path(__file__).resolve().parents[4]
COMMANDS = ["up", "down", "status", "owners", "explain", "gateway", "agent", "replica-sim", "check-config"]
COMMANDS += ["hash-key", "replica-command", "doctor", "queue", "drain", "undrain", "audit"]
COMMANDS += [f"keys {verb}" for verb in ("create", "list", "rotate", "revoke")]


def one_line_error(result: subprocess.CompletedProcess[str]) -> str:
    """The error of a command with a user's mistake: one line on stderr, nothing else, exit code 1."""
    assert result.returncode == 1, result
    assert result.stderr.startswith("kvgate: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples_and_is_whole_on_a_terminal_of_80_columns(kvgate: Kvgate, command: str) -> None:
    text = kvgate.call(*command.split(), "--help", env={"COLUMNS": "80"}).stdout
    assert f"kvgate {command}" in text.partition("Examples:")[2]
    found = typer.main.get_group(app)
    for word in command.split():
        found = found.commands[word]  # type: ignore[assignment]
    parameters = found.params
    options = {name for each in parameters for name in each.opts if name.startswith("--")}
    assert options <= set(re.findall(r"(?<![\w-])--[a-z-]+", text.partition("Options:")[2]))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "<bool>" not in text


def test_the_list_of_commands_says_of_each_what_it_does_in_full(kvgate: Kvgate) -> None:
    listed = " ".join(kvgate.call("--help", env={"COLUMNS": "80"}).stdout.split())
    assert all(command.partition(" ")[0] in listed for command in COMMANDS)
    assert "up Start a cluster on this machine: Redis, replicas and gateways behind one shared address. down" in listed
    assert "..." not in listed.partition("Commands:")[2]


OWNERS = ("owners", "--text", "Hello")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (("owners", "--model", "sim"), "give the prompt once"),
        (("owners", "-", "--text", "Hello"), "give the prompt once"),
        ((*OWNERS, "--gateway", "http://127.0.0.1:9"), "--model is needed"),
        ((*OWNERS, "--model", "sim"), "start one with `kvgate up"),
        (
            (*OWNERS, "--model", "sim", "--gateway", "localhost:1"),
            "--gateway: is 'localhost:1'; must be a URL, like http:",
        ),
        (("status", "--state-dir", "none"), "no cluster is up"),
        (("hash-key",), "no key on stdin; pipe one in"),
        (("replica-sim", "--lmcache", "chunks=64"), "chunks is none of cpu_gb, redis_url, chunk_tokens"),
        (("replica-sim", "--lmcache", "cpu_gb=much"), "could not convert string to float: 'much'"),
        (("replica-sim", "--lmcache", "chunk_tokens=64"), "lmcache needs CPU memory or a Redis"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_a_mistake_gives_one_line_that_names_it(kvgate: Kvgate, typed: tuple[str, ...], told: str) -> None:
    assert told in one_line_error(kvgate.call(*typed))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("up", "--port", "70000"), "Invalid value for '--port'"),
        (("up", "--gateways", "0"), "Invalid value for '--gateways'"),
        (("agent", "--replica", "r0", "--url", "http://r0", "--dp-rank", "x"), "Invalid value for '--dp-rank'"),
    ],
)
def test_an_option_that_is_out_of_range_is_refused_by_its_name(
    kvgate: Kvgate, words: tuple[str, ...], problem: str
) -> None:
    assert problem in kvgate.call(*words).stderr


@pytest.mark.parametrize(
    ("command", "text", "problems"),
    [
        (
            "check-config",
            "port: 0\nprot: 1\n",
            ["port: is 0; must be at least 1", "prot: is not a known key; did you mean port?"],
        ),
        ("gateway --config", "prot: 1\n", ["prot: is not a known key; did you mean port?"]),
        (
            "replica-command --config",
            "vllm: {model: m, max_model_len: 0}\nlmcash: {}\n",
            ["vllm.max_model_len: is 0; must be at least 1", "lmcash: is not a known key; did you mean lmcache?"],
        ),
    ],
)
def test_a_bad_file_stops_a_command_which_lists_every_problem(
    kvgate: Kvgate, command: str, text: str, problems: list[str]
) -> None:
    path = kvgate.folder / "bad.yaml"
    path.write_text(text)
    result = kvgate.call(*command.split(), str(path))
    assert result.returncode == 1
    head, *listed = result.stderr.splitlines()
    assert head == f"kvgate: {path}: {len(problems)} problem{'s' * (len(problems) > 1)}"
    assert listed == [f"  {problem}" for problem in problems]


def test_help_loads_nothing_that_is_slow_to_import() -> None:
    code = (
        "import sys, gateway.ops.cli\n"
        "slow = {'pydantic', 'yaml', 'httpx', 'aiohttp', 'redis', 'fastapi', 'uvicorn', 'PIL', 'prometheus_client'}\n"
        "print(sorted(slow & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_version_is_that_of_the_project(kvgate: Kvgate) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert kvgate.call("--version").stdout == f"{version}\n"


def test_check_config_accepts_the_annotated_file(kvgate: Kvgate) -> None:
    result = kvgate.call("check-config", str(ROOT / "configs" / "gateway.yaml"), env={"KVGATE_ID": "gw7"})
    assert (result.returncode, result.stderr) == (0, "")
    ok, told = result.stdout.splitlines()
    assert ok.endswith("gateway.yaml: OK (gateway gw7, 0 replicas, policy prefix_kv_aware)")
    assert told.startswith("no replicas here: kvgate up --config brings its own;")


@pytest.mark.parametrize(
    ("text", "replicas"),
    [
        ("replicas: [{id: r0, url: 'http://h:1'}]", "1 replica"),
        ("replicas: [{id: r0, url: 'http://h:1'}, {id: r1, url: 'http://h:2'}]", "2 replicas"),
        ("discovery: {dns: {names: [vllm]}, kubernetes: {service: vllm}}", "0 replicas, more by dns and kubernetes"),
    ],
)
def test_check_config_says_what_replicas_there_will_be(
    kvgate: Kvgate, tmp_path: Path, text: str, replicas: str
) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    result = kvgate.call("check-config", str(file), env={"KVGATE_ID": "gw7"})
    assert result.stdout == f"{file}: OK (gateway gw7, {replicas}, policy prefix_kv_aware)\n"


def test_check_config_warns_of_what_can_be_used_and_contradicts_itself(kvgate: Kvgate) -> None:
    path = kvgate.folder / "doubtful.yaml"
    path.write_text("replicas: [{id: r0, url: 'http://h:1'}]\ntenants: [{name: ghost, weight: 2}]\n")
    result = kvgate.call("check-config", str(path), env={"KVGATE_ID": "gw7"})
    assert result.returncode == 0
    assert result.stderr.startswith("warning: tenant ghost: no key in security.api_keys is of this tenant: ")
    strict = kvgate.call("check-config", "--strict", str(path), env={"KVGATE_ID": "gw7"})
    assert (strict.returncode, strict.stderr) == (1, result.stderr)


def test_check_config_says_that_keys_cannot_be_made_if_no_secret_is_there_to_sign_them(kvgate: Kvgate) -> None:
    path, key = kvgate.folder / "keys.yaml", {"name": "ops", "tenant": "ops", "sha256": "0" * 64, "admin": True}
    path.write_text(json.dumps({"security": {"api_keys": [key], "share_cache": True}}))
    for secret, is_told in (("", True), ("0123456789abcdef", False)):
        result = kvgate.call("check-config", str(path), env={"KVGATE_RECORDS_SECRET": secret})
        assert (result.returncode, result.stderr) == (0, "")
        assert ("gateways refuse kvgate keys" in result.stdout) is is_told


def test_check_config_warns_of_files_that_are_missing_and_of_traces_that_go_nowhere(kvgate: Kvgate) -> None:
    path = kvgate.folder / "doubtful.yaml"
    common = "replicas: [{id: r0, url: 'http://h:1'}]\n"
    files = "{certificate: /nowhere.crt, key: /nowhere.key}"
    no_start = ": a gateway would not start on this machine"
    path.write_text(f"{common}tls: {files}\nreplica_tls: {files}\ntracing: {{endpoint: 'http://h:4318'}}\n")
    result = kvgate.call("check-config", str(path), env={"KVGATE_ID": "gw7"})
    assert result.returncode == 0
    assert result.stderr.splitlines() == [
        f"warning: tls.certificate: cannot read /nowhere.crt (No such file or directory){no_start}",
        f"warning: replica_tls.certificate: cannot read /nowhere.crt (No such file or directory){no_start}",
        "warning: tracing.endpoint: has no path; OpenTelemetry's receivers take traces at /v1/traces",
    ]
    path.write_text(f"{common}tracing: {{sample_ratio: 1}}\n")
    result = kvgate.call("check-config", str(path), env={"KVGATE_ID": "gw7"})
    assert result.stderr == "warning: tracing: nothing is traced without tracing.endpoint\n"


def test_what_check_config_warns_of_is_told_at_a_start_too(kvgate: Kvgate) -> None:
    path = kvgate.folder / "doubtful.yaml"
    tls = "tls: {certificate: /nowhere.crt, key: /nowhere.key}"  # with this, nothing starts
    path.write_text(f"{tls}\ntracing: {{endpoint: 'http://h:4318'}}\n")
    log = kvgate.call("gateway", "--config", str(path)).stdout
    up = kvgate.call("up", "--config", str(path)).stderr
    for told in (log, up):
        assert "tracing.endpoint: has no path" in told


def test_a_gateway_that_gets_one_of_its_two_ports_lets_go_of_it(kvgate: Kvgate) -> None:
    path = kvgate.folder / "shared.yaml"
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        path.write_text(f"host: 127.0.0.1\nport: {kvgate.port}\nshared_port: {taken}\n")
        error = one_line_error(kvgate.call("gateway", "--config", str(path)))
    assert f"cannot listen on 127.0.0.1: port {taken}: Address already in use" in error
    with socket.create_server(("127.0.0.1", kvgate.port)):
        pass


@pytest.mark.parametrize("stdin", ["my-key", "my-key\n"])
def test_hash_key_prints_the_line_for_the_configuration(kvgate: Kvgate, stdin: str) -> None:
    digest = hashlib.sha256(b"my-key").hexdigest()
    assert kvgate.call("hash-key", stdin=stdin).stdout == f'sha256: "{digest}"\n'


def test_a_key_that_no_header_takes_is_refused_before_it_is_sent(kvgate: Kvgate) -> None:
    for command in (["queue", "--gateway", "http://127.0.0.1:9"], kvgate.up_command("--detach")):
        for key in ("schlüssel", "two\nlines"):
            result = kvgate.call(*command, env={"KVGATE_API_KEY": key})
            assert (result.returncode, result.stdout) == (2, "")
            assert "KVGATE_API_KEY or --api-key must be printable ASCII" in " ".join(result.stderr.split())
            assert key not in result.stderr


def test_explain_asks_for_no_request_without_an_id(kvgate: Kvgate) -> None:
    result = kvgate.call("explain", "", "--gateway", "http://127.0.0.1:9")
    assert (result.returncode, result.stdout) == (2, "")
    assert "Invalid value for REQUEST_ID: it is empty" in result.stderr


def test_owners_names_a_gateway_that_does_not_answer(kvgate: Kvgate) -> None:
    url = f"http://127.0.0.1:{kvgate.port}"
    result = kvgate.call("owners", "--text", "Hello", "--model", "sim", "--gateway", url)
    assert f"no answer from {url}" in one_line_error(result)


class Refusing(SilentHandler):
    """A gateway that requires a key. It answers 401 without a key, and 403 with any key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = b'{"error": {"message": "Not you."}}'
        self.send_response(403 if "authorization" in self.headers else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize(
    ("options", "status", "key"), [((), 401, "a key"), (("--api-key", "a-key"), 403, "an admin key")]
)
def test_owners_that_may_not_ask_names_where_a_key_is_given(
    kvgate: Kvgate, options: tuple[str, ...], status: int, key: str
) -> None:
    with in_thread(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        result = kvgate.call("owners", "--text", "Hello", "--model", "sim", "--gateway", url, *options)
    said = f"the gateway refused ({status}): Not you. Give {key} by --api-key or KVGATE_API_KEY."
    assert one_line_error(result) == f"kvgate: {said}"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--state-dir", "none"), "no cluster is up in none: start one with"),
        (("--gateway", "http://gw0:8080"), "with --gateway, give --redis-url or --config, too"),
        (("--redis-url", "http://redis:6379"), "--redis-url: must start with redis://"),
        (("--redis-url", "redis://127.0.0.1", "--gateway", "gw0:8080"), "--gateway: is 'gw0:8080'; must be a URL"),
        (("--redis-url", "redis://127.0.0.1", "--lmcache", "r0:5580"), "--lmcache: is 'r0:5580'; must be a URL"),
        (("--config", "none.yaml"), "none.yaml: 1 problem"),
        (("--timeout", "0"), "Invalid value for '--timeout'"),
    ],
)
def test_a_doctor_that_cannot_look_says_why_and_exits_with_2(
    kvgate: Kvgate, options: tuple[str, ...], problem: str
) -> None:
    result = kvgate.call("doctor", *options)
    assert (result.returncode, result.stdout) == (2, "")
    assert problem in result.stderr


def test_the_doctor_prints_what_it_found_with_reason_and_fix_and_what_it_could_not_check(kvgate: Kvgate) -> None:
    result = kvgate.call("doctor", "--redis-url", f"redis://:secret@127.0.0.1:{kvgate.port}")
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "Redis"
    assert lines[1].startswith("  error redis-unreachable: cannot connect to Redis")
    assert lines[2].startswith("    why: without it ")
    assert lines[3].startswith("    fix: start it, or correct --redis-url")
    assert lines[4] == "not checked"
    assert lines[-1] == "1 error, 0 warnings: nothing answers"
    assert "secret" not in result.stdout + result.stderr


def test_of_a_local_cluster_the_doctor_names_the_users_file_and_the_secret_that_this_shell_lacks(
    kvgate: Kvgate,
) -> None:
    file, key = kvgate.folder / "chat.yaml", {"name": "ops", "tenant": "ops", "sha256": "0" * 64}
    file.write_text(json.dumps({"security": {"api_keys": [key]}}))
    kvgate.state_dir.mkdir()
    (kvgate.state_dir / "gw0.yaml").write_text("id: gw0")
    nowhere = f"127.0.0.1:{kvgate.port}"
    gateway = ClusterProcess("gw0", f"http://{nowhere}", None)
    write_cluster(kvgate.state_dir, Cluster(gateway.url, f"redis://{nowhere}", [gateway], [], base_config=str(file)))
    told = kvgate.call("doctor", "--state-dir", str(kvgate.state_dir)).stdout
    assert f"({file} and {kvgate.state_dir}/gw0.yaml: 1 problem" in told
    assert "KVGATE_CACHE_SALT_SECRET, also in the shell that checks the file" in told


def test_down_without_a_cluster_does_nothing(kvgate: Kvgate) -> None:
    result = kvgate.call("down", "--state-dir", str(kvgate.state_dir))
    assert (result.returncode, result.stdout) == (0, f"nothing runs in {kvgate.state_dir}\n")


def test_a_simulated_replica_serves_until_it_is_told_to_stop(kvgate: Kvgate) -> None:
    import httpx

    command = [*COMMAND, "replica-sim", "--id", "r7", "--port", "0", "--speed", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as replica:
        assert replica.stdout is not None
        name, _, url = replica.stdout.readline().strip().partition(" on ")
        assert name == "replica r7"
        models = httpx.get(f"{url}/v1/models", trust_env=False).json()
        assert json.dumps("sim") in json.dumps(models)
        replica.terminate()
        assert replica.wait(20) == 0


def test_replica_command_prints_a_paragraph_for_each_process(kvgate: Kvgate) -> None:
    result = kvgate.call("replica-command", "--config", str(ROOT / "configs" / "replica-lmcache-cpu-redis.yaml"))
    assert result.returncode == 0
    heads = [paragraph.split(":")[0] for paragraph in result.stdout.split("\n\n")]
    assert heads == ["# lmcache", "# agent", "# vllm"]


def test_replica_command_prints_json_for_programs(kvgate: Kvgate) -> None:
    config = str(ROOT / "configs" / "replica-vllm.yaml")
    result = kvgate.call("replica-command", "--config", config, "--json", env={"KVGATE_REPLICA_ID": "r7"})
    agent, engine = json.loads(result.stdout)
    assert (engine["name"], engine["argv"][:2], engine["env"]) == ("vllm", ["vllm", "serve"], {"PYTHONHASHSEED": "0"})
    assert "r7" in agent["argv"]


def test_a_file_of_the_other_kind_is_named_as_such(kvgate: Kvgate) -> None:
    replica, gateway = str(ROOT / "configs" / "replica-vllm.yaml"), str(ROOT / "configs" / "gateway.yaml")
    assert "looks like a gateway's file" in one_line_error(kvgate.call("replica-command", "--config", gateway))
    for command in (["check-config", replica], ["up", "--config", replica], ["gateway", "--config", replica]):
        result = kvgate.call(*command)
        assert result.returncode == 1
        assert f"looks like a replica's file: kvgate replica-command --config {replica} checks it" in result.stderr


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in its background without it
module, sys.argv = sys.argv[1], ["kvgate", *sys.argv[2:]]
class Interrupting:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from gateway.ops.entry import main
main()
"""


@pytest.mark.parametrize(("module", "words"), [("typer", "--help"), ("uvicorn", "gateway --config gateway.yaml")])
def test_ctrl_c_during_the_imports_ends_it_without_a_traceback(module: str, words: str) -> None:
    command = [sys.executable, "-P", "-c", INTERRUPTED, module, *words.split()]
    folder = ROOT / "configs"
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_a_hang_up_during_the_imports_does_not_end_a_gateway() -> None:
    command = [sys.executable, "-P", "-c", INTERRUPTED.replace("os.kill(os.getpid(), signal.SIGINT)", HANG_UP), "typer"]
    ended = subprocess.run(
        [*command, "gateway", "--config", "none.yaml"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, "none.yaml: 1 problem" in ended.stderr) == (1, True), ended


HANG_UP = "os.kill(os.getpid(), signal.SIGHUP)"
