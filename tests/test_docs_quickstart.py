"""docs/quickstart.md: its commands and their options exist. The commands that need no GPU are run."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import redis
import typer.main
import yaml

from gateway.ops.cli import app
from gateway.ops.replica.settings import load_replica
from gateway.settings.gateway_settings import build_settings
from tests.deploy.composition import as_written, docker_compose
from tests.documents import ROOT, blocks, commands
from tests.programs import needs
from tests.redis_server import running_redis

TEXT = (ROOT / "docs" / "quickstart.md").read_text()
REPLICA = load_replica(ROOT / "deploy" / "compose" / "replica-vllm.yaml", {"KVGATE_REPLICA_ID": "r0"})
SECRETS = {"KVGATE_REDIS_URL", "KVGATE_AGENT_REDIS_URL", "KVGATE_LMCACHE_URL"}


def block_with(part: str, language: str = "console") -> str:
    (block,) = (block for block in blocks(TEXT, language) if part in block)
    return block


def calls_of(program: str) -> list[list[str]]:
    """The arguments of every call of this program: in a block, a sentence or a table, and in a container."""
    typed = [command for block in blocks(TEXT, "console") for command in commands(block)]
    named = re.findall(r"`((?:[A-Z_]+=\S+ )*(?:docker compose|kvgate)\b[^`]*)`", TEXT.replace("\n", " "))
    found = []
    for command in [*typed, *named]:
        words = shlex.split(command.replace("\\\n", " ").partition("<<")[0], comments=True)
        if program in words:
            found.append(words[words.index(program) + 1 :])
    return found


def sh(folder: Path, typed: str, **variables: str) -> None:
    """Runs a command as if it was typed in the repository's root. `folder` has no files of an earlier test."""
    for name in ("deploy", "configs"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        ["sh", "-e", "-c", typed], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def secrets(folder: Path) -> dict[str, str]:
    """The URLs that the section on Redis makes. The section also writes users.acl into `folder`."""
    typed = [each for each in commands(block_with("secret.sh")) if not each.startswith("redis-server")]
    sh(folder, "\n".join(typed))
    assert (folder / "users.acl").stat().st_mode & 0o077 == 0
    lines = (folder / "kvgate.env").read_text().splitlines()
    return dict(line.removeprefix("export ").split("=", 1) for line in lines)


def test_every_kvgate_command_exists_with_these_options() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    calls = calls_of("kvgate")
    assert {call[0] for call in calls} >= {"doctor", "gateway", "replica-command", "check-config"}
    for name, *words in calls:
        assert name in known, f"kvgate {name}"
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, f"kvgate {name}"


@needs("docker compose")
def test_every_docker_compose_command_exists_with_these_options_and_names_services_that_exist() -> None:
    calls = [words for words in calls_of("compose") if words != ["version"]]
    assert len(calls) > 8
    for words in calls:
        while words[:1] == ["--profile"]:
            assert words[1] in ("dashboards", "*")
            words = words[2:]
        command, *rest = words
        options = list(itertools.takewhile(lambda word: word.startswith("-"), rest))
        known = docker_compose(command, "--help")
        assert all(re.search(rf"(^|\s){re.escape(option)}[,\s]", known) for option in options), words
        services = rest[len(options) :][: 1 if command == "exec" else None]
        assert set(services) <= set(as_written("vllm").services), words


def test_what_a_sentence_calls_a_container_is_one() -> None:
    services = as_written("vllm").services
    for name in re.findall(r"`((?:vllm|gateway)-[a-z0-9-]*)`", TEXT):
        assert name in services, name
    for service, number in re.findall(r"http://kvgate-([a-z-]+)-(\d)", TEXT):
        assert int(number) <= services[service]["scale"]


def test_every_file_that_it_names_exists() -> None:
    for file in re.findall(r"(?<![\w./-])((?:deploy|configs|tests|docs)/[\w./-]+\w)", TEXT):
        assert (ROOT / file).exists(), file


def test_the_figures_and_names_are_those_of_the_replicas_file(tmp_path: Path) -> None:
    sh(tmp_path, next(command for command in commands(block_with("cat > prompt.json")) if "<<END" in command))
    body = json.loads((tmp_path / "prompt.json").read_text())
    assert body["model"] == REPLICA.vllm.model
    assert body["messages"][0]["content"].endswith(" 499 500")
    assert REPLICA.lmcache is not None
    assert f"LMCache's server with {REPLICA.lmcache.cpu_gb:g} GB of memory" in TEXT
    maxmemory = re.search(r"^maxmemory (\d+)gb$", (ROOT / "configs" / "redis.conf").read_text(), flags=re.MULTILINE)
    assert maxmemory is not None
    tokens = int(maxmemory[1]) * 2**30 // (REPLICA.vllm.kv_bytes_per_token or 0)
    assert f"{maxmemory[1]} GB, as `maxmemory`" in TEXT
    assert f"{tokens // 1000} 000 tokens of this model" in TEXT


def test_redis_gets_three_users_who_can_log_in_from_where_the_hosts_are(tmp_path: Path) -> None:
    urls = secrets(tmp_path)
    assert set(urls) == SECRETS
    assert all(re.fullmatch(r"redis://\w+:\w+@10\.0\.0\.5:6379/0", url) for url in urls.values())
    started = next(shlex.split(each) for each in commands(block_with("secret.sh")) if each.startswith("redis-server"))
    options = [str(ROOT / "configs" / "redis.conf"), *started[2:]]
    options[options.index("--aclfile") + 1] = str(tmp_path / "users.acl")
    with running_redis(options=tuple(options[1:])) as server:
        keys = ("kvgate:x", "kvgate:{m}:x", "kvchunk@x")
        for variable, key in zip(
            ("KVGATE_REDIS_URL", "KVGATE_AGENT_REDIS_URL", "KVGATE_LMCACHE_URL"), keys, strict=True
        ):
            client = redis.Redis.from_url(urls[variable].replace("10.0.0.5:6379", f"127.0.0.1:{server.port}"))
            assert client.set(key, "1")
            client.close()


def test_the_three_scripts_of_a_replica_are_its_three_processes_and_hold_no_password(tmp_path: Path) -> None:
    urls = secrets(tmp_path)
    typed = list(commands(block_with("awk")))
    sh(tmp_path, "\n".join(typed))
    begins = {"lmcache": "KVGATE_LMCACHE_URL server", "vllm": "vllm serve ", "agent": "kvgate agent "}
    for name, begin in begins.items():
        script = (tmp_path / f"{name}.sh").read_text()
        assert [each for each in begins.values() if each in script] == [begin]
        assert script.startswith(f"# {name}: ")
        assert not any(url.split(":")[2].partition("@")[0] in script for url in urls.values())
        sh(tmp_path, f"sh -n {name}.sh")


def test_the_gateways_file_is_valid_and_knows_the_two_hosts() -> None:
    data = yaml.safe_load(block_with("replicas:", "yaml"))
    settings = build_settings(data, {"KVGATE_REDIS_URL": "redis://kvgate:secret@10.0.0.5:6379/0"})
    assert {each.id: each.url for each in settings.replicas} == {
        "r0": "http://10.0.0.5:8000",
        "r1": "http://10.0.0.6:8000",
    }


def test_the_versions_to_install_are_those_of_the_image() -> None:
    image = (ROOT / "deploy" / "docker" / "Dockerfile.vllm-lmcache").read_text()
    (installed,) = re.findall(r"pip install (vllm==.*)", TEXT)
    assert f"vllm/vllm-openai:v{re.findall(r'vllm==([0-9.]+)', installed)[0]}\n" in image
    assert installed.partition(" ")[2] in image
