"""Starts `kvgate` commands quickly: a server process has imported everything, and forks one process for each command.

    python -P tests/forked.py SOCKET    serves until its stdin ends

A test run starts hundreds of gateways, agents and simulated replicas. Each would import for a second, which is most of
what it computes. `use_it` makes `subprocess.Popen` ask the server for them. All else is as with a process that was
started: its pid, its streams, its environment, its session, its end. (`ps` and /proc show the server's command line;
`command_of` tells the right one.) A `kvgate up` and `bench.fleet` start their processes in the same way. Those that end
with a `kvgate up` are forked by it, because the kernel watches parents only. tests/forked_kvgate.py is for shells.

`constants` gives other values to constants of the processes that are started meanwhile: shorter times, most often.
"""

from __future__ import annotations

import asyncio.unix_events
import functools
import gc
import importlib
import inspect
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import redis.utils
import typer.main

_PYTHON = (sys.executable, "-P")
KVGATE = (*_PYTHON, "-m", "gateway.ops.cli")
GLASS_REPLICA = (*_PYTHON, str(Path(__file__).with_name("chaos") / "glass_replica.py"))
_FLEET = (sys.executable, "-m", "bench.fleet")
_STEPPED = (sys.executable, "-m", "tests.cluster.stepped_wall_clock")
_PROGRAMS = (KVGATE, GLASS_REPLICA, _FLEET, _STEPPED)
_STARTS_OTHERS = (["kvgate", "up"], ["bench.fleet"])
"""The first words of commands that start processes: these are forked, too."""
_IMPORTED = (
    "anyio._backends._asyncio",
    "encodings.idna",
    "httpcore",
    "rich.live",
    "typer._adapters",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "uvloop",
)
"""What processes import late, besides all modules of `_PACKAGES`."""
_PACKAGES = ("coordinator", "gateway")
_NOT_FORKED = "gateway.picker"
_PICKER = (*KVGATE, "picker")
"""gRPC does not survive a fork, so a picker is started as always, and imports it by itself."""
_BOUND = (*_PYTHON, "-m", "gateway.ops.local.bound_process")
"""With the pid of its parent and another command: runs that until the parent ends."""
_CONSTANTS = "TESTED_CONSTANTS"
"""The variable that tells a process which constants have other values."""
_SOCKET = "KVGATE_FORK_SERVER"
"""The variable that names the socket of the server."""
_STATUS = struct.Struct("!i")
_MAX_FDS = 16
_server = ""
"""The path of the server's socket; empty if this process starts commands itself."""


class ForkedPopen(subprocess.Popen[Any]):
    """A process that is forked if it runs one of `_PROGRAMS`; else one that is started as always."""

    _status: socket.socket | None = None
    """The server writes here how the process ended."""

    def _execute_child(self, args: Any, *details: Any) -> None:
        command = [args] if isinstance(args, str | bytes | os.PathLike) else [os.fspath(each) for each in args]
        parent, command = _parent_of(command)
        unset, command = _unset_by(command)
        is_picker = tuple(command[: len(_PICKER)]) == _PICKER
        if is_picker or not any(tuple(command[: len(program)]) == program for program in _PROGRAMS):
            super()._execute_child(args, *details)  # type: ignore[misc]
            return
        _, _, _, pass_fds, cwd, env, _, _, _, *pipes = details
        p2cread, _, _, c2pwrite, _, errwrite = pipes[:6]
        request = {
            "command": command,
            "env": {name: text for name, text in (os.environ if env is None else env).items() if name not in unset},
            "cwd": os.fspath(cwd or Path.cwd()),
            "new_session": bool(pipes[11]),
            "fds": [0, 1, 2, *pass_fds],
        }
        streams = [given if given != -1 else number for number, given in enumerate((p2cread, c2pwrite, errwrite))]
        if parent:
            self._by_this_process(parent, request, [*streams, *pass_fds])
        else:
            self._by_the_server(request, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]

    def _by_the_server(self, request: dict[str, Any], fds: list[int]) -> None:
        text = json.dumps(request).encode()
        self._status = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._status.connect(_server)
        socket.send_fds(self._status, [_STATUS.pack(len(text))], fds)
        self._status.sendall(text)
        self.pid = self._told()

    def _by_this_process(self, parent: str, request: dict[str, Any], fds: list[int]) -> None:
        """For a command that ends with its parent, which must be this process."""
        self.pid = os.fork()
        if self.pid == 0:
            _become_bound(parent, request, fds)
        Path(_server).with_name(str(self.pid)).write_text(json.dumps(request))

    def _told(self) -> int:
        assert self._status is not None
        text = self._status.recv(_STATUS.size, socket.MSG_WAITALL)
        if len(text) < _STATUS.size:
            raise ConnectionError("the server that forks processes is gone")
        return int(_STATUS.unpack(text)[0])

    def _internal_poll(self, *arguments: Any, **more: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(*arguments, **more)  # type: ignore[misc, no-any-return]
        return self._ended(0)

    def _wait(self, timeout: float | None) -> int:
        if self._status is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def __del__(self, *details: Any) -> None:
        if self._status is not None:
            self._status.close()
            self.returncode = self.returncode or 0  # else it warns of a process that still runs
        super().__del__(*details)  # type: ignore[misc]

    def _ended(self, within_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], within_s)[0]:
            assert self._status is not None
            self.returncode = self._told()
            self._status.close()
        return self.returncode


