"""The canvases of one call of DiffusionGemma's `generate`, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasInterrupt
from mmaccel.contracts import Layout, Prompt
from mmaccel.pipelines.diffusion_gemma_canvas import CanvasLayout, GemmaDecoder, canvas_noise
from mmaccel.pipelines.diffusion_gemma_stop import StopRule, Then
from mmaccel.results import Generation, Stats
from mmaccel.samplers.entropy_bounded import EntropyBounded
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise

REFERENCE = (
    "one commit a pass over the model's decoder with its schedule and the logits it carries; "
    "not the library's sampler"
)


class GemmaRun:
    """One call.

    Args:
        model: a `DiffusionGemmaForBlockDiffusion`.
        policy: a canvas policy.
        seed: one, one per row, or None for one out of torch's global generator.
        layout: of all slots behind the prompt.
        filters: behind the logits processors.
        change: puts other values into a call's generation configuration.
        then: see `StopRule`.

    Attributes:
        stats: of all canvases so far.
        passes: `[B]` int64.
        reason: why the library's own sampler runs, or an empty text.
    """

    def __init__(
        self,
        model: Any,
        policy: Any,
        seed: int | Sequence[int] | None,
        layout: Layout | None,
        filters: Filters | None = None,
        change: Callable[[Any], None] | None = None,
        then: Then | None = None,
    ) -> None:
        self._model, self._policy, self._seed, self._layout = model, policy, seed, layout
        self._filters, self._change = filters or Filters(), change
        self._then, self.reason = then, ""
        self._noise: Noise | None = None
        self._index, self._n_prompt, self._steps = 0, 0, 1
        self._ends: Tensor | None = None
        self._pad: int | None = None
        self.passes: Any = 0
        self.stats = Stats(policy=repr(policy), exactness=policy.exactness, reference=REFERENCE)

    def begin(self, batch: int, device: torch.device) -> None:
        """Make the noise.

        Raises:
            OptionError: seeds for another batch.
        """
        seed = int(torch.randint(2**63 - 1, ())) if self._seed is None else self._seed
        self._noise = Noise.from_seed(seed, batch, device)

    def configure(self, config: Any, device: torch.device) -> None:
        """Take what a call's generation configuration says.

        A row ends at its end token where there is padding to put behind it, as in the library.
        """
        if self._change is not None:
            self._change(config)
        self._steps, self._pad = config.max_denoising_steps, config.pad_token_id
        ends = config.eos_token_id
        if ends is not None and self._pad is not None:
            self._ends = torch.as_tensor(ends, device=device).view(-1)

    def fill(self, step: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Fill the next canvas.

        Args:
            step: what `generate` hands to its denoising step.

        Returns:
            Tokens `[B, L]` int64, and the scores `[B, L, V]` of the last pass.

        Raises:
            CanvasInterrupt: with all canvases so far.
        """
        assert self._noise is not None
        ids: Tensor = step["input_ids"]
        batch, length = step["current_canvas"].shape
        if self._index == 0:
            self._n_prompt = ids.shape[1]
        made_before = ids[:, self._n_prompt :]
        ended = self._holds_end(made_before)
        pad = 0 if self._pad is None else self._pad
        layout = CanvasLayout(self._layout, self._index * length, ended, pad)
        noise = canvas_noise(self._noise, self._index)
        config = self._model.config
        vocab_size = config.get_text_config().vocab_size
        dtype = self._model.model.decoder.embed_tokens.weight.dtype
        decoder = GemmaDecoder(step, vocab_size, length, self._steps, dtype)
        promises = self._policy.exactness != "relaxed" or isinstance(self._policy, EntropyBounded)
        criterion = None if promises else step["diffusion_stopping_criteria"]
        rule = StopRule(criterion, decoder, self._filters, noise, layout, self._then)
        prompt = Prompt(  # one column: the encoder's cache stands for the prompt
            ids.new_zeros(batch, 1), torch.ones_like(ids[:, 0]), stop_tokens=self._ends,
            layout=layout,
        )  # fmt: skip
        watch = None if criterion is None and self._then is None else rule
        try:
            made = self._policy.sample(
                decoder, prompt, length, filters=self._filters, noise=noise, on_step=watch
            )
        except CanvasInterrupt as stop:
            raise self._interrupted(stop, made_before) from stop
        slots = torch.arange(length, device=ids.device)
        tokens = torch.where(slots < made.lengths[:, None], made.tokens, pad)
        if criterion is not None:
            tokens = torch.where(rule.ended[:, None], rule.tokens, tokens)
        self._count(made, decoder, rule, tokens, ended)
        self._index += 1
        return tokens, decoder.scores

    def _holds_end(self, tokens: Tensor) -> Tensor:
        if self._ends is None:
            return torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        return torch.isin(tokens, self._ends).any(1)

    def _count(
        self, made: Generation, decoder: GemmaDecoder, rule: StopRule, tokens: Tensor, ended: Tensor
    ) -> None:
        stats, new = self.stats, made.stats
        n_slots = torch.full_like(made.lengths, tokens.shape[1])
        if self._ends is not None:
            is_end = torch.isin(tokens, self._ends)
            index = torch.arange(tokens.shape[1], device=tokens.device)
            n_slots = torch.where(is_end, index + 1, tokens.shape[1]).amin(1)
        stats.tokens += int(torch.where(ended, 0, n_slots).sum())
        stats.passes += new.passes
        stats.prefill_passes += 1
        stats.row_passes += new.row_passes
        stats.nats += new.nats + rule.nats
        stats.positions += decoder.positions
        stats.forward_seconds += new.forward_seconds
        so_far = new.notes if self._index == 0 else stats.notes
        stats.notes = [note for note in so_far if note in new.notes]  # what holds of all canvases
        longest = max(len(stats.accepted), len(new.accepted))
        pairs = (
            counts + [0] * (longest - len(counts)) for counts in (stats.accepted, new.accepted)
        )
        stats.accepted = [sum(pair) for pair in zip(*pairs)]
        self.passes = self.passes + made.passes

    def _interrupted(self, stop: CanvasInterrupt, before: Tensor) -> CanvasInterrupt:
        own = stop.generation
        tokens = torch.cat([before, own.tokens], 1)
        committed = torch.cat([torch.ones_like(before, dtype=torch.bool), stop.is_committed], 1)
        self.stats.passes += own.stats.passes
        passes = self.passes + own.passes
        made = Generation(tokens, before.shape[1] + own.lengths, passes, self.stats)
        return CanvasInterrupt(made, committed)
