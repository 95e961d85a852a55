"""Fills a cache of Hugging Face with tiny models under the names that vLLM's tests use. Runs in vLLM's Python.

A name is looked up in this cache when `HF_HUB_OFFLINE` is set. So neither the tests nor the plugin has to know that
`Qwen/Qwen3-0.6B` is a model of three million random weights. Everything is made from seeds: nothing is fetched.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: nothing may be fetched

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)

from bench.vllm.suite.names import ADAPTERS, MODELS

_VOCABULARY = 10240  # some tests name tokens up to 9454; more make tests of all probabilities slow
_CONTEXT_TOKENS = 40960  # that of Qwen3
_WEIGHT_RANGE = 0.1  # with the usual 0.02, and so few layers, all answers repeat one token
_ENDS_OF_JSON = re.compile(r"""["}\]]+[,:}\] ]*""")
"""A test that asks for JSON waits until its braces close. Random weights would seldom close a string: such tokens get a
constant advantage, which makes them some of every hundred."""
_ADVANTAGE = 20.0
_RANK = 8  # of an adapter
_ADAPTED = ("q_proj", "v_proj")
_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Parsers of reasoning and of tool calls do not start without the tokens of their model.
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(cache: Path, tests: Path) -> None:
    tokenizer = _tokenizer(tests / "entrypoints")
    for name, kind in MODELS.items():
        torch.manual_seed(0)
        _save(kind, tokenizer, _snapshot(cache, name))
    for name in ADAPTERS:
        torch.manual_seed(0)
        _save_adapter(_config(tokenizer, labels=2), _snapshot(cache, name))


def _snapshot(cache: Path, name: str) -> Path:
    """The folder in which Hugging Face's library finds the files of this model."""
    revision = "0" * 40
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    return repository / "snapshots" / revision


def _save(kind: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    config = _config(tokenizer, labels=1 if kind == "rerank" else 2)
    model = {
        "generate": Qwen3ForCausalLM,
        "embed": Qwen3Model,
        "classify": Qwen3ForSequenceClassification,
        "rerank": Qwen3ForSequenceClassification,
    }[kind](config)
    if kind == "generate":
        _close_json(model, tokenizer)
        model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _close_json(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """The first number of each state is the same everywhere, and only the tokens that end JSON look at it."""
    ends = [number for token, number in tokenizer.get_vocab().items() if _ENDS_OF_JSON.fullmatch(token)]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[ends, 0] = _ADVANTAGE


def _save_adapter(config: Qwen3Config, folder: Path) -> None:
    outputs = {"q_proj": config.num_attention_heads, "v_proj": config.num_key_value_heads}
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name in _ADAPTED:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(_RANK, config.hidden_size) * _WEIGHT_RANGE
            weights[f"{prefix}.lora_B.weight"] = torch.randn(outputs[name] * config.head_dim, _RANK) * _WEIGHT_RANGE
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": _ADAPTED, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))


def _config(tokenizer: PreTrainedTokenizerFast, labels: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=2,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=_CONTEXT_TOKENS,
        tie_word_embeddings=False,
        initializer_range=_WEIGHT_RANGE,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(_PAD),
        num_labels=labels,
    )


def _tokenizer(corpus: Path) -> PreTrainedTokenizerFast:
    """Byte-pair encoding learned from vLLM's tests. Some of them count the tokens of their own prompts, and expect one
    for each word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_PAD, _START, _END, *_MARKS],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(file) for file in sorted(corpus.rglob("*.py"))], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END, pad_token=_PAD, model_max_length=_CONTEXT_TOKENS
    )
    fast.chat_template = _TEMPLATE
    return fast


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
