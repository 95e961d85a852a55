"""A pytest plugin for vLLM's tests: each test runs twice, and its second run reaches its server through a gateway.

vLLM's tests start their servers with one class, RemoteOpenAIServer, and ask it for its address. In the second run it
tells that of a gateway. The tests themselves are not changed. This file runs in vLLM's Python, without our packages.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

_REPOSITORY = Path(__file__).resolve().parents[3]
_WAYS = ("direct", "through")
_WAY_IN_ID = re.compile(r"\[way=\w+\]|-way=\w+(?=[-\]])|(?<=\[)way=\w+-")
_STOPS_WITHIN_S = 30
_RESETS_WITHIN_S = 30
_CONTEXT_TOKENS = 8192
_REPEATABLE = ("--override-generation-config", json.dumps({"temperature": 0, "repetition_penalty": 1.2}))
"""Both runs of a test get the same answers. The penalty keeps random weights from repeating one word for ever."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="a file for the outcomes, a JSON object a line")
    parser.addoption("--gateway-python", required=True, help="the interpreter of the gateways")


def pytest_sessionstart(session: pytest.Session) -> None:
    # Only this process needs pytest and this plugin. A server must not find other modules than usual.
    os.environ.pop("PYTHONPATH", None)
    server_class = importlib.import_module("tests.utils").RemoteOpenAIServer  # in the working directory

    _suit_to_cpus(server_class)
    _give_two_addresses(server_class, session.config.getoption("--gateway-python"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.fixturenames.append("way")
    metafunc.parametrize("way", _WAYS, ids=[f"way={way}" for way in _WAYS], indirect=True)


@pytest.fixture
def way(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Function) -> None:
    """Before the fixtures of a test, which make its client."""
    way = str(item.callspec.params["way"])
    item.user_properties.append(("way", way))
    _Servers.go(way)


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Each test has a report of its setup, its call and its teardown. A passed setup or teardown says nothing.
    if report.when == "call" or report.outcome != "passed":
        _Outcomes.write(report)


def pytest_configure(config: pytest.Config) -> None:
    _Outcomes.path = config.getoption("--outcomes")


class _Outcomes:
    path: Path

    @classmethod
    def write(cls, report: pytest.TestReport) -> None:
        way = dict(report.user_properties).get("way", _WAYS[0])
        test = _WAY_IN_ID.sub("", report.nodeid)
        with cls.path.open("a") as file:
            file.write(json.dumps({"test": test, "way": way, "outcome": report.outcome, "why": _why(report)}) + "\n")


def _why(report: pytest.TestReport) -> str:
    """The line of the error, not its traceback."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if crash is None else str(crash.message).partition("\n")[0]


class _Servers:
    """The servers that run, and the way to them."""

    way = _WAYS[0]
    running: ClassVar[list[Any]] = []

    @classmethod
    def go(cls, way: str) -> None:
        cls.way = way
        for server in cls.running:
            server.host, server.port = server.addresses["direct"]
            # Some tests expect that nobody has sent their prompt before.
            httpx.post(server.url_for("reset_prefix_cache"), timeout=_RESETS_WITHIN_S)
            server.host, server.port = server.addresses[way]


def _suit_to_cpus(server_class: Any) -> None:
    start = server_class._start_server

    def start_suited(server: Any, model: str, arguments: list[str], env: dict[str, str] | None) -> None:
        # The class spawns engines because of CUDA. A forked engine saves half of the start. A test may still choose.
        start(server, model, [*arguments, *_suited(arguments)], {"VLLM_WORKER_MULTIPROC_METHOD": "fork"} | (env or {}))

    server_class._start_server = start_suited


def _suited(arguments: list[str]) -> list[str]:
    """Options that end a command. The last one of a name counts."""
    # Compiling takes a minute, and some tests leave it on.
    eager = [] if "--enforce-eager" in arguments else ["--enforce-eager"]
    # Random weights seldom end an answer. Some tests set no limit.
    given = [int(value) for name, value in pairwise(arguments) if name in ("--max-model-len", "--max_model_len")]
    return [*eager, *_REPEATABLE, "--max-model-len", str(min([_CONTEXT_TOKENS, *given]))]


def _give_two_addresses(server_class: Any, python: str) -> None:
    init, shutdown = server_class.__init__, server_class._shutdown

    def start_with_gateways(server: Any, model: str, vllm_serve_args: list[str], **options: Any) -> None:
        server.gateways = None
        init(server, model, vllm_serve_args, **options)  # returns when the server is healthy
        if server.uds is None:
            server.gateways = _start_gateways(python, server.url_root, vllm_serve_args)
            through = ("127.0.0.1", int(server.gateways.stdout.readline()))
            server.addresses = {"direct": (server.host, server.port), "through": through}
            _Servers.running.append(server)
            _Servers.go(_Servers.way)

    def stop_both(server: Any) -> None:
        if server.gateways is not None:
            server.gateways.stdin.close()
            server.gateways.wait(_STOPS_WITHIN_S)
            server.gateways = None
        if server in _Servers.running:
            _Servers.running.remove(server)
        shutdown(server)

    server_class.__init__ = start_with_gateways
    server_class._shutdown = stop_both


def _start_gateways(python: str, url: str, arguments: list[str]) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "HF_"))}
    if "--api-key" in arguments:
        env["KVGATE_REPLICA_API_KEY"] = arguments[arguments.index("--api-key") + 1]
    return subprocess.Popen(
        [python, "-m", "bench.vllm.suite.gateways", url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        cwd=_REPOSITORY,
    )
