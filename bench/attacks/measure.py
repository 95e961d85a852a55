"""Runs one attack on one gateway and watches it."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from typing import Any

import orjson

from bench.attacks.attack import Attack, Outcome
from bench.attacks.row import Row
from bench.attacks.target import Target


@dataclass(frozen=True)
class Caps:
    """Limits of an attack. Beyond them it is ended."""

    seconds: float = 60.0
    memory_mb: float = 3000.0
    idle_s: float = 2.0
    """How long the gateway is watched before the attack."""


class WitnessFailed(Exception):
    """The witness ended without a result. Its stderr tells why."""


async def measure(name: str, attack: Attack, target: Target, caps: Caps) -> Row:
    """Runs the attack. If it raises, or has no answer in time, the row says so. Raises WitnessFailed."""
    witness = await _witness(target, caps)
    assert witness.stdout is not None
    try:
        if await witness.stdout.readline() != b"ready\n":
            raise WitnessFailed
        started_s = time.perf_counter()
        outcome = await _outcome(attack, target, caps.seconds)
        seconds = time.perf_counter() - started_s
        said, _ = await witness.communicate(b"over\n")
    finally:
        if witness.returncode is None:
            witness.kill()
            await witness.wait()
    if not said:
        raise WitnessFailed
    seen: dict[str, Any] = orjson.loads(said)
    missed = (outcome.missed,) if outcome.missed else ()
    return Row(name, attack.sentence, outcome.got, seconds, missed=missed, **seen).judged()


async def _outcome(attack: Attack, target: Target, cap_s: float) -> Outcome:
    try:
        async with asyncio.timeout(cap_s):
            return await attack.run(target)
    except TimeoutError:
        none = f"no answer in {cap_s:g} s"
        return Outcome(none, none)
    except Exception as error:  # an attack that fails must not prevent the others
        problem = f"{type(error).__name__}: {error}"
        return Outcome(f"the attack failed: {problem}", f"could not be made: {problem}")


async def _witness(target: Target, caps: Caps) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "bench.attacks.witness", "--url", f"http://{target.host}:{target.port}"]
    command += ["--pid", str(target.pid), "--source", target.honest]
    command += ["--idle-s", str(caps.idle_s), "--cap-mb", str(caps.memory_mb)]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
