"""The one error of the local cluster."""

from __future__ import annotations


class ClusterError(Exception):
    """The user can mend this; the message says what is wrong and what to do."""
