"""Free ports, and the locks that keep two clusters apart."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gateway.ops.errors import CommandError
from gateway.ops.local import ports
from gateway.ops.local.ports import describe_holder, lock_port, lock_state_dir, require_free
from gateway.ops.local.processes import Children, wait_until


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_a_locked_port_names_its_holder_and_the_way_out(tmp_path: Path) -> None:
    lock = lock_port(8080, Path("/first"))
    with pytest.raises(CommandError) as caught:
        lock_port(8080, Path("/second"))
    assert str(caught.value) == (
        f"port 8080 belongs to the cluster of pid {os.getpid()} (state dir /first): stop that with "
        "`kvgate down --state-dir /first`, or choose another port with --port"
    )
    os.close(lock)


async def test_a_lock_is_held_until_the_last_inheriting_process_is_gone(tmp_path: Path) -> None:
    lock = lock_state_dir(tmp_path)
    children = Children(os.environ, die_with_parent=False)
    children.inherit([lock])
    child = children.start("gateway", "gw0", [sys.executable, "-c", "import signal; signal.pause()"], tmp_path / "log")
    describe_holder(lock, [child.pid], tmp_path)
    os.close(lock)
    try:
        with pytest.raises(CommandError, match=f"belongs to the cluster of pid {child.pid} "):
            lock_state_dir(tmp_path)
    finally:
        child.signal(signal.SIGKILL)
        assert await wait_until(lambda: not child.is_alive(), 20)
        children.newly_exited()  # reaps it
    os.close(lock_state_dir(tmp_path))


def test_a_lock_file_is_never_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CommandError, match="cannot open the lock file"):
        lock_state_dir(tmp_path)


def test_a_port_that_something_listens_on_is_refused_even_if_it_shares() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(CommandError, match="cannot be listened on"):
            require_free("127.0.0.1", other.getsockname()[1])


def test_what_one_was_given_and_does_not_use_yet_nobody_else_is_given() -> None:
    code = "from gateway.ops.local.ports import free_ports; print(*free_ports(40))"
    environment = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    begun = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    given = [port for each in begun for port in each.communicate()[0].split()]
    assert len(set(given)) == len(given) == 3 * 40


def test_whoever_keeps_others_from_ports_is_named_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ports.free_ports(1)
    monkeypatch.setattr(ports, "_PATIENCE_S", 0.0)
    with (tmp_path / "kvgate-last-port").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CommandError, match=f"another process has locked {tmp_path}/kvgate-last-port"):
            ports.free_ports(1)
    assert ports.free_ports(1)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_all_users_may_lock_a_port_and_only_its_owner_a_state_dir(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for lock in (lock_port(8080, tmp_path), lock_state_dir(tmp_path)):
            os.close(lock)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"kvgate-port-8080.lock": 0o666, "lock": 0o600}
