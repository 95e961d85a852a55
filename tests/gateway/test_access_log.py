"""The access log holds up no request, and counts what it could not write."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import orjson
import pytest

from gateway import access_log
from gateway.access_log import AccessLog, CannotWrite, check_target
from gateway.metrics.gateway_metrics import Metrics
from tests.polling import wait_until


def dropped(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value("kvgate_access_log_dropped_total") or 0


def test_lines_are_appended_and_all_are_there_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "_CLOSE_S", 60.0)  # a busy disk may take longer than its two seconds
    file, metrics = tmp_path / "access.log", Metrics()
    file.write_text("before\n")
    log = AccessLog(str(file), metrics.access_log_dropped)
    for number in range(500):
        log({"n": number})
    log.close()
    first, *lines = file.read_bytes().splitlines()
    assert first == b"before"
    assert [orjson.loads(line) for line in lines] == [{"n": number} for number in range(500)]


def test_a_pipe_that_nobody_reads_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.access_log._MOST_WAITING", 10)
    pipe, metrics = tmp_path / "pipe", Metrics()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = AccessLog(str(pipe), metrics.access_log_dropped)
    for _ in range(200):
        log({"long": "x" * 10_000})
    assert dropped(metrics) > 100
    os.set_blocking(reader, True)
    drain = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(reader, 2**16), b"")])
    drain.start()
    log.close()
    drain.join()
    os.close(reader)


def test_a_disk_that_is_full_loses_lines_that_are_counted(tmp_path: Path) -> None:
    metrics = Metrics()
    log = AccessLog("/dev/full", metrics.access_log_dropped)
    log({"n": 1})
    log({"n": 2})
    wait_until(lambda: dropped(metrics) == 2)
    log.close()


def test_a_file_that_cannot_be_opened_is_named_with_its_setting(tmp_path: Path) -> None:
    check_target(None)
    check_target("-")
    check_target(str(tmp_path / "new.log"))
    with pytest.raises(CannotWrite, match=r"log\.access_log: cannot append to .*No such file"):
        check_target(str(tmp_path / "gone" / "x.log"))


def test_a_file_that_was_renamed_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "_LOOK_S", 0)
    file, metrics = tmp_path / "access.log", Metrics()
    log = AccessLog(str(file), metrics.access_log_dropped)
    log({"n": 1})
    wait_until(lambda: file.exists() and b"1" in file.read_bytes())
    file.rename(tmp_path / "access.log.1")
    log({"n": 2})
    log.close()
    assert [path.read_bytes() for path in (tmp_path / "access.log.1", file)] == [b'{"n":1}\n', b'{"n":2}\n']


def test_what_waits_at_the_end_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the queue is so full that the end itself finds no place in it."""
    monkeypatch.setattr(access_log, "_MOST_WAITING", 2)
    pipe, metrics = tmp_path / "pipe", Metrics()
    os.mkfifo(pipe)
    log = AccessLog(str(pipe), metrics.access_log_dropped)  # it waits for a reader
    while not dropped(metrics):
        log({"n": 1})
    log.end()
    with pipe.open("rb") as reader:
        assert len(reader.read().splitlines()) >= 2
