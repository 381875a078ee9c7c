"""Cached blocks: a pipeline's own decoder, block by block, over a KV cache.

M. Arriola et al., "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language
Models", ICLR 2025, arXiv 2503.09573, section 3: in a block-causal model the keys and values of a
block do not depend on later blocks, so that they are computed once.

Departures: a cached block is valid while its tokens are those it was computed from, so that a
callback may change any of them; no counter says so. A block that changed at its last step is
computed once more, in the same pass as the next block's first step. A block that did not change at
its last step is not computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.checks import check_choice
from mmaccel.errors import NumericsError
from mmaccel.pipelines.diffusion_lm.cached_passes import CachedPasses
from mmaccel.pipelines.diffusion_lm.llada2.block_masks import make_reads
from mmaccel.pipelines.diffusion_lm.llada2.call import BlockCall
from mmaccel.results import Exactness, Stats
from mmaccel.samplers.arithmetic import PassFormats

MASKS = ("pipeline", "blocks")


@dataclass(frozen=True)
class CachedBlocks:
    """For diffusers' `LLaDA2Pipeline`: keeps the keys and values of finished blocks.

    Scheduler, steps and random numbers are the pipeline's own; only the model's calls are cheaper.

    Args:
        mask: "pipeline" is exact with respect to the pipeline as it is, which passes a 2-D mask;
            a model whose earlier blocks see later ones under that mask runs without a cache.
            "blocks" gives the model the 4-D block mask that LLaDA2's own `generate` uses: exact
            with respect to the pipeline's decoder over that mask, however the model reads a 2-D
            one.

    Raises:
        OptionError: another mask.
    """

    excludes = {  # noqa: RUF012
        "own attention": "computes a block anew where its tokens change, from all before it"
    }
    mask: str = "pipeline"
    exactness: ClassVar[Exactness] = "bitwise"

    def __post_init__(self) -> None:
        check_choice("mask", self.mask, MASKS)

    @property
    def reference(self) -> str:
        """The decoder that `exactness` refers to."""
        if self.mask == "pipeline":
            return "the pipeline as it is, with its 2-D mask"
        return "the pipeline's decoder over the model's own 4-D block mask"


@dataclass
class BlockLogits:
    """Output of a served model call: logits `[R, C, V]` of the last C columns."""

    logits: Tensor


@dataclass(frozen=True)
class _Inputs:
    """Arguments of the pipeline's model call: ids, the 2-D mask and positions, `[R, N]` int64."""

    ids: Tensor
    visible: Tensor
    positions: Tensor


class CachedCalls:
    """The model calls of one run of a pipeinputs.

    Args:
        call: the model's own.
        model: for passes over the KV cache.
        reading: of the model, see `mmaccel.pipelines.diffusion_lm.llada2.block_masks.BlockMasks`;
            None runs the model's own calls.
        check: from whether a call's mask hides something to why it cannot be cached, or "".
        run: the pipeline's call.

    Attributes:
        tokens: `[R, N]` int64, input of the last model call; the pipeline writes into it.
        passes, positions: model calls, and entries computed by them over all rows.
        seconds: spent in them.
        reason: why nothing was cached, or "".
    """

    def __init__(
        self,
        call: Callable[..., Any],
        model: CachedPasses,
        reading: str | None,
        check: Callable[[bool], str],
        run: BlockCall,
    ) -> None:
        self._call, self._model, self._reading, self._check = call, model, reading, check
        self._block = run.block
        self._mask_token = run.mask_token
        self._max_new_columns = run.max_new_columns
        self.tokens: Tensor | None = None
        self._cached: _Inputs | None = None
        self.passes = self.positions = 0
        self.seconds = 0.0
        self.reason = ""
        self._formats = PassFormats(model)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Serve `model(ids, attention_mask=, position_ids=)`; other calls run the model's own.

        Raises:
            NumericsError: NaN logits.
        """
        if len(args) != 1 or set(options) != {"attention_mask", "position_ids"}:
            return self._call(*args, **options)
        inputs = _Inputs(args[0], options["attention_mask"], options["position_ids"])
        self.tokens = inputs.ids
        self.reason = self.reason or self._check(not bool(inputs.visible.all()))
        began = time.perf_counter()
        if self.reason or self._reading is None:
            out = self._call(*args, **options)
            computed = inputs.ids.numel()
        else:
            out, computed = self._run_cached(inputs, self._reading)
            self._formats.note(out.logits)
        self.passes, self.positions = self.passes + 1, self.positions + computed
        is_real = inputs.visible.bool() | (inputs.ids == self._mask_token)  # all but padding
        if bool(out.logits[:, -self._block :][is_real[:, -self._block :]].isnan().any()):
            raise NumericsError(
                "logits: expected numbers, received NaN; check the model's dtype and weights"
            )
        self.seconds += time.perf_counter() - began
        return out

    def _run_cached(self, inputs: _Inputs, reading: str) -> tuple[BlockLogits, int]:
        first = self._find_first(inputs)
        last = inputs.ids.shape[1]
        if first == 0:
            self._model.reserve(inputs.ids.shape[0], last + self._max_new_columns)
        reads = make_reads(inputs.visible, first, last, self._block, reading)
        columns = torch.arange(first, last, device=inputs.ids.device)
        ids = inputs.ids[:, first:]
        positions = inputs.positions[:, first:]
        with self._formats.passing():
            logits = self._model.run_all(ids, positions, columns.expand(ids.shape[0], -1), reads)
        self._cached = _Inputs(inputs.ids.clone(), inputs.visible, inputs.positions)
        return BlockLogits(logits), ids.numel()

    def _find_first(self, inputs: _Inputs) -> int:
        """The first column that has to be computed. Cost: one host synchronisation."""
        cached = self._cached
        n = inputs.ids.shape[1]
        if cached is None or cached.ids.shape[0] != inputs.ids.shape[0]:
            return 0
        both = min(n, cached.ids.shape[1])
        same = cached.ids[:, :both] == inputs.ids[:, :both]
        same = same & (cached.visible[:, :both] == inputs.visible[:, :both])
        same = same & (cached.positions[:, :both] == inputs.positions[:, :both])
        n_same = int(same.all(0).long().cumprod(0).sum())
        return min(n_same, n - self._block) // self._block * self._block

    def report(self, policy: Any, tokens: int, rows: int) -> Stats:
        """Statistics of a run that generated this many tokens in this many rows."""
        own = CachedBlocks().reference
        stats = Stats(
            repr(policy),
            tokens=tokens,
            passes=self.passes,
            row_passes=self.passes * rows,
            positions=self.positions,
            forward_seconds=self.seconds,
            fallbacks=[self.reason] if self.reason else [],
            reference=own if self.reason else getattr(policy, "reference", own),
        )
        stats.use_dtype(self._formats.name)
        return stats