def _parent_of(command: list[Any]) -> tuple[str, list[Any]]:
    """The pid in a command that ends with this process, else nothing; and the command itself."""
    if tuple(command[: len(_BOUND)]) != _BOUND:
        return "", command
    return str(command[len(_BOUND)]), command[len(_BOUND) + 1 :]


def _unset_by(command: list[Any]) -> tuple[set[str], list[Any]]:
    """The variables that the program `env` unsets before it runs the command; and the command itself."""
    words = command[1:] if command[:1] == ["env"] else []
    unset = {str(word).removeprefix("--unset=") for word in words if str(word).startswith("--unset=")}
    return unset, words[len(unset) :] if unset else command


def use_it() -> None:
    """From now on, this process and those that it starts let one server fork their `kvgate` commands. The server ends
    with the first of them. It takes a second to start: `wait_for_it`."""
    if _SOCKET not in os.environ:
        os.environ[_SOCKET] = _started()
    _ask(os.environ[_SOCKET])


def _started() -> str:
    folder = tempfile.TemporaryDirectory(prefix="kvgate-forked-")
    path = str(Path(folder.name) / "server")
    command = [sys.executable, "-P", __file__, path]
    _servers[subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)] = folder
    return path


def wait_for_it() -> None:
    """Returns when the server listens."""
    for server in _servers:
        assert server.stdout is not None
        server.stdout.read(1)


_servers: dict[subprocess.Popen[bytes], object] = {}
"""The server that this process has started, and its folder: its stdin ends and the folder goes when they are freed."""


def _ask(path: str) -> None:
    global _server
    _server = path
    asyncio.unix_events.subprocess = types.SimpleNamespace(**vars(subprocess))  # it waits for its own children
    subprocess.Popen = ForkedPopen  # type: ignore[misc]


@contextmanager
def constants(values: Mapping[str, float | list[int]]) -> Iterator[None]:
    """Until the end of the block, processes that the server forks have other values in these constants, like
    `coordinator.breaker.OPEN_MS`. Blocks may be nested."""
    before = os.environ.get(_CONSTANTS, "{}")
    os.environ[_CONSTANTS] = json.dumps({**json.loads(before), **values})
    try:
        yield
    finally:
        os.environ[_CONSTANTS] = before


def command_of(pid: int) -> tuple[list[str], dict[str, str]] | None:
    """The command line of a process that was forked, and its environment; None if it was not."""
    file = Path(_server).with_name(str(pid))
    if not file.exists():
        return None
    told = json.loads(file.read_text())
    return told["command"], told["env"]


def build_commands_once() -> None:
    """Typer builds all commands of `kvgate` whenever one is called. That takes 20 ms."""
    typer.main.get_command = functools.cache(typer.main.get_command)


def read_version_once() -> None:
    """redis-py looks its version up in files for each connection. That takes 2 ms."""
    redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)


def _prepare() -> None:
    """Does what each process would do: imports, and builds commands, scripts and a gateway. What is built is thrown
    away; what the libraries remember of it, like compiled expressions, stays."""
    for name in (*_IMPORTED, *_modules()):
        importlib.import_module(name)
    build_commands_once()
    read_version_once()
    _build_parameters(typer.main.get_command(sys.modules["gateway.ops.cli"].app))
    scripts = sys.modules["coordinator.scripts"]
    for name in scripts.NAMES:
        scripts.load(name, True)
    scripts.load("place", True, scripts.PolicyKnobs())
    sys.path.append(str(Path(__file__).parent.parent))
    importlib.import_module("bench.fleet.__main__")
    inspect.getsourcelines(_prepare)  # FastAPI looks up where the source of an endpoint is
    asyncio.run(_build_a_gateway())
    sys.modules["coordinator.engine.sockets"].tls_context.cache_clear()  # each process has its own SSL_CERT_FILE


