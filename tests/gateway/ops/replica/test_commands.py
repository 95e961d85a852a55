"""The printed commands: for a shell and for a program, and never with a password."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.ops.replica.commands import Command, as_json, as_shell, commands
from gateway.ops.replica.settings import build_replica

VLLM = {"model": "org/model", "max_model_len": 4096, "kv_bytes_per_token": 57344}
SECRET_URL = "redis://chunks:a%20secret%22'@h:6379/3"
# Replacements for LMCache and its client. They print their arguments.
LMCACHE_MAIN = """
import glide_sync, json, sys

def main():
    print(json.dumps([sys.argv, vars(glide_sync.ServerCredentials("whatever", "order"))]))
"""
GLIDE = """
class ServerCredentials:
    def __init__(self, password, username):
        self.password, self.username = password, username
"""


def built(**fields: Any) -> list[Command]:
    return commands(build_replica({"vllm": VLLM, **fields}, {}))


def test_a_shell_reads_back_what_a_program_is_given() -> None:
    arguments = ["--chat-template", "it's {{ 'quoted' }}\nin two lines", "--hf-overrides={'a': 'b c'}"]
    found = built(vllm={**VLLM, "extra_args": arguments}, env={"A_VARIABLE": "with 'quotes' and $dollars"})
    for paragraph, command in zip(as_shell(found).split("\n\n# "), found, strict=True):
        *lines, last = paragraph.replace("\\\n", " ").split("\nexport ")[-1].partition("\n")
        assert shlex.split(last or lines[0], comments=True) == ["exec", *command.argv]
    script = as_shell(found[1:]).replace("exec vllm serve", "env; : serve")
    shown = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env={"PATH": os.defpath})
    assert "A_VARIABLE=with 'quotes' and $dollars\n" in shown.stdout
    assert "PYTHONHASHSEED=0\n" in shown.stdout


def test_what_ends_a_script_ends_the_process_that_it_starts(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\necho $$\nread line\n")
    engine.chmod(0o755)
    script = tmp_path / "vllm.sh"
    script.write_text(as_shell(built(programs={"vllm": str(engine)})[1:]))
    with subprocess.Popen(["sh", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        assert int(shell.stdout.readline()) == shell.pid
        shell.terminate()
        assert shell.wait(10) == -signal.SIGTERM


def test_json_names_each_command_with_its_arguments_and_environment() -> None:
    found = as_json(built(lmcache={"cpu_gb": 8, "redis": {}}))
    assert [each["name"] for each in found] == ["lmcache", "agent", "vllm"]
    assert [each["needs"] for each in found] == [[], [], []]
    assert found[0]["argv"][:2] == ["lmcache", "server"]
    assert found[1]["env"] == {"KVGATE_REDIS_URL": "redis://127.0.0.1:6379/0"}
    assert json.loads(json.dumps(found)) == found


def test_a_password_among_a_urls_options_is_one_too() -> None:
    agent = built(redis={"url": "redis://h:6379/0?password=a-secret"})[0]
    assert (agent.env, list(agent.needs)) == ({}, ["KVGATE_REDIS_URL"])


@pytest.mark.parametrize("own", [False, True])
def test_a_password_is_never_printed_and_its_variable_is_asked_for(own: bool) -> None:
    chunks = {"url": SECRET_URL} if own else {}
    found = built(redis={"url": "redis://u:a%20secret@h:6379"}, lmcache={"cpu_gb": 8, "redis": chunks})
    for printed in (as_shell(found), json.dumps(as_json(found)), repr(found)):
        assert "secret" not in printed
    assert list(found[0].needs) == ["KVGATE_LMCACHE_URL" if own else "KVGATE_REDIS_URL"]
    assert list(found[1].needs) == ["KVGATE_REDIS_URL"]


def test_a_shell_stops_where_a_password_is_missing() -> None:
    found = built(redis={"url": SECRET_URL})
    script = as_shell(found[:1]).replace("exec kvgate agent", "echo started")
    without = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, env={})
    assert (without.returncode != 0, without.stdout) == (True, "")
    assert "KVGATE_REDIS_URL: the URL, with its password" in without.stderr
    given = {"KVGATE_REDIS_URL": SECRET_URL}
    assert "started" in subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=given).stdout


def test_the_server_logs_in_with_what_its_environment_says_and_never_has_the_password(tmp_path: Path) -> None:
    (tmp_path / "lmcache" / "cli").mkdir(parents=True)
    (tmp_path / "lmcache" / "cli" / "main.py").write_text(LMCACHE_MAIN)
    (tmp_path / "glide_sync.py").write_text(GLIDE)
    tier = {"cpu_gb": 8, "redis": {"url": SECRET_URL}, "disk": {"folder": "/chunks", "size_gb": 1}}
    server = built(lmcache=tier, programs={"lmcache_python": sys.executable})[0]
    env = {"PYTHONPATH": str(tmp_path), "KVGATE_LMCACHE_URL": SECRET_URL}
    shown = subprocess.run(server.argv, capture_output=True, text=True, check=True, env=env).stdout
    (program, *arguments), login = json.loads(shown)
    assert (program, arguments[0]) == ("lmcache", "server")
    _, redis = (json.loads(each) for each in arguments if each.startswith("{"))
    assert (redis["username"], redis["database_id"]) == ("chunks", 3)
    assert "password" not in redis
    assert login == {"username": "chunks", "password": "a secret\"'"}


def test_a_replica_that_listens_on_one_address_is_reached_there() -> None:
    agent = built(vllm={**VLLM, "host": "10.0.0.7", "port": 8001})[0]
    assert agent.argv[agent.argv.index("--url") + 1] == "http://10.0.0.7:8001"
