"""Which builds of Python count as optimised."""

from __future__ import annotations

import pytest

from bench.interpreter import built_optimised

HOME = "/home/me/.pyenv/versions/3.11.7"
BUILDS = {
    "the official images": (
        "'--build=x86_64-linux-gnu' '--enable-optimizations' '--with-lto'",
        "/usr/local",
        False,
        True,
    ),
    "uv": (
        "'--prefix=/install' '--without-ensurepip' '--enable-optimizations' '--with-lto'",
        "/home/me/.uv",
        False,
        True,
    ),
    "pyenv with its options": (f"'--prefix={HOME}' '--enable-optimizations' '--with-lto'", HOME, False, True),
    "Debian": ("'--enable-shared' '--prefix=/usr' '--with-computed-gotos'", "/usr", False, True),
    "a build that says nothing": (None, "/somewhere", False, True),
    "pyenv's default": (f"'--prefix={HOME}' '--enable-shared' 'LDFLAGS=-L{HOME}/lib'", HOME, False, False),
    "a debug build": ("'--enable-optimizations' '--with-pydebug'", "/usr/local", True, False),
}


@pytest.mark.parametrize(("configured", "base_prefix", "is_debug", "expected"), BUILDS.values(), ids=BUILDS)
def test_a_build_is_recognised(configured: str | None, base_prefix: str, is_debug: bool, expected: bool) -> None:
    assert built_optimised(configured, base_prefix, is_debug) is expected
