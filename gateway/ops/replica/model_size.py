"""The size of one token's KV on one GPU, in bytes, from a model's config.json.

Every layer keeps a key and a value for each KV head. Tensor-parallel GPUs divide the heads among them; if there are
fewer heads than GPUs, heads are repeated. Multi-head latent attention (DeepSeek) keeps one compressed vector instead,
in full on every GPU. For models with a state that is no KV per token (Mamba, linear attention), the size is unknown.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.settings.config_file import SettingsError

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
_KV_DTYPE_BYTES = {"fp8": 1}
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_STATE_FIELDS = ("mamba_d_state", "ssm_cfg", "state_size", "linear_num_key_heads", "linear_attn_config")

_HOW = (
    "give vllm.kv_bytes_per_token, what one token's KV takes on one GPU: 2 x layers x KV heads on one GPU x head "
    "dimension x bytes of a number, for example 2 x 28 x 4 x 128 x 2 = 57344 for Qwen2.5-7B in bfloat16"
)


def unknown_size(why: str) -> SettingsError:
    """The error when the size cannot be derived."""
    return SettingsError([f"vllm.kv_bytes_per_token: is missing, and {why}; {_HOW}"])


def kv_bytes_per_token(model: Path, dtype: str, kv_cache_dtype: str, tensor_parallel_size: int) -> int:
    """For the model in a local folder. Raises SettingsError."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise unknown_size(f"vllm.model's config.json cannot be read ({why})") from None
    if not isinstance(config, dict):
        raise unknown_size("vllm.model's config.json is no mapping")
    return kv_bytes_of(config, dtype, kv_cache_dtype, tensor_parallel_size)


def kv_bytes_of(config: dict[str, Any], dtype: str, kv_cache_dtype: str, tensor_parallel_size: int) -> int:
    """For a parsed config.json. Raises SettingsError."""
    text = config.get("text_config") or config.get("llm_config") or config.get("language_config") or config
    others = set(text.get("layer_types") or ()) - _ATTENTION_LAYERS
    if others or any(text.get(field) for field in _STATE_FIELDS):
        kinds = ", ".join(sorted(others)) or "recurrent layers"
        raise unknown_size(f"vllm.model keeps more than KV per token ({kinds})")
    layers = _count(text, "num_hidden_layers")
    number_bytes = _KV_DTYPE_BYTES.get(kv_cache_dtype) or _number_bytes(config, text, dtype)
    if text.get("kv_lora_rank"):
        return layers * (_count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim")) * number_bytes
    heads = _count(text, "num_attention_heads")
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or _count(text, "hidden_size") // heads)
    return 2 * layers * max(1, kv_heads // tensor_parallel_size) * head_dim * number_bytes


def _count(text: dict[str, Any], field: str) -> int:
    found = text.get(field)
    if not isinstance(found, int) or found < 1:
        raise unknown_size(f"vllm.model's config.json has no {field}")
    return found


def _number_bytes(config: dict[str, Any], text: dict[str, Any], dtype: str) -> int:
    if dtype != "auto":
        return _DTYPE_BYTES[dtype]
    named = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    if named not in _DTYPE_BYTES:
        raise unknown_size("vllm.model's config.json names no dtype of 2 or 4 bytes")
    return 2  # vLLM's "auto" converts float32 models to 16 bits
