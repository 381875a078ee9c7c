"""The methods under test: how each is made, what rows it is given and what its plans promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mmaccel
from mmaccel.reduction.visual_tokens.context import VisualContext
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from tests.reduction.samples import DEPTH, Sample, batch, image, tiled, video


@dataclass(frozen=True)
class Case:
    """A method.

    Args:
        make: the method with `keep` or `n_keep`.
        kind: of rows: image, tiles or frames.
        merges: nothing is dropped, sizes add up to the number of tokens.
        averages: a slot's state is the mean of its tokens.
        at_most: plans may have fewer tokens than the budget.
        seeded: another seed, another plan.
    """

    make: Callable[..., TokenReducer]
    kind: str = "image"
    merges: bool = False
    averages: bool = True
    at_most: bool = False
    seeded: bool = False

    def rows(self) -> list[Sample]:
        """Rows of unequal lengths."""
        if self.kind == "tiles":
            return [tiled(4, 5, (2, 2), 1), tiled(5, 4, (1, 2), 2), tiled(6, 6, (0, 0), 3)]
        if self.kind == "frames":
            return [video(5, 4, 3, 1), video(3, 5, 5, 2), video(2, 3, 3, 3)]
        return [image(7, 9, 1), image(8, 4, 2), image(9, 10, 3)]

    def context(self, rows: list[Sample] | None = None, **options: Any) -> VisualContext:
        """The context of some rows at the method's last layer."""
        layers = self.make(keep=0.5).layers_in(DEPTH)
        return batch(rows or self.rows(), layer=layers[-1] if layers else None, **options)


def _with(method: str, **fixed: Any) -> Callable[..., TokenReducer]:
    return lambda **options: getattr(mmaccel, method)(**fixed, **options)


CASES = {
    "Downsample": Case(_with("Downsample"), merges=True),
    "Downsample of tiles": Case(_with("Downsample"), "tiles", merges=True),
    "PixelPrune": Case(_with("PixelPrune"), merges=True, averages=False),
    "PixelPrune of frames": Case(_with("PixelPrune"), "frames", merges=True, averages=False),
    "PixelPrune to a difference": Case(
        _with("PixelPrune", threshold=2.5), merges=True, averages=False, at_most=True
    ),
    "RandomTokens": Case(_with("RandomTokens"), seeded=True),
    "UniformTokens": Case(_with("UniformTokens")),
    "DivPrune": Case(_with("DivPrune")),
    "CDPruner": Case(_with("CDPruner")),
    "CDPruner without text": Case(_with("CDPruner", weight=0.0)),
    "VisionZip": Case(_with("VisionZip"), merges=True),
    "VisionZip without class token": Case(_with("VisionZip", queries="all"), merges=True),
    "HiRED": Case(_with("HiRED"), "tiles"),
    "HiRED of random scores": Case(
        lambda **options: mmaccel.HiRED(scorer=mmaccel.RandomTokens(keep=0.5), **options),
        "tiles",
        seeded=True,
    ),
    "FiCoCoV": Case(_with("FiCoCoV"), merges=True, averages=False),
    "FiCoCoL": Case(_with("FiCoCoL"), merges=True, averages=False),
    "DART": Case(_with("DART")),
    "DART without text": Case(_with("DART", text_pivots=0)),
    "FastV": Case(_with("FastV")),
    "FastV to top-p": Case(_with("FastV", top_p=0.4), at_most=True),
    "PyramidDrop": Case(_with("PyramidDrop")),
    "LazyLLM": Case(_with("LazyLLM")),
    "ILRe": Case(_with("ILRe")),
    "VidCom2": Case(_with("VidCom2"), "frames"),
    "EVS": Case(_with("EVS"), "frames"),
    "EVS to a change": Case(_with("EVS", least_change=0.9), "frames", at_most=True),
    "ToMe": Case(_with("ToMe"), merges=True, seeded=True),
    "ToMe to a cosine": Case(_with("ToMe", threshold=0.3), merges=True, seeded=True),
}
ALL = list(CASES)