def _modules() -> Iterator[str]:
    """The modules of `_PACKAGES`, but for those that run when they are imported, or must not be forked."""
    for package in map(importlib.import_module, _PACKAGES):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__") and not module.name.startswith(_NOT_FORKED):
                yield module.name


def _build_parameters(command: Any) -> None:
    """Typer builds what reads an option when the option is first read."""
    for parameter in command.params:
        parameter.get_runtime_param()
    for below in getattr(command, "commands", {}).values():
        _build_parameters(below)


async def _build_a_gateway() -> None:
    settings = sys.modules["gateway.settings.gateway_settings"].GatewaySettings.model_validate(
        {"replicas": [{"id": "r0", "url": "http://127.0.0.1:1"}]}
    )
    no_variables = sys.modules["gateway.tracing.otel_variables"].NO_VARIABLES
    sys.modules["gateway.app"].Gateway(settings, sys.modules["gateway.tls"].Certificates(), no_variables)


def _serve(path: str) -> None:
    _prepare()
    gc.collect()
    gc.freeze()
    awake, woken = socket.socketpair()
    for end in (awake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    os.write(1, b"!")
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, awake, 0], [], [])
        if 0 in ready:
            return
        if awake in ready:
            awake.recv(4096)
        _reap(running)
        if listener in ready:
            connection, _ = listener.accept()
            pid = _fork(path, connection)
            running[pid] = connection
            connection.sendall(_STATUS.pack(pid))


def _reap(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        connection = running.pop(pid)
        with connection, suppress(OSError):  # who asked for it may have ended
            connection.sendall(_STATUS.pack(os.waitstatus_to_exitcode(status)))


def _fork(path: str, connection: socket.socket) -> int:
    head, fds, _, _ = socket.recv_fds(connection, _STATUS.size, _MAX_FDS)
    size = _STATUS.unpack(head)[0]
    request = json.loads(connection.recv(size, socket.MSG_WAITALL))
    pid = os.fork()
    if pid == 0:
        _become(path, request, fds)
    for fd in fds:
        os.close(fd)
    Path(path).with_name(str(pid)).write_text(json.dumps(request))
    return pid


def _become(path: str, request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Runs the command in this process."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if request["new_session"]:
            os.setsid()
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        _take(dict(zip(request["fds"], fds, strict=True)))
        words = request["command"][2 if request["command"][1] == "-P" else 1 :]
        sys.argv = words if words[0] != "-m" else ["kvgate" if words[1] == KVGATE[-1] else words[1], *words[2:]]
        if any(sys.argv[: len(first)] == first for first in _STARTS_OTHERS):
            _ask(path)
        _set_constants(json.loads(os.environ.get(_CONSTANTS, "{}")))
        code = _run(words)
    finally:
        os._exit(code)


def _become_bound(parent: str, request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Like `_become`, in a process that a `kvgate up` has forked while it runs."""
    try:
        asyncio._set_running_loop(None)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        sys.argv = ["", parent, *request["command"]]
        os.execvp = lambda *_: _become(_server, request, fds)
        sys.modules[_BOUND[-1]].main()
    finally:
        os._exit(1)


def _set_constants(values: dict[str, Any]) -> None:
    scripts = sys.modules["coordinator.scripts"]
    settings = scripts._settings(None)
    for name, value in values.items():
        module, _, constant = name.rpartition(".")
        holder = importlib.import_module(module)
        getattr(holder, constant)  # a name that is none ends the process
        setattr(holder, constant, value)
    if scripts._settings(None) != settings:  # the scripts hold them
        for built in (scripts.load, scripts.source, scripts.local_line):
            built.cache_clear()


def _take(wanted: dict[int, int]) -> None:
    """These are the only open files now: number → where it is open."""
    high = max([*wanted, *wanted.values()]) + 1
    moved = {number: os.dup2(fd, high + place) for place, (number, fd) in enumerate(wanted.items())}
    os.closerange(0, high)
    for number, fd in moved.items():
        os.dup2(fd, number)
    kept = sorted(wanted)
    for first, following in zip([2, *kept[3:]], [*kept[3:], 65_536], strict=True):
        os.closerange(first + 1, following)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False, buffering=1 if os.isatty(1) else -1)
    sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1, errors="backslashreplace")


def _run(words: list[str]) -> int:
    code: Any = 0
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        threading._shutdown()  # type: ignore[attr-defined]
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    _serve(sys.argv[1])
