"""Sends the load of `kvgate up --load`, in a process of its own.

python -P -m gateway.ops.cli.load STATE_DIR MODEL LOAD
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from gateway.ops.local import gentle_load
from gateway.ops.local.state_dir import read_cluster

if __name__ == "__main__":
    _, _state_dir, _model, _load = sys.argv
    asyncio.run(gentle_load.run(read_cluster(Path(_state_dir)), _model, _load, os.environ.get("KVGATE_API_KEY")))
