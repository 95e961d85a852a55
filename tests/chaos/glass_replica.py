"""A simulated replica whose /sim/state also lists the hashes of the blocks that a request can hit. It takes the
options of `kvgate replica-sim`."""

from __future__ import annotations

import sys
from typing import Any

from gateway.ops.cli import app
from gateway.simulator import server
from gateway.simulator.replica import SimReplica


class GlassReplica(SimReplica):
    def state(self) -> dict[str, Any]:
        hashes = [f"{block_hash:016x}" for engine in self.engines for block_hash in engine.cache.hashes()]
        return super().state() | {"hashes": hashes}


if __name__ == "__main__":
    server.SimReplica = GlassReplica  # type: ignore[misc]
    app(["replica-sim", *sys.argv[1:]])
