"""`scenes-var`: a tokenizer of several scales, and a small transformer that draws scale by scale.

Tokenizer: K. Tian et al., "Visual Autoregressive Modeling", NeurIPS 2024 (arXiv 2404.02905),
algorithm 1: at every scale the vectors of codes are drawn to what is left of the latents, and the
encoder to them. Departures: the reconstruction error alone, weighted towards the objects; for
the first steps nothing is quantized, then the codebook begins at latents; codes that went out of
use begin again at what was left somewhere.

Generator: `mmaccel.pipelines.hosts.next_scale`, all scales of an image in one pass, each given the
true codes of those before.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import pad_sequence

from mmaccel.pipelines.hosts.next_scale.folder import FOLDER
from mmaccel.pipelines.hosts.next_scale.network import NextScaleConfig, NextScaleTransformer
from mmaccel.tokenizers_vq.multi_scale import (
    MultiScaleConfig,
    MultiScaleTokenizer,
    load_multi_scale,
    save_multi_scale,
)
from mmaccel.weight_folders import save_folder
from scripts.training import scenes
from scripts.training.loop import Batch, Plan

SIDES = (1, 2, 3, 4, 5, 6, 7, 8)
TOKENIZER: dict[str, Any] = dict(
    size=64, patch=8, sides=SIDES, n_codes=1024, code_width=8, encoder_width=96, encoder_depth=3,
    decoder_width=128, decoder_depth=3, fine_width=48, fine_depth=2,
)  # fmt: skip
NETWORK: dict[str, Any] = dict(
    sides=SIDES, n_codes=1024, code_width=8, width=192, depth=5, n_heads=3, hidden=440,
    condition="text", positions="rotary", adaptive="none", attention_scale=1.0,
    has_unit_keys=False, is_gated=True,
)  # fmt: skip
PLANS = {
    "tokenizer": Plan(1780, 920, 48, rate_rest=1.6e-3, average=0, mixed=True),
    "generator": Plan(7600, 2600, 32, mixed=True),
}
_CONTINUOUS = 150  # steps without quantization
_COMMIT = 0.1  # weight of what draws the encoder to the vectors
_RECONSTRUCTION = 10.0


class Tokenizer(scenes.Tokenizer):
    """Images to themselves by way of codes of several scales."""

    def build(self, before: Path | None) -> Any:
        model = MultiScaleTokenizer(MultiScaleConfig(**TOKENIZER))
        self.use = torch.ones(model.vocab_size)  # of the codes, a running mean of counts
        return model

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        latents = model.encoder(ids * 2 - 1).float()
        total, of_codes, of_encoder = latents, latents.new_zeros(()), latents.new_zeros(())
        if step >= _CONTINUOUS:
            total, of_codes, of_encoder = self._quantize(model.quantizer, latents, step)
        made = model.decoder(total).float() / 2 + 0.5
        error = (scenes.object_weight(ids) * (made - labels).square()).mean()
        return _RECONSTRUCTION * error + of_codes + _COMMIT * of_encoder

    def _quantize(self, quantizer: Any, latents: Tensor, step: int) -> tuple[Tensor, ...]:
        """Sums of codes `[B, C, N, N]` with straight-through gradients, and both errors, the mean
        over scales.
        """
        table = quantizer.embedding.weight
        if step == _CONTINUOUS:
            with torch.no_grad():
                vectors = latents.permute(0, 2, 3, 1).flatten(0, 2)
                table.copy_(vectors[torch.randint(len(vectors), (len(table),))])
                table.mul_(torch.rand(len(table), 1))  # what is left of latents is shorter
        rest, total = latents.detach(), torch.zeros_like(latents)
        of_codes, of_encoder = [], []
        codes, left = [], []
        for scale in range(len(quantizer.sides)):
            with torch.no_grad():
                codes.append(quantizer.read(rest, scale).flatten())
                left.append(rest.permute(0, 2, 3, 1).flatten(0, 2))
            added = quantizer.spread(codes[-1].view(len(latents), -1), scale)
            total, rest = total + added, rest - added.detach()
            of_codes.append(mse_loss(total, latents.detach()))
            of_encoder.append(mse_loss(latents, total.detach()))
        counts = torch.bincount(torch.cat(codes), minlength=len(table)).cpu()
        self.use.lerp_(counts.float(), 0.02)
        if step % 20 == 0 and step < 0.6 * PLANS["tokenizer"].steps:
            lost = (self.use < 0.5).nonzero()[:, 0]
            with torch.no_grad():
                some = torch.cat(left[-4:])
                table[lost] = some[torch.randint(len(some), (len(lost),))]
            self.use[lost] = 2.0
        straight = latents + (total - latents).detach()
        return straight, torch.stack(of_codes).mean(), torch.stack(of_encoder).mean()

    def save(self, model: Any, folder: Path) -> None:
        save_multi_scale(model, folder)


class Generator(scenes.Generator):
    """Captions, and images scale by scale."""

    def __init__(self, kind: scenes.Kind, tokenizer: Path, device: str = "cpu") -> None:
        super().__init__(kind, tokenizer, device)
        self.quantizer = self.tokenizer.quantizer

    open_tokenizer = staticmethod(load_multi_scale)

    def build(self, before: Path | None) -> NextScaleTransformer:
        n_words = self.words.vocab_size - self.words.n_image_tokens
        return NextScaleTransformer(NextScaleConfig(**NETWORK, n_conditions=n_words))

    def pack(self, prompts: list[list[int]], tokens: Tensor) -> Batch:
        """Ids of words `[B, T]`, right-aligned, -1 before them, and codes `[B, L]`."""
        rows = [torch.tensor(ids[::-1]) - self.words.n_image_tokens for ids in prompts]
        return pad_sequence(rows, True, -1).flip(1), tokens

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
            sums = self.sums(labels)
        logits = model(ids.clamp(min=0), ids >= 0, sums)
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    def sums(self, codes: Tensor) -> Tensor:
        """The inputs of all scales above 0, `[B, L - 1, C]`, of codes `[B, L]`."""
        quantizer = self.quantizer
        lengths = [side * side for side in quantizer.sides]
        parts = codes.split(lengths, 1)
        total, inputs = torch.zeros(()), []
        for scale in range(len(lengths) - 1):
            total = total + quantizer.spread(parts[scale], scale)
            inputs.append(quantizer.shrink(total, scale + 1))
        return torch.cat(inputs, 1)

    def save(self, model: Any, folder: Path) -> None:
        save_folder(FOLDER, folder, asdict(model.config), model.state_dict())
