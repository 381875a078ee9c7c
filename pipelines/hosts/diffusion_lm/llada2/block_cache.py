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
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from mmaccel.checks import Checked, one_of
from mmaccel.contracts import CanvasPass
from mmaccel.errors import NumericsError
from mmaccel.pipelines.hosts.diffusion_lm.cached import CachedDenoiser
from mmaccel.pipelines.hosts.diffusion_lm.llada2.block_masks import make_reads
from mmaccel.pipelines.hosts.generate_call import count_to_end
from mmaccel.results import Exactness, Stats

MASKS = ("pipeline", "blocks")


@dataclass(frozen=True)
class CachedBlocks(Checked):
    """For diffusers' `LLaDA2Pipeline`: keeps the keys and values of finished blocks.

    Scheduler, steps and random numbers are the pipeline's own; only the model's calls are cheaper.

    Args:
        mask: "pipeline" is exact with respect to the pipeline as it is, with a 2-D mask; a model
            whose earlier blocks see later ones under it runs without a cache. "blocks" gives the
            model the 4-D block mask of LLaDA2's own `generate`, and is exact with respect to the
            pipeline's decoder over that mask; another is an OptionError.
    """

    needs = frozenset({"own scheduler"})
    excludes = {  # noqa: RUF012
        "own attention": "computes a block anew where its tokens change, from all before it",
        "seeds": "leaves the pipeline its own random numbers",
        "token layouts": "leaves the pipeline its own tokens",
    }
    mask: str = one_of("pipeline", MASKS)
    exactness: ClassVar[Exactness] = "bitwise"

    @property
    def reference(self) -> str:
        if self.mask == "pipeline":
            return "the pipeline as it is, with its 2-D mask"
        return "the pipeline's decoder over the model's own 4-D block mask"


class BlockCache:
    """Logits of a model's calls, computed from the first block on that changed since the last call.

    `length` is by how many columns calls may grow.
    """

    def __init__(self, model: CachedDenoiser, reading: str, block: int, length: int) -> None:
        self._model, self._reading = model, reading
        self._block, self._length = block, length
        self._cached: list[Tensor] = []  # ids, visible columns and positions, `[R, N]`

    def run(self, ids: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        """Logits `[R, C, V]` of the last C columns, of a 2-D mask and inputs `[R, N]` int64."""
        rows, n = ids.shape
        inputs = [ids, visible, positions]
        first = 0
        if self._cached and len(self._cached[0]) == rows:
            both = min(n, self._cached[0].shape[1])
            same = [a[:, :both] == b[:, :both] for a, b in zip(self._cached, inputs, strict=True)]
            # columns before the first that differs in any row; the last block is always computed
            n_same = int(torch.stack(same).all(0).all(0).long().cumprod(0).sum())
            first = min(n_same, n - self._block) // self._block * self._block
        if first == 0:
            self._model.open_cache(rows, n + self._length + 2 * self._block)
        columns = torch.arange(first, n, device=ids.device).expand(rows, -1)
        entries = CanvasPass(
            tokens=ids[:, first:],
            positions=positions[:, first:],
            cache_indices=columns,
            reads=make_reads(visible, first, self._block, self._reading),
            queries=columns - first,
        )
        self._cached = [ids.clone(), visible, positions]  # the pipeline writes into its ids
        return self._model.run(entries)


@dataclass
class BlockCall:
    """A call of the pipeline, and the model's calls that are served while its own decoder runs."""

    asked: Mapping[str, Any]  # what the caller gave, by name
    arguments: Mapping[str, Any]  # all of them, with defaults
    block: int  # columns: `block_length`, or the scheduler's
    length: int  # `gen_length`
    mask_token: int  # by default the tokenizer's
    end_token: int  # the same; -1 for none
    n_prompt: int = 0  # columns, once the pipeline has prepared them
    is_served: bool = False  # whether the model's calls go to `run`
    own: Any = None  # the model's own call
    cache: BlockCache | None = None  # None runs the model's own
    check: Any = None  # (whether a call's mask hides something) -> why it cannot be cached
    formats: Any = None
    tokens: Tensor | None = None  # [R, N] int64 of the last call; the pipeline writes into it
    stats: Stats = field(default_factory=Stats)  # of the model's calls

    @classmethod
    def of(
        cls, pipe: Any, asked: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> BlockCall | None:
        """The call; None where the pipeline itself says what is wrong with it."""
        length, block = arguments.get("gen_length"), arguments.get("block_length")
        block = pipe.scheduler.config.block_length if block is None else block
        tokens = []
        for name in ("mask_token_id", "eos_token_id"):
            value = arguments.get(name)
            value = getattr(pipe, name) if value is None else value
            tokens.append(-1 if value is None else int(value))
        mask_token, end_token = tokens
        are_counts = all(isinstance(count, int) and count > 0 for count in (block, length))
        if mask_token < 0 or not are_counts:
            return None
        return cls(asked, arguments, block, cast(int, length), mask_token, end_token)

    def run(self, *args: Any, **options: Any) -> Any:
        """Serve `model(ids, attention_mask=, position_ids=)`; other calls run the model's own."""
        if len(args) != 1 or set(options) != {"attention_mask", "position_ids"}:
            return self.own(*args, **options)
        self.tokens = ids = args[0]
        visible = options["attention_mask"]
        stats, block = self.stats, self.block
        if not stats.fallbacks:
            reason = self.check(not bool(visible.all()))
            stats.fallbacks = [reason] if reason else []
        began = time.perf_counter()
        if stats.fallbacks or self.cache is None:
            out = self.own(ids, **options)
            stats.positions += ids.numel()
        else:
            with self.formats.passing():
                logits = self.cache.run(ids, visible, options["position_ids"])
            self.formats.note(logits)
            stats.positions += logits.shape[0] * logits.shape[1]
            out = SimpleNamespace(logits=logits)
        stats.passes += 1
        stats.row_passes += len(ids)
        is_real = visible.bool() | (ids == self.mask_token)
        if bool(out.logits[:, -block:][is_real[:, -block:]].isnan().any()):
            raise NumericsError(
                "logits: expected numbers, received NaN; check the model's dtype and weights"
            )
        stats.forward_seconds += time.perf_counter() - began
        return out

    def canvas(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The slots `[B, L]` of prompts and canvases `[B, N]` int64, and which are committed."""
        slots = tokens.new_full((tokens.shape[0], self.length), self.mask_token)
        generated = tokens[:, self.n_prompt : self.n_prompt + self.length]
        slots[:, : generated.shape[1]] = generated
        return slots, slots.ne(self.mask_token)

    def report(self, policy: Any, sequences: Tensor) -> Stats:
        """Statistics of a run that made `[B, L]` sequences, each up to its first end token."""
        index = torch.arange(sequences.shape[1], device=sequences.device)
        is_row = index < count_to_end(sequences, self.end_token)[:, None]
        stats = self.stats
        stats.policy, stats.exactness = repr(policy), "bitwise"
        stats.tokens = int((is_row & (sequences != self.mask_token)).sum())
        stats.reference = CachedBlocks().reference
        if not stats.fallbacks:
            stats.reference = getattr(policy, "reference", stats.reference)
        stats.use_dtype(self.formats.name)
        return stats
