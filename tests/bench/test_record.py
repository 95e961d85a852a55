"""The common part of every benchmark's command."""

from __future__ import annotations

import pytest

from bench import record


@pytest.mark.parametrize("is_optimised", [True, False])
def test_a_benchmark_warns_of_a_python_without_optimisation_and_its_results_name_it(
    is_optimised: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.record.is_optimised", lambda: is_optimised)
    monkeypatch.setattr("bench.machine.is_optimised", lambda: is_optimised)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    record.machine.cache_clear()
    record.begin()
    said = record.machine()["python"]
    record.machine.cache_clear()
    assert ("built without optimisation" in capsys.readouterr().err) is not is_optimised
    assert said.endswith("(optimised)" if is_optimised else "(not optimised)")
