"""One canvas of DiffusionGemma, filled by a canvas policy over the model's own decoder.

Source: `transformers.models.diffusion_gemma`, transformers 5.23. Its `generate` encodes the tokens
so far, makes a canvas of random tokens and runs its decoder on the canvas many times. Each pass
takes the logits of the pass before it (T. Chen et al., "Analog Bits: Generating Discrete Data using
Diffusion Models with Self-Conditioning", ICLR 2023, arXiv 2208.04202). The library ends a canvas
early by `StableAndConfidentStoppingCriteria`: the likeliest tokens are the same for some passes,
and their mean entropy is low.

Departures: what is committed stays, where the library may replace any token of a canvas at any pass
and returns the likeliest tokens of the last one. A row that ends early takes the token drawn for
each open slot, where the library takes the likeliest of every slot; the entropies of these draws
are counted in `nats`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Denoiser, Layout
from mmaccel.errors import OptionError
from mmaccel.pipelines.diffusion_lm.selected_logits import gather_rows
from mmaccel.policies import CanvasProgress
from mmaccel.samplers.canvas.predictions import read_logits
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

_STRIDE = 0x9E3779B97F4A7C15  # odd, so that no two canvases of a seed have the same key


class GemmaDecoder(Denoiser):
    """The decoder, as a `Denoiser` of one canvas.

    Columns before the canvas are ignored: the encoder's cache holds the prompt.

    Args:
        step: the arguments of the library's denoising step.
        vocab_size: V.
        length: L, slots of the canvas.
        steps: N, passes that the temperature schedule is spread over.
        dtype: of the logits that are carried to the next pass.

    Attributes:
        scores: `[B, L, V]` of the last pass, after the logits processors.
        positions: entries computed so far.
    """

    mask_token = None

    def __init__(
        self, step: Mapping[str, Any], vocab_size: int, length: int, steps: int, dtype: torch.dtype
    ) -> None:
        inputs = dict(step)
        for name in (
            "current_canvas",
            "argmax_canvas",
            "finished_denoising",
            "cur_step",
            "sampler",
            "diffusion_stopping_criteria",
        ):
            inputs.pop(name)
        self._forward: Callable[..., Any] = inputs.pop("decoder_forward")
        self._ids: Tensor = inputs.pop("input_ids")
        self._processors = inputs.pop("logits_processor")
        self._carried: Tensor | None = inputs.pop("self_conditioning_logits")
        inputs["decoder_attention_mask"] = inputs.pop("mask_mapping")
        self._inputs, self._steps, self._dtype = inputs, steps, dtype
        self.vocab_size = vocab_size
        self._length = length
        self._passes = 0
        self.scores = torch.empty(0, device="cpu", dtype=torch.float32)
        self.positions = 0

    @property
    def device(self) -> torch.device:
        """Where the prompt is."""
        return self._ids.device

    def reserve(self, rows: int, cache_size: int) -> None:
        """See `Denoiser.reserve`.

        Raises:
            OptionError: several canvases of a row at once.
        """
        if rows != self._ids.shape[0]:
            raise OptionError(
                f"policy: expected one canvas a row and pass, received {rows} for "
                f"{self._ids.shape[0]} rows; a pass of this model depends on the one before it"
            )

    def forward(self, entries: CanvasPass) -> Tensor:
        """One pass; see `Denoiser.forward`. Its logits have been through the logits processors."""
        canvas = entries.tokens[:, -self._length :].contiguous()
        torch.compiler.cudagraph_mark_step_begin()
        out = self._forward(
            decoder_input_ids=canvas, self_conditioning_logits=self._carried, **self._inputs
        )
        left = max(self._steps - self._passes, 1)  # the library counts steps that remain
        cur_step = torch.tensor(left, device=canvas.device, dtype=torch.int32)
        self.scores = self._processors(self._ids, out.logits.clone(), cur_step=cur_step)
        self._carried = self.scores.to(self._dtype)
        self._passes += 1
        self.positions += canvas.numel()
        queries = entries.queries - (entries.tokens.shape[1] - self._length)
        return gather_rows(self.scores, queries)  # [B, Q, V]


def canvas_noise(noise: Noise, index: int) -> Noise:
    """Noise of the canvas with this index: no slot of one has the noise of a slot of another."""
    shift = index * _STRIDE % 2**64
    return Noise(noise.seeds + (shift - 2**64 if shift >= 2**63 else shift), noise.items)


AfterPass = Callable[[int, Tensor, Tensor], None]
"""Called after every pass of a canvas with the pass number from 0, tokens `[B, L]` (the likeliest
where nothing is committed), and scores `[B, L, V]`."""


class StopRule:
    """Ends rows by the library's own criterion; an `OnCanvasStep`.

    Args:
        criterion: whether a row ends, from the likeliest tokens `[B, L]` and scores `[B, L, V]`;
            None ends no row.
        decoder: of the run, for the scores of its last pass.
        params, noise, layout: of the run.
        after_pass: called after every pass, or None.

    Attributes:
        ended: `[B]` bool.
        tokens: `[B, L]` int64, of the rows that ended.
        nats: sum of the entropies of the tokens that these rows took at once.
    """

    def __init__(
        self,
        criterion: Callable[[Tensor, Tensor], Tensor] | None,
        decoder: GemmaDecoder,
        params: SamplingParams,
        noise: Noise,
        layout: Layout,
        after_pass: AfterPass | None,
    ) -> None:
        self._criterion, self._decoder, self._after_pass = criterion, decoder, after_pass
        self._params, self._noise, self._layout = params, noise, layout
        self.ended = torch.zeros_like(noise.seeds, dtype=torch.bool)
        self.tokens = torch.empty(0, device="cpu", dtype=torch.float32)
        self.nats = 0.0

    def __call__(self, progress: CanvasProgress) -> Tensor | None:
        scores = self._decoder.scores
        committed = progress.is_committed
        likely = torch.where(committed, progress.tokens, scores.argmax(-1))
        if self._criterion is not None:
            self._end(progress, likely, scores)
            likely = torch.where(self.ended[:, None], self.tokens, likely)
        if self._after_pass is not None:
            self._after_pass(progress.passes - 1, likely, scores)
        if self._criterion is None:
            return None
        return torch.where(self.ended, 0, progress.tokens.shape[1])

    def _end(self, progress: CanvasProgress, likely: Tensor, scores: Tensor) -> None:
        assert self._criterion is not None
        if not self.tokens.numel():
            self.tokens = progress.tokens
        new = self._criterion(likely, scores) & ~self.ended
        is_open = ~progress.is_committed & new[:, None]
        slots = torch.arange(scores.shape[1], device=scores.device).expand_as(is_open)
        predictions = read_logits(
            scores,
            1,
            slots,
            is_open,
            mask_token=-1,
            params=self._params,
            noise=self._noise,
            layout=self._layout,
        )
        assert predictions.drawn is not None
        taken = torch.where(is_open, predictions.drawn, progress.tokens)
        self.tokens = torch.where(new[:, None], taken, self.tokens)
        self.nats += float(torch.where(is_open, predictions.entropy, 0.0).sum())
        self.ended = self.ended | new
