"""The models that vLLM's tests name, and the kind of the tiny model that takes the place of each."""

from __future__ import annotations

from typing import Final

MODELS: Final = {
    **dict.fromkeys(
        (
            "HuggingFaceH4/zephyr-7b-beta",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "Qwen/Qwen2-1.5B-Instruct",
            "Qwen/Qwen2.5-1.5B-Instruct",
            "Qwen/Qwen3-0.6B",
            "Qwen/Qwen3-1.7B",
            "Qwen/Qwen3-8B",
            "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
            "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
            "facebook/opt-125m",
        ),
        "generate",
    ),
    "BAAI/bge-base-en-v1.5": "embed",
    "intfloat/multilingual-e5-small": "embed",
    "sentence-transformers/all-MiniLM-L12-v2": "embed",
    "jason9693/Qwen2.5-1.5B-apeach": "classify",
    "BAAI/bge-reranker-base": "rerank",
}
ADAPTERS: Final = (
    "Jackmin108/Qwen3-0.6B-Meow-LoRA",
    "Jackmin108/Qwen3-0.6B-Woof-LoRA",
    "charent/self_cognition_Alice",
    "jekunz/smollm-135m-lora-fineweb-faroese",
    "peft-internal-testing/opt-125m-dummy-lora",
    "typeof/zephyr-7b-beta-lora",
)
