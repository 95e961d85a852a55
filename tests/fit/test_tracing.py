"""A tracing backend shows a gateway's spans: docs/how-to/tracing.md, typed as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.ops.local.ports import free_ports
from tests.documents import example, typing
from tests.fit import install
from tests.polling import wait_until

pytestmark = pytest.mark.fit


def spans_of(phoenix: str) -> dict[str, Any]:
    """The spans of the newest trace that has ended, by name. None while there is none."""
    answer = httpx.get(f"{phoenix}/v1/projects/default/spans", trust_env=False)
    return {span["name"]: span for span in answer.json().get("data", ())}


def test_phoenix_shows_the_spans_of_a_request(tmp_path: Path) -> None:
    gateways, phoenix = map(str, free_ports(2))
    installing, *typed, down, kill = example("how-to/tracing.md", "A first trace", {"8080": gateways, "6006": phoenix})
    assert installing.endswith("pip install arize-phoenix")
    (tmp_path / "phoenix").symlink_to(install.home())
    with typing(tmp_path, typed, [down, kill], within_s=180):
        url = f"http://127.0.0.1:{phoenix}"
        wait_until(lambda: "relay" in spans_of(url) and "chat sim" in spans_of(url), within_s=60)
        found = spans_of(url)
    whole = found["chat sim"]
    assert whole["attributes"]["gen_ai.request.model"] == "sim"
    assert whole["attributes"]["gen_ai.usage.input_tokens"] > 0
    assert {found[name]["parent_id"] for name in ("place", "attempt")} == {whole["context"]["span_id"]}
