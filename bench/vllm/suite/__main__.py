"""Runs vLLM's own API tests directly and through gateways, and prints what differs: `python -m bench.vllm.suite`.

Each test runs twice, on the same server. It counts only if it passes directly: other tests need a GPU, a real model or
the internet. Exits with 1 if a test passes directly and not through a gateway and no decision in selection.py explains
it, or if a decision explains nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.vllm import install as vllm
from bench.vllm.server import die_with_this_process, environment
from bench.vllm.suite import install
from bench.vllm.suite.compare import Result, Verdict, compare, read
from bench.vllm.suite.selection import DECISIONS, FILES

_REPOSITORY = Path(__file__).resolve().parents[3]
_PROCESSES = 2
"""A server of vLLM's keeps one core busy."""
_TEST_TIMEOUT_S = 180  # with the start of its server


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm.suite", description=__doc__)
    parser.add_argument("tests", nargs="*", help="only these of vLLM's tests, as in selection.py (default: all)")
    parser.add_argument("--logs", type=Path, help="keep pytest's output and the outcomes in this folder")
    options = parser.parse_args(argv)
    install.install()
    with tempfile.TemporaryDirectory(prefix="kvgate-suite-") as temporary:
        folder = Path(options.logs or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        tests = options.tests or FILES
        print(
            f"running {len(tests)} of vLLM's files, directly and through gateways; the logs are in {folder}", flush=True
        )
        started = time.monotonic()
        direct, through = run(folder, "first", tests)
        verdict = compare(direct, through, DECISIONS)
        if verdict.unexplained:
            # Some answers are random, and the cores are busy: only what differs twice is a difference.
            again = run(folder, "again", sorted({each.test.partition("[")[0] for each in verdict.unexplained}))
            verdict = compare(direct | again[0], through | again[1], DECISIONS)
        print(f"{(time.monotonic() - started) / 60:.0f} minutes\n{told(verdict, len(direct), bool(options.tests))}")
    return 0 if verdict.is_good or (options.tests and not verdict.unexplained) else 1


def run(folder: Path, name: str, tests: Sequence[str]) -> tuple[dict[str, Result], dict[str, Result]]:
    """The results of these tests, directly and through gateways. Each of the processes runs a part of them."""
    parts = [part for part in (tests[n::_PROCESSES] for n in range(_PROCESSES)) if part]
    runs = [_Run(folder / f"{name}-{n}", part) for n, part in enumerate(parts)]
    return read([each.outcomes() for each in runs])


def told(verdict: Verdict, run: int, is_part: bool) -> str:
    """The verdict as text. After a part of the tests, nothing is said about decisions that explain nothing."""
    lines = [f"{run} tests ran, {verdict.compared} of them pass directly, {len(verdict.differences)} of these differ"]
    for each in verdict.differences:
        said = f"{each.through.outcome}: {each.through.why}"
        lines += [f"  {'decided' if each.reason else 'DIFFERS'}  {each.test}", f"           {each.reason or said}"]
    stale = () if is_part else verdict.stale
    lines += [f"  STALE    {pattern}: explains no difference; remove it from selection.py" for pattern in stale]
    return "\n".join(lines)


class _Run:
    """One process of pytest, in the background."""

    def __init__(self, path: Path, tests: Sequence[str]) -> None:
        self._outcomes, self._log = path.with_suffix(".jsonl"), path.with_suffix(".log")
        self._outcomes.write_text("")
        # With `=`: pytest would take a separate value for the path of a test, and look for its configuration there.
        options = [f"--outcomes={self._outcomes}", f"--gateway-python={sys.executable}", f"--timeout={_TEST_TIMEOUT_S}"]
        plugged = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "bench.vllm.suite.plugin", "--durations=30")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*die_with_this_process(), "nice", vllm.python(), *plugged, *options, *tests],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=install.home(),
                env=_environment(path.parent),
            )

    def outcomes(self) -> Path:
        """The file of its outcomes, when it has ended."""
        code = self._process.wait()
        if code not in (0, 1):  # 1: some tests failed
            sys.exit(f"pytest ended with {code}; its output ends with\n{self._log.read_text()[-2000:]}")
        return self._outcomes


def _environment(folder: Path) -> dict[str, str]:
    return environment(folder) | {
        "HF_HUB_CACHE": str(install.models()),
        # Some functions compile at their first call, even in eager mode, which takes a minute.
        "TORCHDYNAMO_DISABLE": "1",
        # The tests start `vllm`.
        "PATH": f"{vllm.python().parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{install.packages()}:{_REPOSITORY}",
    }


if __name__ == "__main__":
    sys.exit(main())
