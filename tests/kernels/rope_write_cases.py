"""Rotary positions and the write into the cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmaccel.kernels.norm import HeadNorms, NormKind
from mmaccel.kernels.rope_write import rope_write
from tests.kernels.case import Case, Lane, poison

_INDEX = [11, 0, 4]  # a place for each token


def _turn_and_write(
    heads: int, kv_heads: int, width: int, n_turned: int, lane: Lane, **options: Any
) -> None:
    """Three tokens into a cache of 12 places, values in a store where heads are apart."""
    qkv = lane.normal(len(_INDEX), (heads + 2 * kv_heads) * width)
    pair = None, None
    if n_turned:  # whatever the numbers: each has its own sine and cosine
        pair = (lane.normal(len(_INDEX), n_turned, seed=seed) for seed in (2, 3))
    keys = poison((12, kv_heads, width), lane.dtype, lane.device)
    values = poison((12, 2 * kv_heads + 1, width), lane.dtype, lane.device)[:, 1::2]
    given = (qkv, *pair, keys, values, lane.put(torch.tensor(_INDEX)))
    lane.compare(rope_write, *given, tolerance=2 * lane.rounding, **options)


def _normalise(sizes: tuple[int, int, int, int], form: str, kind: NormKind, lane: Lane) -> None:
    """With weights alone, with all there is, and without any; in groups too."""
    heads, kv_heads, width, _ = sizes

    def draw(n_heads: int, seed: int) -> Tensor:
        shape = {"one": (width,), "each": (n_heads, width), "flat": (n_heads * width,)}[form]
        return lane.normal(*shape, seed=seed, mean=0.3)

    weights, biases = ((draw(heads, n), draw(kv_heads, n + 1)) for n in (4, 6))
    choices = [HeadNorms(*weights, kind=kind), HeadNorms(*weights, *biases, kind, 1.0, 0.5)]
    if form == "one":
        choices.append(HeadNorms(None, None, kind=kind))
    for number, norms in enumerate(choices):
        interleaved = number % 2 == (kind == "layer")  # each kind of norm sees both
        _turn_and_write(*sizes, lane, interleaved=interleaved, norms=norms)
    if form != "flat":
        _turn_and_write(*sizes, lane, grouped=True, norms=choices[1])


_SHAPES = ((1, 1, 4, 4), (4, 4, 64, 64), (6, 2, 80, 80), (4, 1, 24, 10), (3, 3, 33, 0))
_NORM_KINDS: tuple[NormKind, ...] = ("rms", "layer")
CASES = [
    Case(
        f"{h} and {k} heads of {d}{', in groups' * g}, {n} turned{', neighbours' * i}",
        partial(_turn_and_write, h, k, d, n, interleaved=i, grouped=g),
    )
    for h, k, d, n in _SHAPES
    for i, g in ((False, False), (True, False), (False, True))
]
CASES += [
    Case(
        "{} and {} heads of {}, {} turned".format(*sizes) + f", after {kind} norms, {form}",
        partial(_normalise, sizes, form, kind),
    )
    for sizes in ((4, 2, 24, 10), (3, 3, 33, 0))
    for form in ("one", "each", "flat")
    for kind in _NORM_KINDS
]
