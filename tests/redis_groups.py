"""Groups of real Redis servers: a master with replicas and sentinels, and a Redis Cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from gateway.ops.local.ports import _PORTS, free_ports, is_free
from tests.polling import wait_until
from tests.redis_server import RedisServer, default_server, server_command

MASTER = "the-master"
DOWN_AFTER_MS = 500
"""A master that is silent for this long is down. About a second later one of its replicas is the master."""
_SLOTS = 16384
_BUS = 10_000


def client_of(server: RedisServer) -> redis.Redis:
    return redis.Redis(port=server.port, decode_responses=True, protocol=2, socket_timeout=2)


def end(server: RedisServer) -> None:
    server.resume()
    server.kill()


class SentinelGroup:
    """One master, two replicas and three sentinels at first. Every failover changes which server is the master."""

    def __init__(self, servers: list[RedisServer], sentinels: list[RedisServer]) -> None:
        self.servers = servers
        self.sentinels = sentinels
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
        self.url = f"redis+sentinel://{hosts}/{MASTER}/0"

    def master_port(self, sentinel: RedisServer | None = None) -> int:
        """The master's port, according to a sentinel."""
        with client_of(sentinel or self.sentinels[0]) as client:
            return int(client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)[1])

    def master(self) -> RedisServer:
        port = self.master_port()
        return next(server for server in self.servers if server.port == port)

    def has_settled(self) -> bool:
        """Whether all sentinels agree on the master, and it serves."""
        told = []
        for sentinel in self.sentinels:
            with client_of(sentinel) as client:
                told.append(client.sentinel_master(MASTER))
        return {one["flags"] for one in told} == {"master"} and len({one["port"] for one in told}) == 1

    def is_whole(self) -> bool:
        """Whether the group has settled, and every sentinel knows the other two and two synchronized replicas."""
        return self.has_settled() and all(map(self._knows_all, self.sentinels))

    def _knows_all(self, sentinel: RedisServer) -> bool:
        with client_of(sentinel) as client:
            others = client.sentinel_master(MASTER)["num-other-sentinels"]
            replicas = client.sentinel_slaves(MASTER)
        in_step = [one for one in replicas if one["flags"] == "slave" and one["master-link-status"] == "ok"]
        return others == len(in_step) == 2

    def heal(self) -> None:
        """Starts or resumes every server. A server that was killed or frozen becomes a replica at once: sentinels would
        take ten seconds for that."""
        for server in (*self.servers, *self.sentinels):
            server.resume()
        wait_until(self.has_settled)
        master = self.master()
        for server in self.servers:
            if server.process.poll() is not None:
                server.start()
        for server in self.servers:
            if server is not master:
                with client_of(server) as client:
                    client.replicaof("127.0.0.1", master.port)


@contextmanager
def running_sentinels(binary: str | None = None) -> Iterator[SentinelGroup]:
    binary = binary or default_server()
    ports = free_ports(6)
    with tempfile.TemporaryDirectory(prefix="kvgate-sentinel-") as folder, ExitStack() as stack:

        def started(port: int, command: list[str]) -> RedisServer:
            server = RedisServer(port, command)
            stack.callback(end, server)
            return server

        def home(port: int) -> Path:
            (path := Path(folder, str(port))).mkdir()
            return path

        # A master without replicas refuses writes, so that its remaining clients notice the failover.
        options = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1", "--min-replicas-to-write", "1")
        first, *others = ports[:3]
        servers = [started(first, server_command(binary, home(first), first, options))]
        options += ("--replicaof", "127.0.0.1", str(first))
        servers += [started(port, server_command(binary, home(port), port, options)) for port in others]
        sentinels = []
        for port in ports[3:]:
            file = home(port) / "sentinel.conf"
            file.write_text(sentinel_config(port, first, file.parent))
            sentinels.append(started(port, [binary, str(file), "--sentinel"]))
        group = SentinelGroup(servers, sentinels)
        wait_until(group.is_whole)
        yield group


def sentinel_config(port: int, master_port: int, home: Path) -> str:
    return f"""
port {port}
bind 127.0.0.1
dir {home}
logfile {home}/sentinel.log
sentinel monitor {MASTER} 127.0.0.1 {master_port} 2
sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}
sentinel failover-timeout {MASTER} 2000
"""


class RedisCluster:
    """Three masters, each with a third of the slots at first."""

    def __init__(self, nodes: list[RedisServer]) -> None:
        self.nodes = nodes
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)

    def run(self, node: RedisServer, *command: object) -> Any:
        with client_of(node) as client:
            return client.execute_command(*command)

    def owner(self, key: str) -> RedisServer:
        """The node that serves the key's slot, according to the node itself."""
        for node in self.nodes:
            try:
                self.run(node, "EXISTS", key)
            except redis.ResponseError:
                continue
            return node
        raise LookupError(key)

    @contextmanager
    def moving(self, key: str, to: RedisServer) -> Iterator[None]:
        """Inside the context, the slot of `key` is migrating, half of its keys moved. Afterwards `to` owns it."""
        source, slot = self.owner(key), self.run(to, "CLUSTER", "KEYSLOT", key)
        source_id, to_id = self.run(source, "CLUSTER", "MYID"), self.run(to, "CLUSTER", "MYID")
        self.run(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        self.run(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", to_id)
        self._move(source, to, slot, self.run(source, "CLUSTER", "COUNTKEYSINSLOT", slot) // 2)
        try:
            yield
        finally:
            while count := self.run(source, "CLUSTER", "COUNTKEYSINSLOT", slot):
                self._move(source, to, slot, count)
            for node in (to, source, *self.nodes):
                self.run(node, "CLUSTER", "SETSLOT", slot, "NODE", to_id)

    def _move(self, source: RedisServer, to: RedisServer, slot: int, count: int) -> None:
        keys = self.run(source, "CLUSTER", "GETKEYSINSLOT", slot, count)
        if keys:
            self.run(source, "MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *keys)

    def is_ok(self) -> bool:
        told = [self.run(node, "CLUSTER INFO") for node in self.nodes]
        return all((one["cluster_state"], one["cluster_known_nodes"]) == ("ok", "3") for one in told)


def _ports_with_a_bus(count: int) -> list[int]:
    """Ports for cluster nodes. A node's cluster bus is 10 000 ports above its port. The nodes' ports lie below the
    range of `free_ports`, so that the bus ports lie inside it."""
    found: list[int] = []
    while len(found) < count:
        (bus,) = free_ports(1)
        if bus - _BUS < _PORTS.start and is_free("127.0.0.1", bus - _BUS):
            found.append(bus - _BUS)
    return found


@contextmanager
def running_redis_cluster(binary: str | None = None) -> Iterator[RedisCluster]:
    binary = binary or default_server()
    with tempfile.TemporaryDirectory(prefix="kvgate-cluster-") as folder, ExitStack() as stack:
        nodes = []
        for port in _ports_with_a_bus(3):
            (home := Path(folder, str(port))).mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
            nodes.append(RedisServer(port, server_command(binary, home, port, options)))
            stack.callback(end, nodes[-1])
        cluster = RedisCluster(nodes)
        for index, node in enumerate(nodes):
            slots = range(_SLOTS * index // len(nodes), _SLOTS * (index + 1) // len(nodes))
            cluster.run(node, "CLUSTER", "ADDSLOTS", *slots)
            cluster.run(node, "CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        wait_until(cluster.is_ok)
        yield cluster
