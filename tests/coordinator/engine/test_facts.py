"""The facts that a replica tells about itself, and how differing servers are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.engine.facts import (
    EngineFacts,
    base_card,
    cache_settings,
    decode_tokens_per_s,
    parse_metrics,
    parse_models,
)

CAPTURED = [
    json.loads(line) for line in (Path(__file__).parents[2] / "captures" / "vllm-ranks.jsonl").read_text().splitlines()
]
"""Data-parallel servers of vLLM 0.33 on CPUs: what they tell, and which rank computed for each value of the header. The
external mode has no such values: it is for mixtures of experts, which vLLM does not compute on several CPU ranks."""
METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="2048"} 1.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
process_start_time_seconds 1.79524843804e+09
"""


def of_ranks(*labels: str) -> str:
    return "".join(f'vllm:num_requests_running{{engine="{label}"}} 0\n' for label in labels)


def test_capacity_and_start_time_come_from_vllms_metrics() -> None:
    facts = parse_metrics(METRICS, None)
    assert facts == EngineFacts(2048 * 16, f"{1795248438040:x}", block_size=16, ranks=(0,), figures={"running": 0.0})


def test_two_engines_behind_one_address_are_seen() -> None:
    second = METRICS.replace('engine="0"', 'engine="1"')
    assert parse_metrics(METRICS + second, None).ranks == (0, 1)
    assert parse_metrics(METRICS + second, 1).capacity_tokens == 1024 * 16  # the blocks are those of both


def test_groups_of_layers_share_blocks_so_vllms_own_count_of_tokens_is_the_capacity() -> None:
    told = METRICS.replace("num_gpu_blocks", 'kv_cache_size_tokens="12345",num_gpu_blocks')
    assert parse_metrics(told, None).capacity_tokens == 12345


def test_an_engine_whose_prompts_others_compute_is_known_by_the_source_of_their_tokens() -> None:
    source = 'vllm:prompt_tokens_cached_by_source_total{{engine="0",source="p2p"}} {}\n'
    told = [parse_metrics(METRICS + source.format(tokens), None).figures.get("transfers") for tokens in (0, 640)]
    assert told == [None, 640]


def test_the_only_rank_of_a_server_is_the_one_that_is_meant() -> None:
    third = METRICS.replace('engine="0"', 'engine="3"')
    alone, named = parse_metrics(third, None), parse_metrics(third, 3)
    assert alone == named
    assert (alone.ranks, alone.capacity_tokens) == ((3,), parse_metrics(METRICS, None).capacity_tokens)
    assert alone.figures == parse_metrics(METRICS, None).figures != {}


@pytest.mark.parametrize(
    ("labels", "dp_rank", "in_python", "in_rust"),
    [
        ("01", 1, 1, 1),  # vLLM balances all ranks itself
        ("1", 1, None, None),  # a server for each rank: the front end in Python refuses any other number than 0
        ("23", 3, 1, 3),  # a server for the ranks of each node
        ("", 1, 1, 1),  # no metrics
    ],
)
def test_each_front_end_is_told_a_rank_as_it_counts_them(
    labels: str, dp_rank: int, in_python: int | None, in_rust: int | None
) -> None:
    text = of_ranks(*labels)
    assert parse_metrics(text, dp_rank).header_rank(dp_rank) == in_python
    assert parse_metrics(text + "# EOF\n", dp_rank).header_rank(dp_rank) == in_rust


@pytest.mark.parametrize("server", CAPTURED, ids=lambda each: f"{each['mode']}-{each['front_end']}-{each['ranks'][0]}")
def test_the_header_leads_to_the_rank_that_is_meant_on_real_servers(server: dict[str, Any]) -> None:
    for rank in server["ranks"]:
        facts = parse_metrics("\n".join(server["metrics"]), rank)
        assert (facts.ranks, facts.is_rust) == (tuple(server["ranks"]), server["front_end"] == "rust")
        named = facts.header_rank(rank)
        assert named is None if len(server["ranks"]) == 1 else server["header"][str(named)]["rank"] == rank


