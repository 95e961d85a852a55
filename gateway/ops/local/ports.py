"""Ports for the local cluster, and the locks that keep two clusters apart.

Gateways share a port with SO_REUSEPORT, so a second cluster on the same port would start without an error and take
half of the first one's connections. So each port has a lock file, in the system's temporary directory, where every
cluster of this machine looks; each state directory has one, too.

Locks are flocks that the cluster's processes inherit: they end when the last process is gone, for whatever reason.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from gateway.ops.errors import CommandError

# Below Linux' ephemeral ports: no outgoing connection takes a port between this check and the child's bind.
_PORTS = range(20_000, 32_000)
_OF_ALL_USERS, _OF_ITS_OWNER = 0o666, 0o600
_PATIENCE_S, _LOOK_S = 10.0, 0.01
"""Ports are found within milliseconds. Whoever holds their file for longer was stopped."""


def lock_port(port: int, state_dir: Path) -> int:
    """Lock `port` for the cluster in `state_dir`: a file that stays open. CommandError says which cluster holds it."""
    path = Path(tempfile.gettempdir()) / f"kvgate-port-{port}.lock"
    return _lock(_open(path, _OF_ALL_USERS), f"port {port}", "another port with --port", state_dir)


def lock_state_dir(state_dir: Path) -> int:
    """The same for `state_dir`."""
    fd = _open(state_dir / "lock", _OF_ITS_OWNER)
    return _lock(fd, f"state dir {state_dir}", "another with --state-dir", state_dir)


def _lock(fd: int, what: str, alternative: str, state_dir: Path) -> int:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid, holder_dir = _read_holder(fd)
        os.close(fd)
        raise CommandError(
            f"{what} belongs to the cluster of pid {pid} (state dir {holder_dir}): stop that with "
            f"`kvgate down --state-dir {holder_dir}`, or choose {alternative}"
        ) from None
    describe_holder(fd, [os.getpid()], state_dir)
    return fd


def describe_holder(lock: int, pids: Iterable[int | None], state_dir: Path) -> None:
    """Write who holds a lock: the pids of the processes that inherit it, the most useful one first."""
    _replace(lock, json.dumps({"pids": list(pids), "state_dir": str(state_dir)}))


def _replace(fd: int, text: str) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode(), 0)


def _open(path: Path, mode: int) -> int:
    """Open or create a lock file. Every user may lock that of a port, since all users share the machine's ports."""
    try:
        try:
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT, mode)
            os.fchmod(fd, mode)  # the umask has removed some of these bits
            return fd
    except OSError as error:
        raise CommandError(f"cannot open the lock file {path}: {error.strerror}; remove it") from None


def _read_holder(fd: int) -> tuple[int | str, str]:
    try:
        holder = json.loads(os.pread(fd, 65_536, 0))
        pids, state_dir = holder["pids"], holder["state_dir"]
    except (ValueError, KeyError, TypeError):
        return "unknown", "unknown"
    return next((pid for pid in pids if Path(f"/proc/{pid}").exists()), "unknown"), state_dir


def require_free(host: str, port: int) -> None:
    """Raises CommandError if something listens on the port. Lock the port first."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection in TIME_WAIT is no listener
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CommandError(
                f"port {port} on {host} cannot be listened on ({error.strerror}): stop what uses it "
                f"(`ss -ltnp sport = :{port}` names it), or choose another with --port"
            ) from None


def free_ports(count: int, host: str = "127.0.0.1", excluded: int | None = None) -> list[int]:
    """Distinct ports that nothing listens on.

    All processes that share a temporary folder go through the ports in turn, so that no other process gets a port
    before its owner binds it, or while its owner restarts. Without that folder, the search begins at a random port.
    """
    fd, first, path = None, random.randrange(len(_PORTS)), Path(tempfile.gettempdir()) / "kvgate-last-port"
    with suppress(CommandError):
        fd = _open(path, _OF_ALL_USERS)
    try:
        if fd is not None:
            _wait_for(fd, path)  # it is locked until it is closed
            with suppress(OSError, ValueError):
                first = _PORTS.index(int(os.pread(fd, 16, 0))) + 1
        in_turn = (_PORTS[(first + n) % len(_PORTS)] for n in range(len(_PORTS)))
        ports = list(islice((port for port in in_turn if port != excluded and is_free(host, port)), count))
        if len(ports) < count:
            raise CommandError(f"no {count} free ports between {_PORTS.start} and {_PORTS.stop} on {host}")
        if fd is not None and ports:
            with suppress(OSError):
                _replace(fd, str(ports[-1]))
        return ports
    finally:
        if fd is not None:
            os.close(fd)


def _wait_for(fd: int, path: Path) -> None:
    """Lock a file that others lock for a moment. Raises CommandError if it takes too long."""
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise CommandError(
                    f"cannot look for free ports: another process has locked {path} for {_PATIENCE_S:g} s; end it "
                    f"(`fuser -v {path}` names it), or remove the file"
                ) from None
        except OSError:
            return None  # there are no locks in this folder
        threading.Event().wait(_LOOK_S)


def is_free(host: str, port: int) -> bool:
    """Whether nothing is bound to the port."""
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
