"""Reads the configuration again while the gateway runs: on SIGHUP, and when one of its files changes.

A configuration is checked whole before any of it is used. A bad one changes nothing. What it says is wrong is told by
the log, /ready and a metric until the file is right. Requests that run are not touched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from gateway.settings.config_file import SettingsError
from gateway.settings.gateway_settings import GatewaySettings, load_settings
from gateway.settings.live import change

_log = structlog.get_logger("kvgate.reload")

_LOOK_S = 1.0
"""How often to look whether a file has changed. A look is one call of stat for each file."""

_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ConfigFiles:
    """Where the configuration comes from. A later file goes before an earlier one, and the environment before all.
    Without files, nothing changes."""

    paths: Sequence[Path] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def load(self) -> GatewaySettings:
        """Raises SettingsError."""
        return load_settings(self.paths, self.env)

    def stamp(self) -> _Stamp:
        """Differs when a file was changed, or replaced. (Kubernetes swaps a link.)"""
        return tuple(map(_stamp, self.paths))


NO_FILES = ConfigFiles()


class Reload:
    """Keeps the settings of one gateway like its files. `use` gives its parts other ones. Run `run` as a task."""

    def __init__(
        self,
        files: ConfigFiles,
        running: GatewaySettings,
        use: Callable[[GatewaySettings], None],
        is_used: Callable[[float], None],
    ) -> None:
        """`is_used` is told 1 if the files are right, 0 if not."""
        self._files, self._running, self._use, self._is_used = files, running, use, is_used
        self._stamp = files.stamp()
        self._asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.problems: list[str] = []
        """What is wrong with the files as they are; then the settings of before are used."""
        self.left: list[str] = []
        """The fields of the files that need a restart."""

    def ask(self) -> None:
        """Read the files again now. A signal's handler may call it."""
        self._loop.call_soon_threadsafe(self._asked.set)

    async def run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._asked.wait()
            except TimeoutError:
                if self._files.stamp() == self._stamp:
                    continue
            self._asked.clear()
            await self._read()

    async def _read(self) -> None:
        self._stamp = self._files.stamp()  # first: a file that changes meanwhile is read again
        try:
            wanted = await asyncio.to_thread(self._files.load)
            changed = change(self._running, wanted)
        except SettingsError as error:
            self.problems = error.problems
            self._is_used(0)
            _log.error("configuration not used", problems=error.problems, files=list(map(str, self._files.paths)))
            return
        self.problems, self.left = [], changed.left
        self._is_used(1)
        if changed.taken:
            self._use(changed.settings)
            self._running = changed.settings
        log = _log.warning if changed.left else _log.info
        log("configuration read again", changed=changed.taken, needs_a_restart=changed.left)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)  # it may be replaced just now
    return found.st_mtime_ns, found.st_ino, found.st_size
