"""Every route of the installed vLLM is decided on: it goes to a replica, the gateway itself answers it, or it is
refused and the reason is told."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from bench.vllm import install
from gateway.endpoints import ENDPOINTS, FOLDERS, OWN_PATHS, REFUSED
from gateway.request.paths import is_below

pytestmark = pytest.mark.vllm

METHODS = {"get", "post", "put", "patch", "delete", "head"}
ADDERS = {*METHODS, "websocket", "api_route", "add_api_route", "mount"}
OWN = {*OWN_PATHS, "/health", "/ready", "/version", "/metrics"}


def routes() -> set[str]:
    """The paths that vLLM's source gives to its routers. A server has only those of its model and flags."""
    (entrypoints,) = install.environment().glob("lib/python3*/site-packages/vllm/entrypoints")
    return {path for file in entrypoints.rglob("*.py") for path in _paths(file)}


def _paths(file: Path) -> set[str]:
    calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call) and node.args)
    named = {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in ADDERS and isinstance(call.args[0], ast.Constant)
    }
    return {re.sub(r"\{\w+\}", "any", path) for path in named if isinstance(path, str) and path.startswith("/")}


def test_every_route_of_vllm_is_decided_on() -> None:
    found = routes()
    assert {"/v1/chat/completions", "/v1/responses/any/cancel", "/collective_rpc", "/invocations"} <= found
    undecided = {
        path
        for path in found
        if path not in ENDPOINTS and not path.startswith(FOLDERS) and not is_below(path, REFUSED) and path not in OWN
    }
    assert not undecided, f"name these routes of vLLM {install.VERSION} in gateway/endpoints.py: {sorted(undecided)}"
