"""`python -m deploy.grafana` writes dashboards/*.json from the descriptions in this folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from deploy.grafana.fleet import FLEET
from deploy.grafana.latency import LATENCY
from deploy.grafana.panels import Json
from deploy.grafana.queue import QUEUE
from deploy.grafana.routing import ROUTING
from deploy.grafana.store import STORE

_FOLDER = Path(__file__).parent / "dashboards"


def files() -> Iterator[tuple[Path, str]]:
    """Each dashboard's file, and its content."""
    for dashboard in (ROUTING, LATENCY, QUEUE, STORE, FLEET):
        yield _FOLDER / f"{dashboard.uid.removeprefix('kvgate-')}.json", _text(dashboard.form())


def _text(form: Json) -> str:
    """One line for each field and each panel, so that diffs are readable."""
    fields = []
    for name, value in form.items():
        text = json.dumps(value)
        if name == "panels":
            text = "[\n  " + ",\n  ".join(json.dumps(panel) for panel in value) + "\n ]"
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


if __name__ == "__main__":
    for file, text in files():
        file.write_text(text)
