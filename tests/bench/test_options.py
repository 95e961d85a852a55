"""A benchmark refuses a bad option before it starts anything, and names the option."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

REFUSED = [
    (("bench.routing", "--mixes", "nonsense"), "--mixes: 'nonsense' is none of images,"),
    (("bench.routing", "--seeds", "x"), "--seeds: whole numbers from 1, separated by commas, not 'x'"),
    (("bench.routing", "--speed", "0"), "--speed: a number above 0, not '0'"),
    (("bench.routing", "--real", "--mixes", "images"), "the mixes that can: vqa, chat"),
    (("bench.replay", "x.jsonl", "--window", "9-1"), "--window: seconds of the recording, as in 600-1200, not '9-1'"),
    (("bench.replay", "x.jsonl", "--tokens-per-block", "20"), "a multiple of the engines' 16 tokens, not '20'"),
    (("bench.overhead", "--rates", "100,0"), "--rates: a number above 0, not '0'"),
    (("bench.overhead", "--connections", "8,x"), "--connections: whole numbers from 1, separated by commas, not '8,x'"),
    (("bench.store", "--keys", "1,2"), "--keys: one whole number from 1, not '1,2'"),
]


@pytest.mark.parametrize(("command", "message"), REFUSED, ids=lambda each: " ".join(each) if len(each) < 5 else None)
def test_a_bad_option_is_named(
    command: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *options = command
    place = module if find_spec(module).submodule_search_locations is None else f"{module}.__main__"
    benchmark = import_module(place)
    monkeypatch.setattr(sys, "argv", [module, *options])
    monkeypatch.setattr("bench.record.begin", lambda: None)  # it installs signal handlers for a benchmark
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
