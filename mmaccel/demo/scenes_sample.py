"""A plain sampler for checks: one token a pass, guidance as a second half of the batch.

The library's samplers live in `mmaccel.samplers`; this one knows nothing of them, so that a
figure on the model card does not depend on the code the card is used to judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.demo.scenes_generator import N_PICTURE_TOKENS
from mmaccel.demo.scenes_words import CaptionWords


@torch.inference_mode()
def sample_plain(
    model: Any,
    words: CaptionWords,
    captions: Sequence[str],
    *,
    guidance_scale: float = 2.0,
    temperature: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """Draws picture tokens.

    Args:
        model: a causal LM over words and picture tokens.
        words: turns captions into ids.
        captions: B captions.
        guidance_scale: s of `uncond + s · (cond - uncond)`; 1 is no guidance.
        temperature: divides the logits; 0 takes the largest.
        seed: of this batch.

    Returns:
        [B, 256] int64 on the CPU.

    Cost: 256 passes over B rows, 2·B with guidance.
    """
    from transformers import DynamicCache

    device = next(model.parameters()).device
    prompts = [words.encode(c) for c in captions]
    guided = guidance_scale != 1
    if guided:
        prompts = prompts + [words.unconditional()] * len(captions)
    width = max(map(len, prompts))
    ids = torch.tensor([[words.pad] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    noise = torch.Generator().manual_seed(seed)
    cache, drawn = DynamicCache(config=model.config), []
    for _ in range(N_PICTURE_TOKENS):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            logits_to_keep=1,
        )
        logits = out.logits[:, -1, : words.n_image_tokens].float()
        if guided:
            wanted, free = logits.chunk(2)
            logits = free + guidance_scale * (wanted - free)
        if temperature == 0:
            token = logits.argmax(-1, keepdim=True)
        else:
            law = (logits / temperature).softmax(-1).cpu()
            token = torch.multinomial(law, 1, generator=noise).to(device)
        drawn.append(token)
        ids = torch.cat([token, token]) if guided else token
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        position = position[:, -1:] + 1
    return torch.cat(drawn, 1).cpu()
