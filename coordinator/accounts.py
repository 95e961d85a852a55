"""The accounts to which requests are charged, and their limits: see lua/lib/limits.lua. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

_OF_KEY = "key:"


@lru_cache(maxsize=1024)
def account_of_tenant(tenant: str) -> str:
    """The account of a tenant: its name, as in keys and records."""
    return quote(tenant, safe="")


@lru_cache(maxsize=1024)
def account_of_key(key_id: str) -> str:
    """The account of an API key. No tenant has it: their names are quoted."""
    return _OF_KEY + quote(key_id, safe="")


def is_account_of_key(account: str) -> bool:
    """Whether an account is that of an API key; else it is that of a tenant."""
    return account.startswith(_OF_KEY)


class AccountLimits(NamedTuple):
    """An account, and what it may have over all gateways; 0: any number."""

    account: str
    """As in keys and records: see account_of_tenant and account_of_key."""
    concurrency: int = 0
    requests_per_min: int = 0
    tokens_per_min: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The accounts to which a request is charged: its tenant's and its API key's, if these have limits. `output_tokens`
    is the most that the request's answer can take, and `most_tokens` what the engine can compute for it, its prompt
    included; 0: not known."""

    accounts: tuple[AccountLimits, ...]
    output_tokens: int = 0
    most_tokens: int = 0

    def text(self, is_admitted: bool, is_counted: bool) -> str:
        """As `place` takes it. A request that is admitted was let in before, and one that is counted pays no second
        time."""
        text = f"{self.output_tokens} {int(is_admitted)}"
        for account, concurrency, requests_per_min, tokens_per_min in self.accounts:
            text += f" / {account} {concurrency} {0 if is_counted else requests_per_min} {tokens_per_min}"
        return text

    def without_concurrency(self) -> Limits:
        """The same for a request that may not be queued."""
        return replace(self, accounts=tuple(each._replace(concurrency=0) for each in self.accounts))


class Left(NamedTuple):
    """What is left of an account's limits; -1 where there is no limit."""

    requests: int
    requests_ms: int
    """How long until all are there again."""
    tokens: int
    tokens_ms: int
    active: int | None = None
    """The requests in flight; None if these are not limited."""


class Budget(NamedTuple):
    """What requests take of their accounts' limits."""

    accounts: tuple[AccountLimits, ...]
    tokens: int
    requests: float
    """Those that no script has counted yet."""

    @property
    def text(self) -> str:
        """As `reassert` takes it."""
        text = f"{self.tokens} {self.requests:.3f}"
        for account, _, requests_per_min, tokens_per_min in self.accounts:
            text += f" / {account} {tokens_per_min} {requests_per_min}"
        return text
