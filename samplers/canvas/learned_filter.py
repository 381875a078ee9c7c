"""Learned filters: a small trained function says which slots hold their final tokens.

W. Bao, Z. Chen, D. Xu, Y. Shang, "Learning to Parallel: Accelerating Diffusion Large Language
Models via Learnable Parallel Decoding" (Learn2PD), 2025, arXiv 2509.25188, section 3: a perceptron
with one hidden layer reads the confidences of a block and gives each of its slots a probability
that its likeliest token is the final one; slots above a threshold are committed, and at least one.

Departures: the paper trains a perceptron for one model and length of block, and none is shipped:
without a filter the confidences themselves are the probabilities. Slots that are committed, or
outside a block, are read as confidence 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mmaccel.checks import check_path, show, within
from mmaccel.errors import OptionError
from mmaccel.samplers.canvas.policy import SelectorPolicy
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import Selector, SelectorState
from mmaccel.weight_folders import open_weights

# The file holds the state of a `torch.nn.Sequential(Linear(Q, H), ReLU(), Linear(H, Q))` for blocks
# of Q slots, whose outputs are logits.
_NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")

Filter = Callable[[SlotPredictions], Tensor]
"""Sealed predictions of B rows and Q slots -> `[B, Q]`, probabilities that slots are final."""


@dataclass(frozen=True)
class LearnedFilter(SelectorPolicy):
    """Commits the slots that a trained filter calls final.

    Reference decoder: `Stepwise("confidence")`, which it is with threshold 1 and no filter.

    Args:
        filter: a safetensors file of the `state_dict` of a `Sequential(Linear(Q, H), ReLU(),
            Linear(H, Q))`, for blocks of Q slots, or a function of a pass's predictions
            (`SlotPredictions`) to `[B, Q]`; "" takes the confidences themselves.
        threshold: least probability of a slot that is committed.

    Loses: without a filter, which none ships: it is then `ConfidentParallel` with the same
    threshold. A filter guarantees nothing.
    """

    filter: str | Filter = ""
    threshold: float = within(0.9, 0, 1, "0.9 is usual")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.filter, str) and not callable(self.filter):
            raise OptionError(
                f"filter: expected a function or a safetensors file, received {show(self.filter)}; "
                'leave it out, or give the path of one, as "filter.safetensors"'
            )

    def selector(self, run: CanvasRun, state: SelectorState) -> Selector:
        chosen = self.filter
        if isinstance(chosen, str):
            width = run.model_pass.slots(run.canvas).shape[1]
            chosen = read_filter(chosen, width, run.canvas.tokens.device) if chosen else _confidence
        return Final(chosen, self.threshold)


@dataclass(frozen=True)
class Final(Selector):
    """Slots that `filter` gives at least `threshold`; possibly none."""

    filter: Filter
    threshold: float

    def select(self, predictions: SlotPredictions, state: SelectorState) -> Tensor:
        return predictions.is_open & (self.filter(predictions.sealed()) >= self.threshold)


def read_filter(file: str, width: int, device: torch.device) -> Filter:
    """The perceptron of a safetensors file, for a run of Q slots a block."""
    check_path("filter", file, "file", hint="give the path of a safetensors file")
    remedy = "set block to the length it was trained for"
    opened = open_weights(Path(file), "filter", asked=f"a block of {width} slots", remedy=remedy)
    hidden = opened.shapes.get("0.bias", (0,))[0]
    shapes = [(hidden, width), (hidden,), (width, hidden), (width,)]
    weights = opened.read(dict(zip(_NAMES, shapes, strict=True)))
    first, first_bias, second, second_bias = (weights[n].float().to(device) for n in _NAMES)

    def apply(predictions: SlotPredictions) -> Tensor:
        inner = (_confidence(predictions) @ first.T + first_bias).relu()
        return (inner @ second.T + second_bias).sigmoid()

    return apply


def _confidence(predictions: SlotPredictions) -> Tensor:
    """`[B, Q]`, the probability of the likeliest token; 1 where a slot is not open."""
    return torch.where(predictions.is_open, predictions.peak, 1.0)
