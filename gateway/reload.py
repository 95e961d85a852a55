"""Reads the configuration again while the gateway runs: on SIGHUP, and when one of its files changes.

A configuration is checked whole before any of it is used. A bad one changes nothing. /ready, a metric and the log say
so until the file is right. Only the log says what is wrong, because a file holds secrets. Requests that run are not
touched.
"""

from __future__ import annotations

import asyncio
import stat
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import structlog

from gateway.settings.config_file import SettingsError
from gateway.settings.gateway_settings import GatewaySettings, load_settings
from gateway.settings.live import Change, change

_log = structlog.get_logger("kvgate.reload")

_LOOK_S = 1.0
"""How often to look whether a file has changed. A change is read when two looks agree: somebody may be writing."""

_Stamp = tuple[tuple[int, ...], ...]
_T = TypeVar("_T")


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)  # it may be replaced just now
    return found.st_mtime_ns, found.st_ino, found.st_size


@dataclass(slots=True)
class ConfigFiles:
    """Where the configuration comes from. A later file goes before an earlier one, and the environment before all.
    Without files, nothing changes. Make it before the first load: a change after that is seen."""

    paths: Sequence[Path] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    doubts: Callable[[GatewaySettings], Iterable[str]] = lambda _: ()
    """What can be used, and most likely does not do what was meant."""
    first: _Stamp = field(init=False)

    def __post_init__(self) -> None:
        self.first = self.stamp()

    def load(self) -> GatewaySettings:
        """Raises SettingsError. A file that is empty is one that is being written, or was cut."""
        for path in self.paths:
            found = path.stat()
            if found.st_size == 0 or not stat.S_ISREG(found.st_mode):
                raise SettingsError([f"file: {path.name} is empty, or no file"])
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
        prepare: Callable[[GatewaySettings], None],
        use: Callable[[GatewaySettings], None],
        is_used: Callable[[float], None],
    ) -> None:
        """`prepare` does what may take a while, in a thread, and raises SettingsError for what cannot be used here.
        `is_used` is told 1 if the files are right, 0 if not."""
        self._files, self._running, self._prepare, self._use, self._is_used = files, running, prepare, use, is_used
        self._stamp = self._seen = files.first
        self._asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.problems: list[str] = []
        """Where the files as they are have mistakes; then the settings of before are used."""
        self.left: list[str] = []
        """The fields of the files that need a restart."""

    def ask(self) -> None:
        """Read the files again now. A signal's handler may call it."""
        self._loop.call_soon_threadsafe(self._asked.set)

    async def run(self) -> None:
        while self._files.paths:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._asked.wait()
            except TimeoutError:
                seen, self._seen = self._seen, await _apart(self._files.stamp)
                if self._seen == self._stamp or self._seen != seen:
                    continue
            self._asked.clear()
            await self._read()

    async def _read(self) -> None:
        self._stamp, self.left = await _apart(self._files.stamp), []  # first: what changes meanwhile is read again
        try:
            changed, doubts = await _apart(self._changed)
            if changed.taken:
                self._take(changed.settings)
        except SettingsError as error:
            self._refuse(error.problems)
        except Exception as error:  # a mistake of ours, or of a library: the gateway goes on
            self._refuse([f"file: cannot be used ({type(error).__name__})"])
        else:
            self.problems, self.left = [], changed.left
            self._is_used(1)
            log = _log.warning if changed.left else _log.info
            log("configuration read again", changed=changed.taken, needs_a_restart=changed.left)
            tell_doubts(doubts)

    def _changed(self) -> tuple[Change, list[str]]:
        wanted = self._files.load()
        changed = change(self._running, wanted)
        self._prepare(changed.settings)
        return changed, list(self._files.doubts(wanted))

    def _take(self, settings: GatewaySettings) -> None:
        """All of it, or nothing."""
        try:
            self._use(settings)
        except Exception:
            self._use(self._running)
            raise
        self._running = settings

    def _refuse(self, problems: Sequence[str]) -> None:
        where = (problem.removeprefix("file: ").partition(": ")[0] for problem in problems)
        self.problems = list(dict.fromkeys(where))
        self._is_used(0)
        _log.error("configuration not used", problems=problems, files=list(map(str, self._files.paths)))


def tell_doubts(doubts: Iterable[str]) -> None:
    """Log them."""
    for doubt in doubts:
        _log.warning("doubtful configuration", doubt=doubt)


async def _apart(work: Callable[[], _T]) -> _T:
    """Its result, from a thread of its own: a disk that hangs holds up neither requests nor the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def tell(result: _T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result, error = work(), None
        except Exception as caught:
            result, error = None, caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="configuration", daemon=True).start()
    return await done
