"""The files with the rights to look up replicas: a gateway's, and a picker's."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.deploy.manifests import KUBERNETES
from tests.deploy.schemas import VERSIONS, problem

FILES = ("base/discovery-rbac.yaml", "picker/rbac.yaml")


def objects(file: str) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all((KUBERNETES / file).read_text())}


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_rights_lets_its_account_look_and_do_nothing_else(file: str) -> None:
    found = objects(file)
    assert [told for each in found.values() for version in VERSIONS if (told := problem(each, version))] == []
    account, role, binding = (found[kind] for kind in ("ServiceAccount", "Role", "RoleBinding"))
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"list", "watch"}
    assert not [rule for rule in role["rules"] if "*" in (*rule["apiGroups"], *rule["resources"])]
