"""Client libraries as processes. A driver runs each library in its own environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients import install

_DRIVERS = Path(__file__).parent / "drivers"
_OLDER = ("instructor", "litellm")
# The drivers get no other variables, above all no proxies, API keys or addresses.
_ENVIRONMENT = {
    "HOME": str(Path.home()),
    "PATH": os.environ["PATH"],
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise litellm downloads a newer list of prices
    "PYTHONDONTWRITEBYTECODE": "1",  # no bytecode beside the drivers
}


@dataclass(frozen=True)
class Raised:
    """An exception as a library's caller sees it."""

    kinds: list[str]
    """The names of its class and of the base classes."""
    message: str
    status: int | None
    request_id: str | None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call: a value (for a stream, its pieces), or an exception."""

    value: Any = None
    raised: Raised | None = None

    @property
    def answer(self) -> Any:
        """The value of a call that must not fail."""
        assert self.raised is None, self.raised
        return self.value

    @property
    def error(self) -> Raised:
        """The exception of a call that must fail."""
        assert self.raised is not None, f"taken for complete: {self.value!r}"
        return self.raised


class Library:
    """A library that makes one call after another."""

    def __init__(self, driver: str, folder: Path) -> None:
        """`driver` is the name of a file in drivers/. `folder` holds the logs and copies of the Node drivers."""
        self._log = folder / f"{driver}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                _command(driver, folder),
                env=_ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
            )

    def begin(
        self,
        call: str,
        url: str,
        prompt: Any,
        *,
        tokens: int = 8,
        model: str = "sim",
        key: str = "none",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Start a call. Take its `outcome` before the next call."""
        told = {"call": call, "url": url, "prompt": prompt, "tokens": tokens, "model": model, "key": key}
        assert self._process.stdin is not None
        print(json.dumps({**told, "headers": headers or {}}), file=self._process.stdin)

    def wait_until_begun(self) -> None:
        """Wait until the first piece of the answer has arrived."""
        said = self._hear()
        assert said == {"begun": True}, said

    def outcome(self) -> Outcome:
        said = self._hear()
        while "begun" in said:
            said = self._hear()
        return Outcome(said["value"]) if "value" in said else Outcome(raised=Raised(**said["raised"]))

    def ask(self, call: str, url: str, prompt: Any, **details: Any) -> Outcome:
        """Make a call and wait for its outcome."""
        self.begin(call, url, prompt, **details)
        return self.outcome()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the driver has ended:\n{self._log.read_text()[-4000:]}"
        said: dict[str, Any] = json.loads(line)
        return said

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


Libraries = Callable[[str], Library]
"""Finds a library by the name of its driver."""


def _command(driver: str, folder: Path) -> list[str]:
    if not driver.endswith(".mjs"):
        requirements = "requirements-older.txt" if driver.startswith(_OLDER) else "requirements.txt"
        return [str(install.python(requirements)), str(_DRIVERS / driver)]
    # Node looks for libraries in the folder of the program that imports them, and in the folders above it.
    modules = folder / "node_modules"
    if not modules.exists():
        modules.symlink_to(install.project() / "node_modules")
    for file in ("loop.mjs", driver):
        shutil.copy(_DRIVERS / file, folder)
    return [str(install.node()), str(folder / driver)]
