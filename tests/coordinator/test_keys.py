from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import coordinator
from coordinator.keys import WATCHER, PoolKeys, pool_slug, pools_key

ROOT = Path(coordinator.__file__).parent.parent


def test_a_name_that_is_already_a_slug_is_kept() -> None:
    assert pool_slug("qwen2.5-7b_instruct") == "qwen2.5-7b_instruct"


def test_an_altered_name_stays_readable_and_carries_its_digest() -> None:
    slug = pool_slug("Qwen/Qwen3-VL 8B")
    assert re.fullmatch(r"qwen-qwen3-vl-8b-[0-9a-f]{8}", slug)


def test_names_that_read_alike_get_different_slugs() -> None:
    names = ["Org/Model", "org/model", "org model", "org-model", "org{model}", "ORG/MODEL", "org/model/"]
    assert len({pool_slug(name) for name in names}) == len(names)


def test_long_names_that_share_their_end_get_different_slugs() -> None:
    tail = "x" * 80
    assert pool_slug("a/" + tail) != pool_slug("b/" + tail)


@given(st.text())
def test_every_slug_is_safe_inside_a_hash_tag(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9._-]{1,64}", pool_slug(name))


@given(st.text())
def test_a_slug_is_its_own_slug(name: str) -> None:
    slug = pool_slug(name)
    assert pool_slug(slug) == slug


def spelled_by(keys: PoolKeys) -> list[str]:
    return [
        *(keys.replicas, keys.breakers, keys.active, keys.backlog_tokens, keys.owned_tokens, keys.turn),
        *(keys.gateways, keys.leases, keys.flight("g"), keys.held("r"), keys.own("k"), keys.bound_slot(0)),
        *(keys.agents, keys.engines, keys.asks, keys.reports, keys.entries, keys.cursors),
        *(keys.events("r"), keys.measured("r"), keys.response("id}{x")),
    ]


def test_every_key_of_a_pool_carries_its_hash_tag() -> None:
    spelled = spelled_by(PoolKeys("m"))
    assert all(key.startswith("kvgate:{m}:") for key in spelled)
    assert len(set(spelled)) == len(spelled)


def test_clusters_of_different_namespaces_share_no_key_and_each_pool_stays_in_its_slot() -> None:
    spelled = [[*spelled_by(PoolKeys("m", name)), pools_key(name)] for name in ("", "a", "b", "m", "pools", "watcher")]
    flat = [WATCHER, *(key for keys in spelled for key in keys)]
    assert len(set(flat)) == len(flat)
    assert all(key.startswith("kvgate:a:{m}:") for key in spelled[1][:-1])
    assert (pools_key(), pools_key("a")) == ("kvgate:pools", "kvgate:a:pools")


def test_keys_are_spelled_nowhere_else() -> None:
    folders = [ROOT / name for name in ("gateway", "bench", "configs", "deploy")]
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in {".py", ".lua", ".yaml", ".sh"}]
    files += [file for file in (ROOT / "coordinator").rglob("*") if file.suffix in {".py", ".lua"}]
    guilty = [str(file.relative_to(ROOT)) for file in files if re.search(r"kvgate:\{(?!\*)", file.read_text("utf-8"))]
    assert files
    assert guilty == []
