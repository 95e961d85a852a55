"""Whether what is said of tenants, keys and their queue can take effect."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.finding import Finding, FindingKind, Result, Unchecked
from coordinator.redis.address import is_cluster
from gateway.doctor.evidence import Evidence, Unknown
from gateway.routing.tenants import NOBODY
from gateway.settings.gateway_settings import GatewaySettings
from gateway.settings.queue_settings import NO_LIMITS

WITHOUT_KEY = FindingKind(
    "tenant-without-key",
    "warning",
    "no request is of this tenant, so its weight, priority, limits and budgets do nothing",
    "name it as the `tenant` of a key in security.api_keys, or remove it from `tenants`",
)
PER_POOL = FindingKind(
    "limits-per-pool",
    "warning",
    "in a Redis Cluster limits and budgets are counted for each base model: who uses two models may use twice as much",
    "divide them by the models that it uses, or use one Redis (with sentinels)",
)
WAIT = FindingKind(
    "queue-wait-unreached",
    "warning",
    "a request that waits ends with a 504, which does not say that replicas have no room",
    "set timeouts.request_s above queue.wait_s, by the time of a long answer",
)
BOUND = FindingKind(
    "queue-bound-unreached",
    "warning",
    "one tenant can fill the queue, so that others are refused",
    "set queue.max_waiting_per_tenant below queue.max_waiting",
)
HOLD = FindingKind(
    "queue-hold-unreached",
    "warning",
    "a request that is held ends with a 504, or has no time left for its answer",
    "set timeouts.request_s above queue.hold_s, by the time of a long answer",
)
HOLD_FOR_NOTHING = FindingKind(
    "queue-hold-in-vain",
    "warning",
    "requests are held for a replica that can never come",
    "list `replicas`, or set `discovery`, so that gateways find those that are started; or set queue.hold_s to 0",
)
KEEP_ALIVE = FindingKind(
    "keep-alive-unreached",
    "warning",
    "no stream waits for so long, so none gets a comment, and proxies may end its connection",
    "set queue.keep_alive_s well below the time after which your proxies end idle connections, such as 15",
)
FREE_MODEL = FindingKind(
    "budget-without-price",
    "warning",
    "there are budgets in money, and a model without a price costs nothing, so its requests spend nothing of them",
    "give each model that clients may use a price in billing.prices, or budgets in tokens",
)
PRIORITY = FindingKind(
    "engine-priority-without-bands",
    "warning",
    "all requests have the same priority, so engines order nothing by it",
    "set queue.engine_priority to false, or have more than one band in queue.bands",
)


def findings(settings: GatewaySettings) -> Iterator[Finding]:
    """What contradicts itself in one configuration."""
    has_others = settings.security.records_secret is not None  # keys that were made while gateways ran are in Redis
    named = {key.tenant for key in settings.security.api_keys} or {NOBODY}
    for tenant in settings.tenants:
        if tenant.name not in named and not has_others:
            yield WITHOUT_KEY.seen(f"tenant {tenant.name}", "no key in security.api_keys is of this tenant")
    accounts = [(tenant.name, tenant.limits, tenant.budgets) for tenant in settings.tenants]
    accounts += [(f"the key {key.name}", key.limits, key.budgets) for key in settings.security.api_keys]
    limited = [name for name, limits, budgets in accounts if limits != NO_LIMITS or budgets]
    if limited and is_cluster(settings.redis.url):
        yield PER_POOL.seen("tenants", f"limits or budgets of {', '.join(limited)}, and redis.url is a Redis Cluster")
    if any(budget.unit == "money" for _, _, budgets in accounts for budget in budgets):
        yield from _without_price(settings)
    yield from _of_queue(settings)


def _without_price(settings: GatewaySettings) -> Iterator[Finding]:
    priced = {price.model for price in settings.billing.prices}
    free = sorted({model.name for model in settings.models} - priced)
    if not priced:
        yield FREE_MODEL.seen("billing", "budgets in money, and no prices in billing.prices")
    elif free:
        yield FREE_MODEL.seen("billing", f"no price for {', '.join(free)}")


def _of_queue(settings: GatewaySettings) -> Iterator[Finding]:
    queue = settings.queue
    if queue.wait_s >= settings.timeouts.request_s:
        what = f"queue.wait_s {queue.wait_s:g} is not below timeouts.request_s {settings.timeouts.request_s:g}"
        yield WAIT.seen("queue", what)
    if queue.max_waiting_per_tenant > queue.max_waiting:
        what = f"queue.max_waiting_per_tenant {queue.max_waiting_per_tenant} is above max_waiting {queue.max_waiting}"
        yield BOUND.seen("queue", what)
    discovery = settings.discovery
    if queue.hold_s and not settings.replicas and discovery.dns is None and discovery.kubernetes is None:
        yield HOLD_FOR_NOTHING.seen("queue", f"queue.hold_s is {queue.hold_s:g}, without `replicas` and `discovery`")
    elif queue.hold_s >= settings.timeouts.request_s:
        what = f"queue.hold_s {queue.hold_s:g} is not below timeouts.request_s {settings.timeouts.request_s:g}"
        yield HOLD.seen("queue", what)
    if queue.keep_alive_s >= max(queue.wait_s, queue.hold_s):
        what = f"queue.keep_alive_s {queue.keep_alive_s:g} is not below queue.wait_s {queue.wait_s:g}"
        yield KEEP_ALIVE.seen("queue", what + (f" or hold_s {queue.hold_s:g}" if queue.hold_s else ""))
    if queue.engine_priority and len(queue.bands) == 1:
        yield PRIORITY.seen("queue", f"queue.engine_priority is true, and {queue.bands[0].name} is the only band")


def configured(evidence: Evidence) -> Iterator[Result]:
    """Whether the configuration that the doctor was given contradicts itself."""
    if isinstance(evidence.settings, Unknown):
        yield Unchecked("configuration", "whether its settings contradict each other", evidence.settings.why)
    elif evidence.settings is not None:
        yield from findings(evidence.settings)


def priced(evidence: Evidence) -> Iterator[Result]:
    """Whether each model that is served has a price, if a tenant or a key has a budget in money, as gateways say."""
    if free := sorted({model for gateway in evidence.gateways for model in gateway.models_without_price}):
        yield FREE_MODEL.seen("billing", f"no price for {', '.join(free)}, which replicas serve")


CHECKS = (configured, priced)
