"""Finds the process on this machine at the other end of a local TCP connection, from Linux' /proc."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

_READS = 5


def pid_of_peer(writer: asyncio.StreamWriter, pids: Iterable[int]) -> int | None:
    """Returns the one of these processes that opened the connection. None if none of them did."""
    port = writer.get_extra_info("peername")[1]
    inode = _inode_of(port)
    return next((pid for pid in pids if inode in _inodes(pid)), None) if inode else None


def _inode_of(port: int) -> str | None:
    """The inode of this machine's connected socket (state 01) with this local port. A read of the table can miss a
    line while other connections come and go."""
    local = f":{port:04X}"
    for _ in range(_READS):
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1].endswith(local) and fields[3] == "01":
                return f"socket:[{fields[9]}]"
    return None


def _inodes(pid: int) -> set[str]:
    """The inodes of the process' open files. Empty if the process is gone."""
    found = set()
    try:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found.add(str(each.readlink()))
            except OSError:
                continue
    except OSError:
        return set()
    return found
