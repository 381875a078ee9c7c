"""One canvas of DiffusionGemma, filled by a canvas policy over the model's own decoder.

Source: `transformers.models.diffusion_gemma`, transformers 5.23, whose decoder runs on a canvas of
random tokens many times. Each pass takes the logits of the pass before it (T. Chen et al., "Analog
Bits: Generating Discrete Data using Diffusion Models with Self-Conditioning", ICLR 2023, arXiv
2208.04202). `StableAndConfidentStoppingCriteria` ends a canvas early: the likeliest tokens stay the
same for some passes, and their mean entropy is low.

Departures: what is committed stays, where the library may replace any token of a canvas at any pass
and returns the likeliest tokens of the last one. A row that ends early takes the token drawn for
each open slot, where the library takes the likeliest of every slot; the entropies of these draws
are counted in `nats`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Denoiser
from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.diffusion_lm.known_tokens import KnownTokens
from mmaccel.pipelines.hosts.diffusion_lm.selected_logits import gather_rows
from mmaccel.policies import CanvasProgress
from mmaccel.samplers.canvas.entropy_bounded import EntropyBounded
from mmaccel.samplers.canvas.predictions import read_logits
from mmaccel.samplers.noise import Noise

if TYPE_CHECKING:
    from mmaccel.pipelines.hosts.diffusion_lm.diffusion_gemma.generate import GemmaRun

_STRIDE = 0x9E3779B97F4A7C15  # odd, so that no two canvases of a seed have the same key
_OF_THE_LOOP = ("current_canvas", "argmax_canvas", "finished_denoising", "cur_step", "sampler")


class GemmaCanvas(Denoiser):
    """The decoder as a `Denoiser` of one canvas, whose rows may end by the library's own criterion.

    Columns before it are ignored: the encoder's cache has them. `step`: see the library's step.
    """

    mask_token = None

    def __init__(self, step: Mapping[str, Any], run: GemmaRun) -> None:
        inputs = {name: value for name, value in step.items() if name not in _OF_THE_LOOP}
        criterion = inputs.pop("diffusion_stopping_criteria")
        self._criterion: Callable[[Tensor, Tensor], Tensor] | None = criterion
        if ignores_criterion(run.policy):
            self._criterion = None
        self._forward: Callable[..., Any] = inputs.pop("decoder_forward")
        self._ids: Tensor = inputs.pop("input_ids")
        self._processors = inputs.pop("logits_processor")
        self._carried: Tensor | None = inputs.pop("self_conditioning_logits")
        inputs["decoder_attention_mask"] = inputs.pop("mask_mapping")
        self._inputs, self._run = inputs, run
        self.vocab_size = run.model.config.get_text_config().vocab_size
        self.length = step["current_canvas"].shape[1]
        self.before = self._ids[:, run.n_prompt :]  # [B, N], of earlier canvases
        # rows that ended in one of these
        self.is_known = torch.zeros_like(self._ids[:, 0], dtype=torch.bool)
        if run.ends is not None:
            self.is_known = torch.isin(self.before, run.ends).any(1)
        known = torch.where(self.is_known, run.pad or 0, -1)[:, None].expand(-1, self.length)
        base, index = run.layout, len(run.parts)
        columns, frame = (0, 0) if base is None else (base.columns, base.frame)
        self.layout = KnownTokens(known, base, index * self.length, columns, frame)
        assert run.noise is not None
        self.noise = canvas_noise(run.noise, index)
        # whether `on_step` has anything to do
        self.watches = self._criterion is not None or run.after_pass is not None
        # rows that ended by the criterion; `tokens` are theirs
        self.ended = torch.zeros_like(self.is_known)
        self.tokens = self.scores = torch.empty(0, device="cpu", dtype=torch.float32)
        self.nats = 0.0  # entropies of the tokens that these took at once
        self._passes = self.positions = 0

    @property
    def device(self) -> torch.device:
        return self._ids.device

    def reserve(self, rows: int, cache_size: int) -> None:
        if rows != self._ids.shape[0]:
            raise OptionError(
                f"policy: expected one canvas a row and pass, received {rows} for "
                f"{self._ids.shape[0]} rows; a pass of this model depends on the one before it"
            )

    def forward(self, entries: CanvasPass) -> Tensor:
        """Logits that have been through the logits processors."""
        canvas = entries.tokens[:, -self.length :].contiguous()
        torch.compiler.cudagraph_mark_step_begin()
        out = self._forward(
            decoder_input_ids=canvas, self_conditioning_logits=self._carried, **self._inputs
        )
        n_remaining = max(self._run.steps - self._passes, 1)  # as the library counts its steps
        cur_step = torch.tensor(n_remaining, device=canvas.device, dtype=torch.int32)
        self.scores = self._processors(self._ids, out.logits.clone(), cur_step=cur_step)
        self._carried = self.scores.to(self._run.model.model.decoder.embed_tokens.weight.dtype)
        self._passes += 1
        self.positions += canvas.numel()
        # columns of the pass to slots of the canvas, which is behind the prompt's column
        queries = entries.queries - (entries.tokens.shape[1] - self.length)
        return gather_rows(self.scores, queries)  # [B, Q, V]

    def on_step(self, progress: CanvasProgress) -> Tensor | None:
        """End rows, and call `after_pass`; an `OnCanvasStep`."""
        committed, scores = progress.is_committed, self.scores
        likely = torch.where(committed, progress.tokens, scores.argmax(-1))
        if self._criterion is not None:
            new = self._criterion(likely, scores) & ~self.ended
            is_open = ~committed & new[:, None]
            predictions = read_logits(
                scores,
                1,
                torch.arange(self.length, device=scores.device).expand_as(is_open),
                is_open,
                mask_token=-1,
                params=self._run.params,
                noise=self.noise,
                layout=self.layout,
            )
            assert predictions.drawn is not None
            taken = torch.where(is_open, predictions.drawn, progress.tokens)
            before = self.tokens if self.tokens.numel() else progress.tokens
            self.tokens = torch.where(new[:, None], taken, before)
            self.nats += float(torch.where(is_open, predictions.entropy, 0.0).sum())
            self.ended = self.ended | new
            likely = torch.where(self.ended[:, None], self.tokens, likely)
        if self._run.after_pass is not None:
            self._run.after_pass(progress.passes - 1, likely, scores)
        if self._criterion is None:
            return None
        return torch.where(self.ended, 0, progress.tokens.shape[1])


def ignores_criterion(policy: Any) -> bool:
    """Whether a policy ignores the library's rule, which ends canvases and spends without bound."""
    return policy.exactness != "relaxed" or isinstance(policy, EntropyBounded)


def canvas_noise(noise: Noise, index: int) -> Noise:
    """Noise of the canvas with this index: no slot of one has the noise of a slot of another."""
    shift = index * _STRIDE % 2**64
    if shift >= 2**63:  # int64 has the same bits
        shift -= 2**64
    return Noise(noise.seeds + shift, noise.items)
