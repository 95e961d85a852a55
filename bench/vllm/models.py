"""Builds a vision-language model in the given folder, of the given size. install.py runs it with vLLM's Python.

It is LLaVA-OneVision with random weights. Its answers mean nothing, but for the engine it is a real model, with image
tokens in its prompts and a KV cache. Everything is made here, offline, from seeds and from files of the pinned vllm
package, so every machine gets the same model, in seconds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: nothing may be fetched

import torch
import vllm
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)

_VOCABULARY = 4096
_CONTEXT_TOKENS = 4096
_TILE_PIXELS, _PATCH_PIXELS = 112, 14  # an image is one tile of 64 tokens, and up to 2 x 2 more
_GRIDS = [[112, 112], [112, 224], [224, 112], [224, 224]]
# Larger than usual. With 0.02 and so few layers, the next token depends on little more than the last one, and no answer
# would show from which KV it was computed.
_WEIGHT_RANGE = 0.1

_TEXT_TOWERS = {
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "small": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}

_PAD, _START, _END, _IMAGE, _VIDEO = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"

# The parts of a message are rendered in their order: text before an image stays before it.
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] in ('image', 'image_url') %}{{ '<image>' }}"
    "{% elif part['type'] == 'video' %}{{ '<video>' }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(folder: Path, size: str) -> None:
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    config = _config(tokenizer, _TEXT_TOWERS[size])
    _save_weights(config, folder)
    _processor(config, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte-pair encoding learned from the source of vLLM's entrypoints: English comments, JSON, code."""
    corpus = sorted((Path(vllm.__file__).parent / "entrypoints").rglob("*.py"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_PAD, _START, _END, _IMAGE, _VIDEO],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(file) for file in corpus], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_PAD,
        additional_special_tokens=[_START, _IMAGE, _VIDEO],
        model_max_length=_CONTEXT_TOKENS,
    )
    fast.chat_template = _TEMPLATE
    return fast


def _config(tokenizer: PreTrainedTokenizerFast, tower: dict[str, int]) -> LlavaOnevisionConfig:
    text = Qwen2Config(
        vocab_size=len(tokenizer),
        **tower,
        max_position_embeddings=_CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=_WEIGHT_RANGE,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(_PAD),
    )
    vision = SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=_TILE_PIXELS,
        patch_size=_PATCH_PIXELS,
        vision_use_head=False,
    )
    return LlavaOnevisionConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids(_IMAGE),
        video_token_id=tokenizer.convert_tokens_to_ids(_VIDEO),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        image_grid_pinpoints=_GRIDS,
        tie_word_embeddings=True,
    )


def _save_weights(config: LlavaOnevisionConfig, folder: Path) -> None:
    model = LlavaOnevisionForConditionalGeneration(config)
    text = config.text_config
    model.generation_config = GenerationConfig(eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id)
    model.save_pretrained(folder)
    # transformers 5 omits the "vision_model." that vLLM 0.32 expects in the names of SigLIP's weights.
    file = folder / "model.safetensors"
    weights = {_name_for_vllm(name): weight for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def _name_for_vllm(name: str) -> str:
    if "vision_tower." in name and "vision_model" not in name:
        return name.replace("vision_tower.", "vision_tower.vision_model.")
    return name


def _processor(config: LlavaOnevisionConfig, tokenizer: PreTrainedTokenizerFast) -> LlavaOnevisionProcessor:
    size = {"height": _TILE_PIXELS, "width": _TILE_PIXELS}
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=config.image_grid_pinpoints),
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        tokenizer=tokenizer,
        num_image_tokens=(_TILE_PIXELS // _PATCH_PIXELS) ** 2,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        image_token=_IMAGE,
        video_token=_VIDEO,
        chat_template=_TEMPLATE,
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2])
