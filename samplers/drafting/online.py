"""Coarse drafts without training: what a changed token does is learned from the passes themselves.

Two passes over the same slot differ in some tokens on its left, and in the hidden state that this
gave. Ridge regression fits the change of the state as a sum of linear maps, one for each neighbour,
of the change of the neighbour's embedding, over all slots of all rows of all runs of a model so
far. Embeddings are the leading principal coordinates of the rows of the large model's output
matrix, and states are fitted in its leading directions, so that nothing here grows with the square
of the vocabulary. Slots that no pass has seen keep the drafts of the neighbour source. No
publication is known to us.

Only for bitwise policies: counts of passes depend on earlier runs, and what was learned carries the
noise of other slots, which the distribution of a draft must not depend on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.contracts import Layout
from mmaccel.kernels.coarse_rounds import SweepWeights
from mmaccel.samplers.drafting.coarse_drafter import CoarseDrafter, OpenedCoarse
from mmaccel.samplers.drafting.coarse_model import (
    GRID_NEIGHBOURS,
    TEXT_NEIGHBOURS,
    VIDEO_NEIGHBOURS,
    CoarseConfig,
)
from mmaccel.samplers.drafting.contract import Drafter, DraftSource, OpenRun
from mmaccel.samplers.drafting.neighbour import Neighbour
from mmaccel.samplers.drafting.opened import opened_for
from mmaccel.samplers.drafting.states import StateModel

RANK, WIDTH = 32, 128  # coordinates of embeddings and of states
RIDGE = 300.0  # how many unit changes of evidence a map needs to be believed half
EVERY = 16  # passes between two fits
_LARGEST = 2**26  # numbers in the table of neighbours; the width shrinks for larger vocabularies
_POSITIVE = 1024.0  # where the sweep's relu changes nothing


@dataclass(frozen=True)
class Online(DraftSource):
    """A linear correction that is learned from the passes, without a file; `Neighbour`, with a
    remark, where none can be.

    Loses: against a trained coarse model: 4.9 tokens a pass on `scenes` where that makes 6.2.
    Captured passes cannot learn.
    """

    is_capturable = True  # a run whose passes are captured is drafted by `Neighbour`
    only_bitwise = True
    has_branches = True
    has_children = True
    reads_scores = True
    corrects = True
    name = "online"

    def open(self, run: OpenRun) -> Drafter:
        model = run.model
        if not isinstance(model, StateModel):
            return _fall_back("the model hands out no hidden states")
        if run.runner.is_static:
            return _fall_back("passes are captured")
        opened = _open_weights(model, run.prompt.layout, run.length)
        return OnlineDrafter.begin(self, run, opened)


def _fall_back(why: str) -> Drafter:
    return Drafter(Neighbour(), note=f"drafts='online': {why}; drafts='neighbour' instead")


@dataclass(eq=False)
class OnlineDrafter(CoarseDrafter):
    """A `CoarseDrafter` whose C learns from every pass."""

    def hold_pass(self, run: OpenRun, seen: Tensor, states: Tensor, last: Tensor) -> None:
        """As in `CoarseDrafter`; C is first shown the slots that the last pass evaluated too."""
        model = self.opened.model
        held = self.state
        assert isinstance(model, OnlineModel)
        if held.neighbours.value is not None:
            first = held.first.get()
            end = held.end.get()
            slots = run.rows.slots
            is_both = (
                (slots <= end) & (run.rows.n_generated > 0)[:, None] & ~run.rows.is_over(slots)
            )
            row, now = is_both.nonzero(as_tuple=True)
            before = (slots - first)[row, now]
            model.learn(
                held.neighbours.get()[row, before],
                seen[row, now],
                held.states.get()[row, before],
                states[row, now],
            )
        super().hold_pass(run, seen, states, last)


def _open_weights(model: StateModel, layout: Layout | None, length: int) -> OpenedCoarse:
    """One for each kind of tokens, which keeps what it has learned."""
    output = model.output_matrix()
    opened = opened_for(model)
    grid = None if layout is None else (layout.columns, layout.frame, length > layout.frame)
    key = (Online.name, output.data_ptr(), output.dtype, output.device, grid)
    if key not in opened:
        opened[key] = OpenedCoarse(OnlineModel(output, layout, length))
    return opened[key]


class OnlineModel:
    """A linear C that is fitted between passes, for rows of `length` tokens."""

    drafts_new_slots = False

    def __init__(self, output: Tensor, layout: Layout | None, length: int) -> None:
        output = output.detach().float()
        neighbours = _find_neighbours(layout, length)
        size = output.shape[0]
        width = min(WIDTH, output.shape[1])
        while width > 16 and len(neighbours) * size * width > _LARGEST:
            width //= 2
        centred = output - output.mean(0)
        directions = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)  # leading first
        self.directions = directions[:, :width]  # [D, H]
        embedded = centred @ directions[:, :RANK]
        embedded = embedded / embedded.std()
        self.embedded = torch.cat([embedded, embedded.new_zeros(1, embedded.shape[1])])
        self.config = CoarseConfig(
            size,
            output.shape[1],
            neighbours,
            0 if layout is None else layout.columns,
            0 if layout is None else layout.frame,
            embedding=embedded.shape[1],
            width=width,
        )
        n_in = len(neighbours) * embedded.shape[1]
        self._squares, self._products = output.new_zeros(n_in, n_in), output.new_zeros(n_in, width)
        self._passes = 0
        self._weights = SweepWeights(
            output.new_zeros(len(neighbours) * (size + 1), width),
            output.new_zeros(width, width),
            output.new_zeros(width),
            (output @ self.directions).contiguous(),
            output.new_zeros(size),
        )

    def sweep_weights(self) -> SweepWeights:
        """The weights, which every fit changes in place: zeros before the first."""
        return self._weights

    def slot_weights(self) -> None:
        """Of a slot itself nothing is known."""

    def of_prompt(self, prompts: Tensor) -> Tensor:
        return prompts.new_full((*prompts.shape[:-1], self.config.width), _POSITIVE)

    def base(self, slots: Tensor, distances: Tensor, states: Tensor, prompts: Tensor) -> Tensor:
        """A constant: what a linear C says of a change does not depend on the rest."""
        return states.new_full((*slots.shape, self.config.width), _POSITIVE)

    def gate(self, distances: Tensor) -> Tensor:
        """Ones, which no draft depends on."""
        return torch.ones(*distances.shape, 1, device=distances.device, dtype=torch.float32)

    def learn(self, seen: Tensor, now: Tensor, states_seen: Tensor, states: Tensor) -> None:
        """Add n slots: ids `[n, N]` of neighbours in two passes, both states `[n, D]` float32."""
        change = (self.embedded[now] - self.embedded[seen]).flatten(1)  # [n, N * R]
        self._squares.addmm_(change.T, change)
        self._products.addmm_(change.T, (states - states_seen) @ self.directions)
        self._passes += 1
        if self._passes % EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        """Maps of all neighbours, and the table of what every token then adds to a state."""
        squares = self._squares.clone()
        squares.diagonal().add_(RIDGE)
        maps = torch.cholesky_solve(self._products, torch.linalg.cholesky(squares))
        maps = maps.view(len(self.config.neighbours), -1, maps.shape[1])  # [N, R, H]
        table = self._weights.table.view(len(maps), -1, maps.shape[2])
        torch.matmul(self.embedded, maps, out=table)


def _find_neighbours(layout: Layout | None, length: int) -> tuple[tuple[int, int, int], ...]:
    if layout is None or not layout.columns:
        return TEXT_NEIGHBOURS
    return VIDEO_NEIGHBOURS if length > layout.frame > 0 else GRID_NEIGHBOURS
