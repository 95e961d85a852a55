"""The schemas of the Gateway API and of GKE accept deploy/kubernetes/gateway-api."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Sequence

import pytest

from tests.deploy.manifests import Document
from tests.deploy.test_gateway_api import ALL, ELSEWHERE, objects
from tests.fit import install

pytestmark = pytest.mark.fit


def problems(found: Sequence[Document]) -> list[str]:
    node = install.program("node")
    assert node is not None
    command = [node, str(install.project() / "validate.js")]
    done = subprocess.run(command, input=json.dumps(found), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ALL)
def test_every_object_is_valid(name: str) -> None:
    found = [each for each in objects(name) if each["apiVersion"].startswith(ELSEWHERE)]
    assert {"Gateway", "HTTPRoute"} <= {each["kind"] for each in found}
    assert problems(found) == []
    for each in found:
        wrong = copy.deepcopy(each)
        match wrong["kind"]:
            case "Gateway":
                wrong["spec"]["listeners"][0]["port"] = "http"
            case "HTTPRoute":
                del wrong["spec"]["rules"][0]["backendRefs"][0]["name"]
            case _:
                wrong["spec"]["default"]["timeoutSec"] = "960s"
        assert len(problems([wrong])) == 1, wrong
