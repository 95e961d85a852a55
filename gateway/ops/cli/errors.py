"""The error of the command line, and a check of options that raises it."""

from __future__ import annotations


class CommandError(Exception):
    """Printed as one line; the command then exits with 1."""


def base_url(option: str, url: str) -> str:
    """The server's URL that was given to `option`, without its last slash. Raises CommandError unless it is HTTP."""
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"{option}: is {url!r}; must be a URL, like http://10.0.0.7:8080")
    return url.rstrip("/")
