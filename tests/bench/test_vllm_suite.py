"""What vLLM's own tests say about gateways: bench/vllm/suite/compare.py."""

from __future__ import annotations

import json
from pathlib import Path

from bench.vllm.suite.compare import NOT_RUN, Result, compare, read

PASSED, FAILED = Result("passed"), Result("failed", "assert 1 == 2")


def test_only_tests_that_pass_directly_can_differ() -> None:
    direct = {"a": PASSED, "b": FAILED, "c": Result("skipped")}
    verdict = compare(direct, dict.fromkeys(direct, FAILED), {})
    assert verdict.compared == 1
    assert [(each.test, each.through.why) for each in verdict.unexplained] == [("a", "assert 1 == 2")]
    assert not verdict.is_good


def test_a_test_that_did_not_run_through_a_gateway_differs() -> None:
    (difference,) = compare({"a": PASSED}, {}, {}).unexplained
    assert difference.through.outcome == NOT_RUN


def test_a_decision_explains_the_tests_of_its_pattern() -> None:
    tests = ("x.py::test_salt[a]", "x.py::test_salt[b]", "x.py::test_other")
    direct = dict.fromkeys(tests, PASSED)
    through = direct | {"x.py::test_salt[a]": FAILED}
    verdict = compare(direct, through, {"x.py::test_salt[a]": "why"})
    assert [each.reason for each in verdict.differences] == ["why"]
    assert verdict.is_good


def test_a_decision_that_explains_nothing_is_stale() -> None:
    verdict = compare({"a": PASSED}, {"a": PASSED}, {"a": "why"})
    assert verdict.stale == ("a",)
    assert not verdict.is_good


def test_nothing_that_passes_is_no_good() -> None:
    assert not compare({"a": FAILED}, {"a": FAILED}, {}).is_good


def test_a_test_whose_teardown_fails_has_failed(tmp_path: Path) -> None:
    outcomes = [("a", "direct", "passed", ""), ("a", "through", "passed", ""), ("a", "through", "failed", "late")]
    lines = [json.dumps(dict(zip(("test", "way", "outcome", "why"), each, strict=True))) for each in outcomes]
    file = tmp_path / "outcomes.jsonl"
    file.write_text("\n".join(lines))
    assert read([file]) == ({"a": PASSED}, {"a": Result("failed", "late")})
