"""What vLLM's own tests say about gateways: bench/vllm/suite/compare.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.vllm.suite.compare import NOT_RUN, Result, compare, read

PASSED, FAILED = Result("passed"), Result("failed", "assert 1 == 2")


def test_only_tests_that_pass_directly_can_differ() -> None:
    direct = {"a": PASSED, "b": FAILED, "c": Result("skipped"), "d": PASSED}
    verdict = compare(direct, dict.fromkeys("abc", FAILED), {})
    assert verdict.compared == 2
    assert [(each.test, each.through) for each in verdict.unexplained] == [("a", FAILED), ("d", Result(NOT_RUN))]
    assert not verdict.is_good


def test_a_decision_explains_the_tests_of_its_pattern() -> None:
    tests = ("x.py::test_salt[a]", "x.py::test_salt[b]", "x.py::test_other")
    direct = dict.fromkeys(tests, PASSED)
    through = direct | {"x.py::test_salt[a]": FAILED}
    verdict = compare(direct, through, {"x.py::test_salt[a]": "why"})
    assert [each.reason for each in verdict.differences] == ["why"]
    assert verdict.is_good


@pytest.mark.parametrize("outcome", [PASSED, FAILED], ids=["a decision that explains nothing", "nothing that passes"])
def test_it_is_no_good(outcome: Result) -> None:
    verdict = compare({"a": outcome}, {"a": outcome}, {"a": "why"})
    assert verdict.stale == ("a",)
    assert not verdict.is_good


def test_a_test_whose_teardown_fails_has_failed(tmp_path: Path) -> None:
    outcomes = [("a", "direct", "passed", ""), ("a", "through", "passed", ""), ("a", "through", "failed", "late")]
    lines = [json.dumps(dict(zip(("test", "way", "outcome", "why"), each, strict=True))) for each in outcomes]
    file = tmp_path / "outcomes.jsonl"
    file.write_text("\n".join(lines))
    assert read([file]) == ({"a": PASSED}, {"a": Result("failed", "late")})
