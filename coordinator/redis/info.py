"""Redis' answer to INFO, as values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

OLDEST = (6, 2)
"""The oldest Redis that has all that the scripts use."""
ALLOWS_OOM = (7, 0)
"""Since this version, Redis runs scripts with the flag `allow-oom` when its memory is full."""
COMMANDS = ("get", "set", "exists", "eval", "evalsha")
"""The commands that are counted one by one: the first three move chunks, the others are coordination's scripts."""
_SAVES = ("rdb_last_bgsave_status", "aof_last_write_status")
_TWO_NUMBERS = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class RedisInfo:
    """What INFO says. A text that the server does not give is empty, and a number 0.

    Counters count from the server's start, or from CONFIG RESETSTAT.
    """

    version_text: str
    """As Redis writes it, for example 7.2.4."""
    mode: str
    """standalone, sentinel or cluster."""
    role: str
    """master or slave."""
    master: str
    """A replica's master, `host:port`."""
    failed_saves: tuple[str, ...]
    """The statuses of saving to disk that are `err`, by name."""
    policy: str
    """maxmemory-policy: the keys that Redis evicts when its memory is full."""
    used_bytes: int
    maxmemory_bytes: int
    """0: no limit."""
    machine_bytes: int
    """The memory of the machine that it runs on."""
    evicted_keys: int
    expired_keys: int
    hits: int
    misses: int
    input_bytes: int
    output_bytes: int
    refused_writes: int
    """Replies that began with -OOM."""
    calls: Mapping[str, int]
    """By command, for those in COMMANDS."""
    seconds: Mapping[str, float]
    """The same, the time that Redis took for them."""

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor; 7.0 if the server does not give them."""
        found = _TWO_NUMBERS.match(self.version_text)
        return (int(found[1]), int(found[2])) if found else ALLOWS_OOM

    @property
    def used_share(self) -> float:
        """The share of maxmemory that is used; 0 without a limit."""
        return self.used_bytes / self.maxmemory_bytes if self.maxmemory_bytes else 0.0


def read_info(reply: bytes) -> RedisInfo:
    """INFO's lines `name:value`, without the headings between them."""
    lines = reply.decode(errors="replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
    commands = {name: _parts(fields.get(f"cmdstat_{name}", "")) for name in COMMANDS}
    return RedisInfo(
        version_text=fields.get("redis_version", ""),
        mode=fields.get("redis_mode", ""),
        role=fields.get("role", ""),
        master=f"{fields.get('master_host', '')}:{fields.get('master_port', '')}",
        failed_saves=tuple(name for name in _SAVES if fields.get(name) == "err"),
        policy=fields.get("maxmemory_policy", ""),
        used_bytes=_number(fields, "used_memory"),
        maxmemory_bytes=_number(fields, "maxmemory"),
        machine_bytes=_number(fields, "total_system_memory"),
        evicted_keys=_number(fields, "evicted_keys"),
        expired_keys=_number(fields, "expired_keys"),
        hits=_number(fields, "keyspace_hits"),
        misses=_number(fields, "keyspace_misses"),
        input_bytes=_number(fields, "total_net_input_bytes"),
        output_bytes=_number(fields, "total_net_output_bytes"),
        refused_writes=_number(_parts(fields.get("errorstat_OOM", "")), "count"),
        calls={name: _number(parts, "calls") for name, parts in commands.items()},
        seconds={name: _number(parts, "usec") / 1e6 for name, parts in commands.items()},
    )


def _parts(text: str) -> dict[str, str]:
    """`calls=1,usec=10` by name."""
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part)


def _number(fields: Mapping[str, str], name: str) -> int:
    """0 if it is missing or no number: some servers that speak Redis' protocol write other things there."""
    text = fields.get(name, "")
    return int(text) if text.isdecimal() else 0


NOTHING_KNOWN = read_info(b"")
"""Of a server whose user may not call INFO."""
