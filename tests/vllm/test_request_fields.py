"""No field of vLLM's requests reaches an engine without a decision in request_fields.py."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.vllm import install
from bench.vllm.server import environment
from gateway.endpoints import ENDPOINTS, endpoint_of
from tests.vllm.request_fields import OVERWRITTEN, PASSED, PATHS, REFUSED, STRIPPED, WITHOUT_ENGINE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PRINTER = Path(__file__).with_name("print_request_fields.py")
RECORD = "tests/vllm/request_fields.py"


@dataclass(frozen=True)
class Field:
    """One row of print_request_fields.py."""

    path: str
    model: str
    field: str
    type: str
    description: str


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> list[Field]:
    """The fields of vLLM's requests on every path that a gateway passes to an engine."""
    command = (install.python(), "-P", PRINTER)
    folder = tmp_path_factory.mktemp("vllm")
    printed = subprocess.run(command, env=environment(folder), capture_output=True, text=True, check=False)
    assert printed.returncode == 0, printed.stderr
    found = [Field(**row) for row in json.loads(printed.stdout.splitlines()[-1])]
    passed = [row for row in found if row.path in ENDPOINTS]
    return [row for row in passed if row.path not in WITHOUT_ENGINE]


def test_what_a_gateway_does_with_every_field_of_vllms_requests_is_decided(fields: list[Field]) -> None:
    decided = STRIPPED | REFUSED | OVERWRITTEN.keys() | PASSED
    undecided = {row.field: row for row in fields if row.field not in decided}
    assert not undecided, "\n".join(
        [
            f"nobody has decided about {len(undecided)} field(s) of vLLM {install.VERSION}; {RECORD} says how to:",
            *(
                f"- {row.field} (first seen in {row.model}, {row.path}), {row.type}:"
                f" {row.description or 'vLLM does not describe it'}"
                for row in undecided.values()
            ),
        ]
    )


def test_every_path_of_vllms_that_a_gateway_passes_has_been_read(fields: list[Field]) -> None:
    unread = {row.path: row.model for row in fields if row.path not in PATHS}
    assert not unread, f"read what vLLM {install.VERSION} does there, then name it in {RECORD}: {unread}"


def test_a_tenants_salt_is_added_on_the_paths_whose_engine_reads_it(fields: list[Field]) -> None:
    salted = {row.path for row in fields if row.field == "cache_salt"}
    wrong = {row.path for row in fields if endpoint_of(row.path).takes_cache_salt != (row.path in salted)}
    assert not wrong, "mend takes_cache_salt in gateway/endpoints.py"


def test_each_field_is_decided_once() -> None:
    assert not STRIPPED & OVERWRITTEN.keys()
    assert not STRIPPED & PASSED
    assert not OVERWRITTEN.keys() & PASSED


def test_the_printer_finds_the_models_of_every_prompt_and_what_is_inside_them(fields: list[Field]) -> None:
    """If vLLM moved the models where the printer does not look, the tests above would pass without checking them."""
    assert {row.path for row in fields} >= {path for path, endpoint in ENDPOINTS.items() if endpoint.prompt is not None}
    known = {"session_id", "cache_salt", "stream_options.include_usage", "content.uuid"}
    assert known <= {row.field for row in fields}
