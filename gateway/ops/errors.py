"""The error of commands, and a check of options that raises it."""

from __future__ import annotations


class CommandError(Exception):
    """The user can mend this: printed as one line, which says what is wrong. The command then exits with 1."""


def base_url(option: str, url: str) -> str:
    """The server's URL that was given to `option`, without its last slash. Raises CommandError unless it is HTTP."""
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"{option}: is {url!r}; must be a URL, like http://10.0.0.7:8080")
    return url.rstrip("/")
