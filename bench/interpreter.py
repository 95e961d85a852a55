"""How the Python that runs this process was built. A gateway costs a third more CPU time on an unoptimised one."""

from __future__ import annotations

import sys
import sysconfig

_SYSTEM_PREFIX = "/usr"
"""Python packages of distributions are here. Debian's are built with `make profile-opt`, which leaves no trace in
sysconfig."""
_OPTION = "--enable-optimizations"
"""Profile-guided optimisation. The official images, uv's builds (python-build-standalone) and conda's are configured
with it. pyenv's default is without."""


def is_optimised() -> bool:
    return built_optimised(
        sysconfig.get_config_var("CONFIG_ARGS"), sys.base_prefix, bool(sysconfig.get_config_var("Py_DEBUG"))
    )


def built_optimised(configured: str | None, base_prefix: str, is_debug: bool) -> bool:
    """True also if nothing is known of the build: `configured` has the arguments of its configure script, or is
    None."""
    if is_debug:
        return False
    return configured is None or _OPTION in configured or base_prefix == _SYSTEM_PREFIX
