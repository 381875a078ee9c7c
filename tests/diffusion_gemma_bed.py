"""DiffusionGemma's own classes with tiny random weights, in transformers and in diffusers."""

from __future__ import annotations

from typing import Any

import torch

VOCAB, CANVAS, PAD, END = 41, 8, 0, 1


def build_model(**generation: Any) -> Any:
    """A model in evaluation mode, float64, the same at every call.

    `model.calls` counts passes of the decoder, `model.seen` has their inputs.
    """
    from transformers import (
        DiffusionGemmaConfig,
        DiffusionGemmaForBlockDiffusion,
        DiffusionGemmaTextConfig,
        Gemma4VisionConfig,
    )

    text = DiffusionGemmaTextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=8,
        max_position_embeddings=256, sliding_window=64, num_experts=4, top_k_experts=2,
        moe_intermediate_size=16, pad_token_id=PAD, eos_token_id=END, bos_token_id=2,
        layer_types=["sliding_attention", "full_attention"], initializer_range=0.5,
    )  # fmt: skip
    vision = Gemma4VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    config = DiffusionGemmaConfig(
        text_config=text, vision_config=vision, canvas_length=CANVAS, image_token_id=40,
        boi_token_id=39, eoi_token_id=38, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(3)
    model = DiffusionGemmaForBlockDiffusion._from_config(config, experts_implementation="eager")
    model = model.double().eval()
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.seen = []
    model.model.decoder.register_forward_pre_hook(
        lambda module, args, inputs: model.seen.append(inputs), with_kwargs=True
    )
    return model


class Words:
    """A processor of one letter a token, padding on the left."""

    eos_token_id = END

    def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, torch.Tensor]:
        chats = messages if isinstance(messages[0], list) else [messages]
        rows = [[2 + ord(letter) % 30 for letter in chat[-1]["content"]] for chat in chats]
        longest = max(map(len, rows))
        ids = [[PAD] * (longest - len(row)) + row for row in rows]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        return [" ".join(str(int(token)) for token in row) for row in rows]


def build_pipe(scheduler: Any = None) -> Any:
    """diffusers' pipeline over `build_model`, without progress bars."""
    from diffusers import BlockRefinementScheduler, DiffusionGemmaPipeline

    scheduler = scheduler or BlockRefinementScheduler(block_length=CANVAS)
    pipe = DiffusionGemmaPipeline(model=build_model(), scheduler=scheduler, processor=Words())
    pipe.set_progress_bar_config(disable=True)
    return pipe
