"""The schemas of the Gateway API accept deploy/kubernetes/gateway-api."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Sequence

import pytest

from tests.deploy.manifests import Document
from tests.deploy.test_gateway_api import CLASSES, objects
from tests.fit import install

pytestmark = pytest.mark.fit


def problems(found: Sequence[Document]) -> list[str]:
    node = install.program("node")
    assert node is not None
    command = [node, str(install.project() / "validate.js")]
    done = subprocess.run(command, input=json.dumps(found), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", CLASSES)
def test_every_object_is_valid(name: str) -> None:
    found = [each for each in objects(name) if each["apiVersion"].startswith("gateway.networking.k8s.io/")]
    assert [each["kind"] for each in found] == ["Gateway", "HTTPRoute"]
    assert problems(found) == []
    wrong = copy.deepcopy(found)
    wrong[0]["spec"]["listeners"][0]["port"] = "http"
    del wrong[1]["spec"]["rules"][0]["backendRefs"][0]["name"]
    assert len(problems(wrong)) == 2