@pytest.mark.parametrize(
    ("labels", "dp_rank", "said"),
    [
        ("0", None, ""),
        ("3", None, ""),
        ("3", 3, ""),
        ("23", 3, ""),
        ("", 3, ""),  # it does not tell
        ("23", None, "a data-parallel server with 2 ranks, 2 to 3, behind one address: list it once per rank"),
        ("23", 1, "dp_rank is 1, but its server has 2 ranks, 2 to 3"),
        ("0", 1, "dp_rank is 1, but its server has rank 0 only"),
    ],
)
def test_a_rank_that_the_server_does_not_have_contradicts_it(labels: str, dp_rank: int | None, said: str) -> None:
    found = parse_metrics(of_ranks(*labels), dp_rank).contradiction(dp_rank)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_an_engines_figures_are_those_of_its_rank() -> None:
    text = """\
vllm:num_requests_running{engine="0"} 2
vllm:num_requests_running{engine="1"} 3
vllm:num_requests_waiting{engine="1"} 4
vllm:kv_cache_usage_perc{engine="1"} 0.25
vllm:prefix_cache_queries_total{engine="1"} 1e3
vllm:prefix_cache_hits_total{engine="1"} 500
vllm:generation_tokens_total{engine="1"} 7
"""
    queue = {"running": 3, "waiting": 4, "kv_usage": 0.25}
    tokens = {"prefix_queries_tokens": 1000, "prefix_hits_tokens": 500, "generated_tokens": 7}
    assert parse_metrics(text, 1).figures == queue | tokens
    assert parse_metrics(text, None).figures == {"running": 2}


def test_an_engine_sleeps_that_is_not_awake_at_any_level() -> None:
    text = "".join(
        f'vllm:engine_sleep_state{{engine="{rank}",sleep_state="{state}"}} {value}\n'
        for rank, values in (("0", (1.0, 0.0)), ("1", (0.0, 1.0)), ("2", (0.0, 0.0)))
        for state, value in zip(("awake", "weights_offloaded"), values, strict=True)
    )
    assert [parse_metrics(text, rank).is_asleep for rank in (0, 1, 2, 3)] == [False, True, True, None]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>not found</html>",
        "{}",
        "process_start_time_seconds soon",
        "vllm:cache_config_info 1",
        'vllm:x{block_size="²"} 1',
    ],
)
def test_anything_else_tells_nothing(text: str) -> None:
    assert parse_metrics(text, None) == EngineFacts()


@pytest.mark.parametrize(
    "line",
    ["vllm:num_requests_running{\n", "vllm:num_requests_running\n", "vllm:num_requests_running{" + "a" * 8000 + "}\n"],
    ids=["braces that nothing closes", "names without values", "one long label"],
)
def test_lines_that_almost_match_do_not_hold_the_gateway_up(line: str) -> None:
    """A pattern that looks beyond one line, or twice at a letter, would take minutes on these lines."""
    text = line * (2 * 2**20 // len(line))
    assert parse_metrics(text, None) == EngineFacts()
    with pytest.raises(ValueError, match="cache_config_info"):
        cache_settings(text)


def test_only_so_many_samples_and_cards_are_looked_at() -> None:
    ranks = "".join(f'vllm:num_requests_running{{engine="{rank}"}} 1\n' for rank in range(10_000))
    assert len(parse_metrics(ranks, None).ranks) == 8192
    assert len(parse_models({"data": [{"id": "m"}] * 10_000})) == 4096


def test_adapters_and_aliases_share_the_base_model() -> None:
    cards = parse_models(
        {
            "data": [
                {"id": "lora", "root": "/adapters/x", "parent": "served"},
                {"id": "served", "root": "org/model", "parent": None},
                {"id": "alias", "root": "org/model", "parent": None},
            ]
        }
    )
    base = base_card(cards)
    assert base is not None
    assert base.root == "org/model"
    assert [card.parent for card in cards] == ["served", None, None]


def test_a_server_without_roots_is_its_own_base() -> None:
    (card,) = parse_models({"object": "list", "data": [{"id": "llama"}]})
    assert (card.root, card.parent) == ("llama", None)


@pytest.mark.parametrize("document", [None, [], {}, {"data": {}}, {"data": [1, {"id": 2}, {}]}, "x"])
def test_what_lists_no_model_gives_none(document: object) -> None:
    assert parse_models(document) == []
    assert base_card([]) is None


def test_the_pace_of_an_engine_is_that_of_one_sequence_behind_its_first_token() -> None:
    text = """
vllm:generation_tokens_total{engine="0"} 110
vllm:time_to_first_token_seconds_count{engine="0"} 10
vllm:inter_token_latency_seconds_sum{engine="0"} 4
"""
    first = parse_metrics(text, None).figures
    later = {"generated_tokens": 170, "first_tokens": 20, "decode_s": 5.0}
    assert (decode_tokens_per_s({}, first), decode_tokens_per_s(first, later)) == (25, 50)
    assert decode_tokens_per_s(later, first) == 25, "a new engine counts from zero"
    assert [decode_tokens_per_s(first, first), decode_tokens_per_s({}, {"generated_tokens": 9})] == [0, 0]
