"""From the outcomes of vLLM's tests, directly and through gateways, to the list of what differs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
_ORDER = (FAILED, "skipped", PASSED)
"""A test has an outcome for its setup, its call and its teardown. The first of these that one of them has counts."""


@dataclass(frozen=True)
class Result:
    """The outcome of one test, and the line of its error."""

    outcome: str
    why: str = ""


@dataclass(frozen=True)
class Difference:
    """A test that passes directly and not through a gateway."""

    test: str
    through: Result
    reason: str
    """The decision that explains it; empty: no decision does."""


@dataclass(frozen=True)
class Verdict:
    compared: int
    """How many tests pass directly: only these say anything about gateways."""
    differences: tuple[Difference, ...]
    stale: tuple[str, ...]
    """Decisions that explain no difference. Their tests pass now, or do not run any more."""

    @property
    def unexplained(self) -> tuple[Difference, ...]:
        return tuple(each for each in self.differences if not each.reason)

    @property
    def is_good(self) -> bool:
        return self.compared > 0 and not self.unexplained and not self.stale


def read(files: Iterable[Path]) -> tuple[dict[str, Result], dict[str, Result]]:
    """The results in files of plugin.py's, by test: directly, and through a gateway."""
    results: dict[str, dict[str, Result]] = {"direct": {}, "through": {}}
    for file in files:
        for line in file.read_text().splitlines():
            told = json.loads(line)
            test, of_way = told["test"], results[told["way"]]
            result = Result(told["outcome"], told["why"])
            of_way[test] = min(of_way.get(test, result), result, key=lambda each: _ORDER.index(each.outcome))
    return results["direct"], results["through"]


def compare(direct: Mapping[str, Result], through: Mapping[str, Result], decisions: Mapping[str, str]) -> Verdict:
    """`decisions` are patterns of tests that may differ (`*` stands for any text), each with its reason."""
    passed = [test for test, result in direct.items() if result.outcome == PASSED]
    differences = tuple(
        Difference(test, result, decisions.get(_pattern_of(test, decisions), ""))
        for test in passed
        if (result := through.get(test, Result(NOT_RUN))).outcome != PASSED
    )
    used = {_pattern_of(each.test, decisions) for each in differences}
    return Verdict(len(passed), differences, tuple(pattern for pattern in decisions if pattern not in used))


def _pattern_of(test: str, patterns: Iterable[str]) -> str:
    # The bracket in a test's id is no set of characters.
    return next((each for each in patterns if fnmatchcase(test, each.replace("[", "[[]"))), "")
