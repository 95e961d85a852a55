"""How the tests run: which tests share a worker, which are skipped and why."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter
from hypothesis import HealthCheck, settings

from bench import cluster
from tests import forked, workers
from tests.leftovers import watch_this_run
from tests.programs import missing

# Each HTTP client loads the certificate authorities that it trusts. Loading the system's authorities takes 30 ms.
# The tests only call their own servers, so one authority is enough. Its private key was thrown away.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("authority.pem"))

# Examples have no time limit: a busy machine takes longer to generate and to run them. Function-scoped fixtures
# (clusters) are shared by all examples on purpose. Examples are the same in each run. `make test-slow` takes others.
NOT_CHECKED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("others", deadline=None, suppress_health_check=NOT_CHECKED)
settings.register_profile("same", settings.get_profile("others"), derandomize=True)
settings.load_profile("same")

SHARED = ("tests/chaos/test_truth_", "tests/chaos/", "tests/api/", "tests/deploy/")
"""Files whose paths begin with the same entry share clusters, or what takes seconds to import."""
_OWN = {
    "chaos": "budgets dead_hosts hedges operations past_decisions queue resumed_messages resumed_streams "
    "slot_migration tenant_limits",
    "cluster": "added_replicas agreement both_tiers doctor file_keys key_limits keys_in_redis namespaces pairs "
    "plain_backlog records_secret reload tiers usage wall_clocks",
}
APART = tuple(f"tests/{folder}/test_{name}.py" for folder, names in _OWN.items() for name in names.split())
"""Files with clusters of their own. With them, one worker would be busy longer than it takes to run all other tests."""
FIRST = (*SHARED, *APART, "tests/cluster/", "tests/gateway/ops/cli/")
"""These files run first, because they take longest."""


SELDOM = {
    "gateway.metrics.loop_lag.INTERVAL_S": 0.1,
    "coordinator.redis.time_limit._FADES": 0.95,
    "coordinator.watch.watch_session.SAMPLES_PER_S": 30,
    "coordinator.watch.watch_session.TICK_S": 0.3,
    "coordinator.watch.watcher.TICK_S": 0.3,
}
"""What gateways do many times a second while they have no requests. In hundreds of gateways that wait for a test to go
on, it is much of what a test run computes."""

ELSEWHERE = {
    "slow": "make test-slow",
    "older_redis": "make test-programs",
    "vllm": "make test-vllm",
    "lmcache": "make test-lmcache",
    "compose": "make compose-test",
    "clients": "make test-clients",
}
"""Markers of tests that a plain `pytest` leaves out, and the commands that run them."""


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def group_of(file: str) -> str:
    """The longest entry of FIRST with which the path of a file begins; else the path."""
    return max((name for name in FIRST if file.startswith(name)), key=len, default=file)


def worker_of(item: pytest.Item) -> str:
    """Tests that have the same answer run on the same worker, in order: those that share clusters, and those of one
    file."""
    file = file_of(item.nodeid)
    group = group_of(file)
    return group if group in SHARED else file


def pytest_addoption(parser: pytest.Parser) -> None:
    how = "run tests in so many processes; 0: in this one; auto: three for each core that is idle now"
    parser.getgroup("kvgate")._addoption("-n", "--numprocesses", default="0", metavar="N", help=how)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    text = session.config.getoption("numprocesses")
    count = workers.count_for_idle_cores() if text == "auto" else int(text)
    if not count or session.testsfailed or session.config.getoption("collectonly"):
        return None
    workers.run_in_workers(session, count, worker_of)
    return True


def pytest_configure(config: pytest.Config) -> None:
    watch_this_run()
    forked.use_it()
    forked.read_version_once()
    seldom = forked.constants(SELDOM)
    seldom.__enter__()
    config.add_cleanup(lambda: seldom.__exit__(None, None, None))
    of_others = cluster.command_of
    cluster.command_of = lambda pid: forked.command_of(pid) or of_others(pid)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Turns the garbage collector off during collection: it takes a quarter of the time and frees nothing, as modules
    and tests stay alive."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        forked.wait_for_it()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(group_of(file_of(item.nodeid)), len(FIRST)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if reason := missing(name):
                pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Prints one line for each reason why tests were skipped or left out."""
    left_out = terminalreporter.stats.get("deselected", ())
    for name, command in ELSEWHERE.items():
        if count := sum(item.get_closest_marker(name) is not None for item in left_out):
            terminalreporter.write_line(f"{count} not run, {name}: {command}")
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
