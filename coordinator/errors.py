"""What can go wrong with the store. redis-py's exceptions stop in this package."""

from __future__ import annotations


class StoreError(Exception):
    """The store could not answer. A missing value is never reported this way."""


class StoreDown(StoreError):
    """There is no usable connection: the call was not answered and may or may not have run."""


class StoreLate(StoreError):
    """No answer within the caller's budget: the call may still run."""


class StoreRefused(StoreError):
    """Redis answered with an error (a missing permission, a wrong type): retrying will not help."""
