"""The replicas that this gateway sends requests to: those listed, and those found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

import structlog

from gateway.replicas.discovery.source import Source, SourceDown
from gateway.settings.discovery_settings import DiscoverySettings
from gateway.settings.gateway_settings import ReplicaSettings
from gateway.tasks import Tasks

_log = structlog.get_logger("kvgate.discovery")

LISTED = "configuration"
"""The source of the replicas that the configuration lists."""


class Outranked(NamedTuple):
    """A replica that a source has found, and another one that goes before it."""

    replica: ReplicaSettings
    why: str


class Discovery:
    """Follows every source, and calls `use` with all replicas whenever they change. `run()` as a task."""

    def __init__(
        self,
        listed: Sequence[ReplicaSettings],
        sources: Sequence[Source],
        use: Callable[[list[ReplicaSettings]], None],
    ) -> None:
        self._listed = list(listed)
        self._use = use
        self._found: dict[str, list[ReplicaSettings]] = {}
        """By source. Those of a source that is followed no more stay until all others have answered."""
        self._used = self._listed
        self._now = _Together(listed)
        self.outranked: dict[str, dict[str, Outranked]] = {}
        """Source → replica → why what this source found is not used."""
        self._tasks = Tasks()
        self._following: list[asyncio.Task[None]] = []
        self._set_sources(sources)

    def _set_sources(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._problems = {source.name: "not asked yet" for source in sources}
        self._asked = {source.name: asyncio.Event() for source in sources}
        self._unanswered = set(self._asked)

    def problems(self) -> dict[str, str]:
        """The problem of each source; empty while it answers. Its last answer stays valid during a problem."""
        return dict(self._problems)

    @property
    def sources(self) -> dict[str, str]:
        """Replica → the source that it comes from."""
        return self._now.sources

    async def first_answers(self) -> None:
        """Wait until every source has answered or failed once."""
        for asked in self._asked.values():
            await asked.wait()

    async def run(self) -> None:
        """Follow all sources until cancelled."""
        self._begin()
        await self._tasks.until_cancelled()

    def _begin(self) -> None:
        self._following = [self._tasks.spawn(self._follow(source), source.name) for source in self._sources]

    def use_sources(self, sources: Sequence[Source]) -> None:
        """Follow these from now on."""
        for task in self._following:
            task.cancel()
        self._set_sources(sources)
        self._begin()
        self._drop_left()
        self._use_all(LISTED)

    async def _follow(self, source: Source) -> None:
        while True:
            try:
                async with aclosing(source.follow()) as answers:
                    async for found in answers:
                        self._answered(source.name, found)
            except SourceDown as error:
                self._failed(source.name, str(error))
            except Exception as error:  # a bug in one source must not stop the following of any
                self._failed(source.name, f"failed: {error!r}")
            await asyncio.sleep(source.retry_s)

    def _answered(self, source: str, found: list[ReplicaSettings]) -> None:
        if self._problems[source]:
            _log.info("replicas are looked up", source=source, found=len(found))
        self._problems[source] = ""
        self._found[source] = found
        self._unanswered.discard(source)
        self._drop_left()
        self._use_all(source)
        self._asked[source].set()

    def _drop_left(self) -> None:
        if not self._unanswered:
            self._found = {name: found for name, found in self._found.items() if name in self._asked}

    def use_listed(self, replicas: Sequence[ReplicaSettings]) -> None:
        """The configuration lists these from now on."""
        self._listed = [*replicas]
        self._use_all(LISTED)

    def _use_all(self, source: str) -> None:
        """`source` has told something new."""
        together = self._together()
        if together != self._used:
            before, after = ({replica.id: replica.url for replica in each} for each in (self._used, together))
            _log.info(
                "replicas changed",
                source=source,
                came=[replica for replica, url in after.items() if before.get(replica) != url],
                went=[replica for replica in before if replica not in after],
            )
            self._used = together
            self._use(together)

    def _failed(self, source: str, problem: str) -> None:
        if problem != self._problems[source]:
            kept = len(self._found.get(source, ()))
            _log.warning(
                "replicas cannot be looked up; those found last stay", source=source, problem=problem, kept=kept
            )
        self._problems[source] = problem
        self._asked[source].set()

    def _together(self) -> list[ReplicaSettings]:
        """Each engine and each id once. A listed replica keeps its listed id. If two sources find the same engine, the
        first source names it."""
        together, outranked = _Together(self._listed), dict[str, dict[str, Outranked]]()
        left = (name for name in self._found if name not in self._asked)
        for source in (*self._asked, *left):
            for replica in sorted(self._found.get(source, ()), key=lambda each: each.id):
                if why := together.taken(replica):
                    outranked.setdefault(source, {})[replica.id] = Outranked(replica, why)
                else:
                    together.add(replica, source)
        for source, replicas in outranked.items():
            if replicas.keys() != self.outranked.get(source, {}).keys():
                _log.info("other replicas go before these", source=source, why=[each.why for each in replicas.values()])
        self._now, self.outranked = together, outranked
        return together.replicas

    def taken(self, replica: ReplicaSettings) -> str:
        """Why this replica would not be used if a further source found it; empty if it would be."""
        return self._now.taken(replica)


class _Together:
    """The replicas of several sources."""

    def __init__(self, listed: Sequence[ReplicaSettings]) -> None:
        self.replicas: list[ReplicaSettings] = []
        self.sources: dict[str, str] = {}
        self._of_server: dict[str, list[ReplicaSettings]] = {}
        for replica in listed:
            self.add(replica, LISTED)

    def add(self, replica: ReplicaSettings, source: str) -> None:
        self.replicas.append(replica)
        self.sources[replica.id] = source
        self._of_server.setdefault(replica.url, []).append(replica)

    def taken(self, replica: ReplicaSettings) -> str:
        """Why it is not to be added, too: an id and an engine may be there once. A server without a rank is all its
        ranks."""
        if source := self.sources.get(replica.id):
            return f"{replica.id} comes from {source} already"
        for other in self._of_server.get(replica.url, ()):
            if other.dp_rank == replica.dp_rank or None in (other.dp_rank, replica.dp_rank):
                return f"{replica.url} is {other.id} already, from {self.sources[other.id]}"
        return ""


def sources_of(settings: DiscoverySettings) -> list[Source]:
    """The configured sources. The client library of a kind is imported only if that kind is configured."""
    sources: list[Source] = []
    kubernetes = settings.kubernetes
    if kubernetes is not None and kubernetes.inference_pool is not None:
        from gateway.replicas.discovery.inference_pool import InferencePool

        sources.append(InferencePool(kubernetes, kubernetes.inference_pool))
    elif kubernetes is not None:
        from gateway.replicas.discovery.kubernetes import EndpointSlices

        sources.append(EndpointSlices(kubernetes))
    if settings.dns is not None:
        from gateway.replicas.discovery.dns import DnsName

        sources += [DnsName(name, settings.dns) for name in settings.dns.names]
    return sources
