"""What libraries log has the form of our own lines."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging, warnings
from gateway.logs import configure
from gateway.settings.gateway_settings import LogSettings
configure(LogSettings(), gateway="gw0")
logging.getLogger("library").warning("%s is odd", "it")
logging.getLogger("library").info("nobody asked")
warnings.warn("old", stacklevel=1)
"""


def test_a_librarys_warning_is_a_json_line_with_its_logger_and_the_gateway() -> None:
    done = subprocess.run((sys.executable, "-P", "-c", PROGRAM), capture_output=True, text=True, check=True, timeout=60)
    odd, old = (json.loads(line) for line in done.stdout.splitlines())
    assert (odd["logger"], odd["level"], odd["event"], odd["gateway"]) == ("library", "warning", "it is odd", "gw0")
    assert (old["logger"], "old" in old["event"]) == ("py.warnings", True)
    assert done.stderr == ""
