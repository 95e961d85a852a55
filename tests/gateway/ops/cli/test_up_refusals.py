"""`kvgate up` refuses bad input before it starts anything, and cleans up when a process does not start."""

from __future__ import annotations

import socket

import pytest

from gateway.ops.local.ports import free_ports
from tests.gateway.ops.cli.conftest import Kvgate
from tests.gateway.ops.cli.test_commands import one_line_error


def test_a_port_that_something_else_listens_on(kvgate: Kvgate) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", kvgate.port))
        other.listen()
        assert f"port {kvgate.port} on 127.0.0.1 cannot be listened on" in one_line_error(kvgate.refused_up())


def test_a_redis_that_does_not_answer(kvgate: Kvgate) -> None:
    url = f"redis://user:a-secret@127.0.0.1:{free_ports(1)[0]}/0"
    error = one_line_error(kvgate.refused_up("--redis-url", url))
    assert "cannot be used: cannot connect to Redis" in error
    assert "a-secret" not in error


def test_a_redis_url_that_is_none(kvgate: Kvgate) -> None:
    error = one_line_error(kvgate.refused_up("--redis-url", "localhost:6379"))
    assert "kvgate: --redis-url: must start with redis://" in error


def test_servers_of_which_none_is_there_are_named_before_anything_starts(kvgate: Kvgate) -> None:
    urls = [f"http://127.0.0.1:{port}" for port in free_ports(2)]
    replicas = [each for n, url in enumerate(urls) for each in ("--replica", f"id=r{n},url={url},events=tcp://h:1")]
    error = one_line_error(kvgate.refused_up(*replicas))
    assert "no server to front after 5 s" in error
    assert "still loads its model" in error
    for url in urls:
        assert f"{url} (connection refused)" in error
        assert f"curl {url}/health" in error
    assert not list((kvgate.state_dir / "logs").iterdir())


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--policy", "fastest"], "kvgate: --policy: is 'fastest'; must be one of"),
        (["--replica", "id=r0"], "kvgate: --replica id=r0: url: is missing"),
        (["--replica", "id=r0,url=tcp://h:1"], "kvgate: --replica id=r0,url=tcp://h:1: url: 'tcp://h:1' is not a"),
        (["--replica", "id=r0,url=http://h:1", "--replicas", "2"], "give one of the two"),
        (
            ["--replica", "id=r0,url=http://h:1", "--replica", "id=r0,url=http://h:2"],
            "--replica: id given twice: r0",
        ),
    ],
)
def test_options_that_make_no_cluster(kvgate: Kvgate, options: list[str], wrong: str) -> None:
    assert wrong in one_line_error(kvgate.refused_up(*options))
    assert kvgate.alive() == []


def test_a_configuration_to_build_on_that_is_not_there(kvgate: Kvgate) -> None:
    result = kvgate.refused_up("--config", "missing.yaml")
    assert result.returncode == 1
    assert result.stderr.startswith("kvgate: missing.yaml: 1 problem\n  cannot be read (No such file")


def test_a_configuration_to_build_on_with_tls(kvgate: Kvgate) -> None:
    file = kvgate.folder / "tls.yaml"
    file.write_text("tls: {certificate: tls.crt, key: tls.key}")
    assert "tls: kvgate up serves plain HTTP" in one_line_error(kvgate.refused_up("--config", str(file)))


def test_a_state_directory_that_cannot_be_written(kvgate: Kvgate) -> None:
    kvgate.state_dir.write_text("a file")
    result = kvgate.refused_up()
    kvgate.state_dir.unlink()
    assert "cannot write in state dir" in one_line_error(result)


def test_a_process_that_does_not_start_is_shown_with_its_log_and_the_rest_is_stopped(kvgate: Kvgate) -> None:
    broken = kvgate.folder / "bin" / "redis-server"
    broken.parent.mkdir()
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo "Redis server v=99.0.0"; exit; }\necho out of luck\nexit 3\n'
    )
    broken.chmod(0o755)
    result = kvgate.up("--detach", env={"PATH": f"{broken.parent}:/usr/bin:/bin"})
    assert result.returncode == 1
    assert "redis exited with code 3 while starting" in result.stderr
    assert "out of luck" in result.stderr
    assert kvgate.alive() == []
    assert not (kvgate.state_dir / "cluster.json").exists()
