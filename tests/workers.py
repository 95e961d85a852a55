"""Runs tests in several processes, with `-n 4`. They are forked when all tests are collected.

A worker that starts by itself would import all test files and collect all tests, like each other worker, and that takes
as long as hundreds of tests. Workers take groups of tests in order: `run_in_workers` is told which belong together.
"""

from __future__ import annotations

import io
import itertools
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import pytest
from _pytest._io import TerminalWriter

_WANTS, _STARTS, _REPORT, _FINISHES, _ENDED, _BROKEN = "wants", "starts", "report", "finishes", "ended", "broken"
"""What a worker tells: it wants a group of tests; a test starts, has a report, finishes; it has no more tests. The last
means that it is gone."""


_WORKERS_PER_CORE, _MOST_BEYOND = 3, 4
"""Tests wait more than they compute: with five workers on two cores a quarter of the time was idle."""
_LOOK_S = 0.5


def count_for_idle_cores() -> int:
    """How many workers keep those cores busy that nobody else uses now. More would only make tests late."""
    before = _times()
    Event().wait(_LOOK_S)
    idle, all_of_it = (after - earlier for after, earlier in zip(_times(), before, strict=True))
    cores = len(os.sched_getaffinity(0)) * (idle / all_of_it if all_of_it else 1)
    return max(2, round(min(_WORKERS_PER_CORE * cores, cores + _MOST_BEYOND)))


def _times() -> tuple[int, int]:
    """The time in which cores were idle, and all of it, in ticks; zeros where the system does not tell."""
    try:
        ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0, 0
    return ticks[3] + ticks[4], sum(ticks)


class Worker:
    """A forked process, seen from the process that collected the tests."""

    def __init__(self, session: pytest.Session, number: int, others: list[Worker]) -> None:
        self.number = number
        self.todo: deque[int] = deque()
        """The tests that it was given and has not ended: their places in `session.items`."""
        self.pipe, its_end = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _Work(session, its_end).run(number, [self, *others])
        its_end.close()

    def end(self) -> None:
        """Waits until it has cleaned up and ended."""
        self.pipe.close()
        os.waitpid(self.pid, 0)


def run_in_workers(session: pytest.Session, count: int, group_of: Callable[[pytest.Item], str]) -> None:
    """Runs the collected tests in forked processes. Tests in a row that have the same group run in one of them."""
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # workers have folders in it
    places = itertools.groupby(range(len(session.items)), lambda place: group_of(session.items[place]))
    groups = deque(list(group) for _, group in places)
    workers: list[Worker] = []
    try:
        for number in range(count):
            workers.append(Worker(session, number, workers))
        while workers:
            for pipe in wait([worker.pipe for worker in workers]):
                worker = next(worker for worker in workers if worker.pipe is pipe)
                told = _hear(session, worker, groups)
                if told in (_ENDED, _BROKEN):
                    workers.remove(worker)
                    worker.end()
                if told == _BROKEN and worker.todo:
                    _report_crash(session, session.items[worker.todo.popleft()])
                    if worker.todo:
                        groups.appendleft(list(worker.todo))
                    workers.append(Worker(session, worker.number, workers))
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        assert not groups, "all processes that run tests have ended"
    finally:
        for worker in workers:
            worker.end()


def _hear(session: pytest.Session, worker: Worker, groups: deque[list[int]]) -> str:
    """Reads one message, and returns what kind it is."""
    hook = session.config.hook
    try:
        kind, told = worker.pipe.recv()
        if kind == _WANTS:
            group = groups.popleft() if groups else []
            worker.todo.extend(group)
            worker.pipe.send(group)
    except (EOFError, ConnectionError):
        return _BROKEN
    if kind in (_STARTS, _FINISHES):
        item = session.items[worker.todo.popleft() if kind == _FINISHES else worker.todo[0]]
        tell = hook.pytest_runtest_logfinish if kind == _FINISHES else hook.pytest_runtest_logstart
        tell(nodeid=item.nodeid, location=item.location)
    elif kind == _REPORT:
        hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=session.config, data=told))
    return str(kind)


def _report_crash(session: pytest.Session, item: pytest.Item) -> None:
    text = f"the process that ran {item.nodeid} has ended"
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


class _Work:
    """What a forked process does."""

    def __init__(self, session: pytest.Session, pipe: Connection) -> None:
        self._session = session
        self._pipe = pipe

    def _make_own(self, config: Any, number: int, workers: list[Worker]) -> None:
        """What processes must not share: pipes, the terminal, captured output, temporary folders."""
        for worker in workers:
            worker.pipe.close()  # else it stays open when the process that collected the tests ends
        config.pluginmanager.get_plugin("terminalreporter")._tw = TerminalWriter(io.StringIO())
        capture = config.pluginmanager.get_plugin("capturemanager")
        if capture.is_globally_capturing():
            self._of_parent, capture._global_capturing = capture._global_capturing, None  # it is not closed
            capture.start_global_capturing()
            capture.suspend_global_capture()
        temporary = config._tmp_path_factory
        temporary._basetemp = temporary.getbasetemp() / f"worker-{number}"
        temporary._basetemp.mkdir(exist_ok=True)
        config.pluginmanager.register(self)

    def run(self, number: int, workers: list[Worker]) -> NoReturn:
        try:
            self._make_own(self._session.config, number, workers)
            given = self._given()
            item = next(given, None)
            while item is not None:
                following = next(given, None)  # fixtures that it shares are kept
                self._session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                item = following
            self._pipe.send((_ENDED, None))
        except (EOFError, ConnectionError, KeyboardInterrupt, pytest.exit.Exception):  # no more tests are wanted
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            with suppress(BaseException):
                self._session._setupstate.teardown_exact(None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _given(self) -> Iterator[pytest.Item]:
        while True:
            self._pipe.send((_WANTS, None))
            group = self._pipe.recv()
            if not group:
                return
            yield from (self._session.items[place] for place in group)

    def pytest_runtest_logstart(self) -> None:
        self._pipe.send((_STARTS, None))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._session.config
        told = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._pipe.send((_REPORT, told))

    def pytest_runtest_logfinish(self) -> None:
        self._pipe.send((_FINISHES, None))
