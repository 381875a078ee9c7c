"""FastVAR: H. Guo et al., "FastVAR: Linear Visual Autoregressive Modeling via Cached Token
Pruning", ICCV 2025 (arXiv:2503.23367), and its released code. At the last scales an attention or
feed-forward part computes only entries that are unlike the mean of all; the others take over what
the part gave at an earlier scale, resized by areas.

The entries of each part are chosen by its own input, keys and values of the others are not cached,
and entries of guidance branches are chosen apart. The code's settings for HART are the defaults;
those for Infinity are ``keep=(0.6, 0.5)`` and ``first_layer=3``.

Departures: for Infinity the released code leaves out the two scales behind the pruned ones, and
prunes nothing in the last four layers of 32; here every scale is drawn, and every layer from
`first_layer` on is pruned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mmaccel.checks import one_of, within
from mmaccel.contracts import Denoiser, Prompt
from mmaccel.errors import OptionError
from mmaccel.model_parts import Around, Branch
from mmaccel.results import Exactness
from mmaccel.samplers.canvas.next_scale import NextScale
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.noise import Stream


@dataclass(frozen=True)
class FastVAR(NextScale):
    """Draws a scale a pass, and computes of the last scales the entries that stand out.

    Reference decoder: `NextScale`, whose tokens ``keep=(1,)`` has.

    Args:
        keep: share of the entries that is computed, for each of the last scales.
        cached: how many scales before these stands the one whose outputs the others take.
        first_layer: layers before it compute everything.
        choose: "distance" takes the entries that are farthest from the mean; "random" draws them by
            the seed, a control.

    Loses: detail of the last scales. Small images have few entries to save.
    Figures: `scenes-var`, guidance 2, batch 8, 128 captions: half of the entries of the last two
    scales draws 39.8 % of captions whole (52.3 % without), 1.10 times as fast; in layers 3 and 4
    alone 50.8 %, as fast. The default: 35.9 % of 64 (60.9 %), 1.13 times; at random 7.8 %.
    """

    keep: tuple[float, ...] = within((0.5, 0.25), 0, 1, "as (0.5, 0.25)", above_low=True, fewest=1)
    cached: int = within(1, 1, hint="1 is the scale just before")
    first_layer: int = within(0, hint="0 prunes all layers")
    choose: str = one_of("distance", ("distance", "random"))

    exactness: ClassVar[Exactness] = "relaxed"

    def open(self, model: Denoiser, prompt: Prompt, length: int, **options: Any) -> CanvasRun:
        run = super().open(model, prompt, length, **options)
        n_scales = len(model.lengths or ())
        if n_scales < len(self.keep) + self.cached:
            raise OptionError(
                f"FastVAR.keep: expected fewer scales than the model's {n_scales}, received "
                f"{len(self.keep)} of them, filled from {self.cached} before; give fewer shares"
            )
        run.model_pass.filler = ScaleFiller(self, run)  # type: ignore[attr-defined]
        return run


class ScaleFiller:
    """What `ScalePass` computes of scales, and what the other entries take: R rows, E entries of a
    scale, m of them computed, width W.

    Attributes:
        n_computed: entries of a row of the last pass, in the mean of all parts; 0 without any, as
            of a table that stands for a model.
    """

    def __init__(self, policy: FastVAR, run: CanvasRun) -> None:
        self._policy, self._noise = policy, run.noise
        self._lengths: tuple[int, ...] = run.model_pass.model.lengths or ()
        self._grids: tuple[tuple[int, int], ...] = run.model_pass.scales.grids  # type: ignore[attr-defined]
        self._shape = run.model_pass.columns.branches, len(run.canvas.tokens)
        self._first = len(self._lengths) - len(policy.keep)
        # of a part `[G, B, E, W]`; a row's own is written before it is read
        self._outputs: dict[tuple[int, str], Tensor] = {}
        self._counts: list[int] = []

    @property
    def n_computed(self) -> int:
        return math.ceil(sum(self._counts) / max(len(self._counts), 1))

    def around(self, scale: int, rows: Tensor | None) -> Around:
        policy, at = self._policy, slice(None) if rows is None else rows
        is_pruned, is_cached = scale >= self._first, scale == self._first - policy.cached
        self._counts = []

        def compute(part: tuple[int, str], x: Tensor, branch: Branch) -> Tensor:
            n, n_kept = x.shape[1], x.shape[1]
            if is_pruned and part[0] >= policy.first_layer:
                n_kept = math.ceil(n * policy.keep[scale - self._first])
            if n_kept == n:
                self._counts.append(n)
                out = branch(x, None)
                if is_cached:
                    self._store(part, out if scale else out[:, -1:], at)
                return out
            self._counts.append(n_kept)
            rank = self._draw(scale, rows, n) if policy.choose == "random" else distance(x)
            index = rank.topk(n_kept, dim=1).indices.sort(1).values  # [R, m]
            grids = self._grids[self._first - policy.cached], self._grids[scale]
            out = resize(self._outputs[part][:, at].flatten(0, 1), *grids)
            return out.scatter(1, index[..., None].expand(-1, -1, x.shape[2]), branch(x, index))

        return compute

    def _store(self, part: tuple[int, str], out: Tensor, at: slice | Tensor) -> None:
        branches, batch = self._shape
        if part not in self._outputs:
            self._outputs[part] = out.new_zeros(branches, batch, *out.shape[1:])
        self._outputs[part][:, at] = out.unflatten(0, (branches, -1))

    def _draw(self, scale: int, rows: Tensor | None, n: int) -> Tensor:
        """Numbers `[R, n]` by seed, item, slot and part; the same in all branches."""
        noise = self._noise if rows is None else self._noise.rows(rows)
        first = sum(self._lengths[:scale])
        slots = torch.arange(first, first + n, device=noise.seeds.device)
        slots = slots.expand(len(noise.seeds), -1)
        drawn = noise.uniforms(slots, 1, Stream.CHOICE, len(self._counts))
        return drawn[..., 0].repeat(self._shape[0], 1)


def distance(x: Tensor) -> Tensor:
    """Squared distances `[R, E]` of entries `[R, E, W]` from their mean."""
    x = x.float()
    return (x - x.mean(1, keepdim=True)).square().sum(-1)


def resize(outputs: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Outputs `[R, E, W]` of a scale of rows and columns `grid` for one of `size`, by areas."""
    return interpolate(outputs.mT.unflatten(2, grid), size=size, mode="area").flatten(2).mT
