"""Runs `kvgate` with a wall clock that is off by as many seconds as the file STEP says. Other clocks do not step.

python -m tests.cluster.stepped_wall_clock STEP gateway --config FILE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from gateway.ops.cli import main

if __name__ == "__main__":
    step, real = Path(sys.argv.pop(1)), time.time

    def stepped() -> float:
        return real() + float(step.read_text() or 0)

    time.time = stepped
    main()
