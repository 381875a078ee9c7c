"""Tiny decoders as denoisers, and runs whose every pass is written down."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass
from mmaccel.contracts import Prompt
from mmaccel.pipelines.masked_lm import MaskedLM
from mmaccel.results import Generation
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise
from tests.tiny_lms import VOCAB, build_lm

MASK = VOCAB - 1
PROMPTS = [[5, 9, 7], [8], [11, 6, 4, 21, 30]]
OTHERS = [[14, 2], [19, 22, 1, 3], [13]]  # of the second branch


class Recorded(MaskedLM):
    """Keeps the logits of every pass, and counts positions and positions before the head."""

    def __init__(self, model: Any, mask_token: int | None = MASK, **options: Any) -> None:
        self._begin()
        super().__init__(model, mask_token, **options)
        self._begin()  # after its self-check
        model.get_input_embeddings().register_forward_pre_hook(self._count_fed)
        model.get_output_embeddings().register_forward_hook(self._count_head)

    def forward(self, entries: CanvasPass) -> Tensor:
        self.passes += 1
        logits = super().forward(entries)
        at = entries.positions.gather(1, entries.queries)
        group, steps = at // (self.block or 10**6), torch.arange(at.shape[1])
        is_own = (group == group[:, :1]) & (at - at[:, :1] == steps)  # others mean nothing
        self.logits.append(logits * is_own[..., None])
        return logits

    def _begin(self) -> None:
        self.logits: list[Tensor] = []
        self.passes = self.fed = self.head_rows = 0

    def _count_fed(self, _: Any, states: Any) -> None:
        self.fed += states[0].numel()

    def _count_head(self, _: Any, states: Any, logits: Tensor) -> None:
        self.head_rows += logits.shape[0] * logits.shape[1]


def masked(name: str = "llama", **options: Any) -> Recorded:
    """A denoiser in float64, the same at every call."""
    return Recorded(build_lm(name, initializer_range=0.35).double(), **options)


def prompt_of(rows: list[list[int]], branches: int = 1) -> Prompt:
    """Ragged rows, branch-major."""
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return Prompt(tokens, torch.tensor([len(row) for row in rows]), branches=branches)


def run(
    policy: Any,
    model: Any,
    length: int,
    temperature: float = 1.0,
    guided: bool = False,
    row: int | None = None,
    prompts: list[list[int]] = PROMPTS,
    others: list[list[int]] = OTHERS,
) -> Generation:
    """A run over the prompts, or over one of them alone with its own noise."""
    noise = Noise.from_seed(7, len(prompts))
    chosen = range(len(prompts)) if row is None else [row]
    rows = [prompts[k] for k in chosen]
    if guided:
        rows += [others[k] for k in chosen]
    if row is not None:
        noise = Noise(noise.seeds[row : row + 1], noise.items[row : row + 1])
    filters = Filters(temperature=temperature, guidance_scale=1.7 if guided else 1.0)
    prompt = prompt_of(rows, 2 if guided else 1)
    made: Generation = policy.sample(model, prompt, length, filters=filters, noise=noise)
    return made
