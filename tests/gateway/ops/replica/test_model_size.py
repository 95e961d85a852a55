"""The KV size of one token on one GPU, for models of various shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.ops.replica.model_size import kv_bytes_of, kv_bytes_per_token
from gateway.settings.config_file import SettingsError

QWEN_7B = {
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "dtype": "bfloat16",
}
DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


def size(config: dict[str, Any], dtype: str = "auto", kv: str = "auto", gpus: int = 1) -> int:
    return kv_bytes_of(config, dtype, kv, gpus)


@pytest.mark.parametrize(
    ("config", "gpus", "expected"),
    [
        (QWEN_7B, 1, 57_344),
        (QWEN_7B, 2, 28_672),
        (QWEN_7B, 8, 14_336),  # 4 heads on 8 GPUs: each GPU has one
        (LLAMA_70B, 1, 327_680),
        (LLAMA_70B, 8, 40_960),
        (DEEPSEEK, 1, 70_272),
        (DEEPSEEK, 8, 70_272),  # every GPU has the whole latent vector
    ],
)
def test_the_size_of_a_known_model(config: dict[str, Any], gpus: int, expected: int) -> None:
    assert size(config, gpus=gpus) == expected


def test_numbers_of_one_byte_and_of_four() -> None:
    assert size(QWEN_7B, kv="fp8") == 57_344 // 2
    assert size(QWEN_7B, dtype="float32") == 57_344 * 2
    assert size({**QWEN_7B, "torch_dtype": "float32"}) == 57_344  # vLLM reduces it to 16 bits


def test_a_head_dimension_of_its_own_counts_and_heads_without_groups_are_kv_heads() -> None:
    assert size({**QWEN_7B, "head_dim": 256}) == 57_344 * 2
    assert size({**QWEN_7B, "num_key_value_heads": None}) == 57_344 * 7


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({**QWEN_7B, "layer_types": ["linear_attention", "full_attention"]}, "more than KV per token"),
        ({**QWEN_7B, "mamba_d_state": 128}, "more than KV per token"),
        ({**QWEN_7B, "num_hidden_layers": None}, "no num_hidden_layers"),
        ({**QWEN_7B, "torch_dtype": None}, "names no dtype"),
        ({}, "no num_hidden_layers"),
    ],
)
def test_what_cannot_be_told_is_not_guessed(config: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        size(config)


def test_a_folder_tells_its_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    assert kv_bytes_per_token(tmp_path, "auto", "auto", 1) == 57_344
