"""Cached blocks: a pipeline's own decoder, block by block, over kept keys and values.

M. Arriola et al., "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language
Models", ICLR 2025, arXiv 2503.09573, section 3: in a block-causal model nothing that later blocks
hold changes the keys and values of a block, so they are computed once.

Departures: what is kept is told by the tokens it was computed from, not by a counter, so that a
callback may change any of them; a block whose last tokens came at its last step is computed once
more in the same pass as the next block's first step; where its last step changed nothing, not even
that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.errors import NumericsError, OptionError
from mmaccel.pipelines.diffusion_lm.llada2.block_masks import make_reads
from mmaccel.pipelines.diffusion_lm.llada2.call import BlockCall
from mmaccel.pipelines.diffusion_lm.llada2.key_store import StoredCalls
from mmaccel.results import Exactness, Stats

MASKS = ("pipeline", "blocks")


@dataclass(frozen=True)
class CachedBlocks:
    """The pipeline's own scheduler, steps and random numbers; only the model's calls are cheaper.

    Args:
        mask: "pipeline" is exact with respect to the pipeline as it is, which passes a 2-D mask;
            a model whose earlier blocks see later ones under that mask runs without a cache.
            "blocks" shows the model the 4-D block mask that LLaDA2's own `generate` uses: exact
            with respect to the pipeline's decoder over that mask, whatever the model makes of a
            2-D one.

    Raises:
        OptionError: another mask.
    """

    mask: str = "pipeline"
    exactness: ClassVar[Exactness] = "bitwise"

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise OptionError(
                f"mask: expected one of {', '.join(MASKS)}, received {self.mask!r}; "
                '"pipeline" is exact with respect to the pipeline as it is'
            )

    @property
    def reference(self) -> str:
        """The decoder that `exactness` speaks of."""
        if self.mask == "pipeline":
            return "the pipeline as it is, with its 2-D mask"
        return "the pipeline's decoder over the model's own 4-D block mask"


@dataclass
class BlockLogits:
    """What a model call returns: logits `[R, C, V]` of the last C columns."""

    logits: Tensor


@dataclass(frozen=True)
class _Inputs:
    """What the pipeline gives a model call: ids, the 2-D mask and positions, `[R, N]` int64."""

    ids: Tensor
    visible: Tensor
    positions: Tensor


class CachedCalls:
    """The model calls of one run of a pipeline.

    Args:
        call: the model's own.
        store: for passes over kept keys and values.
        reading: of the model, see `mmaccel.pipelines.diffusion_lm.llada2.block_masks.BlockMasks`.
        check: why nothing can be kept of calls whose mask hides something, or of those whose mask
            does not; empty where everything can.
        run: of the pipeline's call; its blocks, and the columns that may follow the first ones.

    Attributes:
        shown: `[R, N]` int64, what the last model call was given; the pipeline writes into it.
        passes, positions: model calls made, and entries computed by them over all rows.
        seconds: spent in them.
        reason: why nothing was kept, or an empty text.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        store: StoredCalls,
        reading: str | None,
        check: Callable[[bool], str],
        run: BlockCall,
    ) -> None:
        self._call, self._store, self._reading, self._check = call, store, reading, check
        self._block, self._rest, self._mask_token = run.block, run.room, run.mask_token
        self.shown: Tensor | None = None
        self._kept: _Inputs | None = None
        self.passes = self.positions = 0
        self.seconds, self.reason = 0.0, ""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Serve `model(ids, attention_mask=, position_ids=)`; anything else is the model's own.

        Raises:
            NumericsError: logits that are no numbers.
        """
        if len(args) != 1 or set(options) != {"attention_mask", "position_ids"}:
            return self._call(*args, **options)
        line = _Inputs(args[0], options["attention_mask"], options["position_ids"])
        self.shown = line.ids
        self.reason = self.reason or self._check(not bool(line.visible.all()))
        began = time.perf_counter()
        if self.reason or self._reading is None:
            out, fed = self._call(*args, **options), line.ids.numel()
        else:
            out, fed = self._over_store(line, self._reading)
        self.passes, self.positions = self.passes + 1, self.positions + fed
        counts = line.visible.bool() | (line.ids == self._mask_token)  # all but padding
        if bool(out.logits[:, -self._block :][counts[:, -self._block :]].isnan().any()):
            raise NumericsError(
                "logits: expected numbers, received NaN; check the model's dtype and weights"
            )
        self.seconds += time.perf_counter() - began
        return out

    def _over_store(self, line: _Inputs, reading: str) -> tuple[BlockLogits, int]:
        first, last = self._first(line), line.ids.shape[1]
        if first == 0:
            self._store.reserve(line.ids.shape[0], last + self._rest)
        reads = make_reads(line.visible, first, last, self._block, reading)
        columns = torch.arange(first, last, device=line.ids.device).expand(line.ids.shape[0], -1)
        ids, positions = line.ids[:, first:], line.positions[:, first:]
        logits = self._store.run(ids, positions, columns, reads)
        self._kept = _Inputs(line.ids.clone(), line.visible, line.positions)
        return BlockLogits(logits), ids.numel()

    def _first(self, line: _Inputs) -> int:
        """The first column that has to be computed. Cost: one host synchronisation."""
        kept, n = self._kept, line.ids.shape[1]
        if kept is None or kept.ids.shape[0] != line.ids.shape[0]:
            return 0
        both = min(n, kept.ids.shape[1])
        same = kept.ids[:, :both] == line.ids[:, :both]
        same = same & (kept.visible[:, :both] == line.visible[:, :both])
        same = same & (kept.positions[:, :both] == line.positions[:, :both])
        n_same = int(same.all(0).long().cumprod(0).sum())
        return min(n_same, n - self._block) // self._block * self._block

    def report(self, policy: Any, tokens: int, rows: int) -> Stats:
        """Statistics of a run that made so many tokens in so many rows."""
        own = CachedBlocks().reference
        return Stats(
            repr(policy),
            tokens=tokens,
            passes=self.passes,
            row_passes=self.passes * rows,
            positions=self.positions,
            forward_seconds=self.seconds,
            fallbacks=[self.reason] if self.reason else [],
            reference=own if self.reason else getattr(policy, "reference", own),
        )
