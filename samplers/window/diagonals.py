"""FlashAR: an image of n rows and m columns in n + m - 1 passes, a diagonal each.

J. Zhou, Y. He, F. Chen, W. Wang, B. Zhuang, "FlashAR: Efficient Post-Training Acceleration for
Autoregressive Image Generation", 2026, arXiv 2605.09430. Pass t reads the tokens of diagonal t - 1,
at first the prompt's last one, and decides all of diagonal t, the slots with row + column = t: each
by what its left neighbour says of the slot to the right, and what the one above says of the slot
below (`drafting/heads/diagonal_model.py`). A token attends to the prompt and to all of its own
diagonal and of earlier ones, at the position that raster order gives it; structural tokens, such as
row ends, are never read. Relaxed: the model was trained further, and tokens of a diagonal are drawn
independently; how far that is from the plain loop no pass knows, so nothing is reported.

Departures: noise is that of the slots, so that a picture depends on its seed alone; each branch's
image follows its own prompt, where the authors' code pads the shorter one; the last diagonal is not
read, as nothing follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from mmaccel.capabilities import Exclusions, explain, refuse
from mmaccel.contracts import Layout, Pass
from mmaccel.errors import OptionError
from mmaccel.kernels.sample import argmax
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.drafting.heads.diagonal_model import FOLDER, load_diagonal_heads
from mmaccel.samplers.drafting.opened import open_once
from mmaccel.samplers.window.policy import WindowPolicy
from mmaccel.samplers.window.run import WindowRun


@dataclass(frozen=True)
class FlashAR(WindowPolicy):
    """The diagonals of an image one after the other, by heads that the model was trained with.

    Args:
        heads: a folder that FlashAR's training has written, with `config.json` and safetensors. It
            holds the model, too: `Qwen3ForCausalLM.from_pretrained(heads, config=Qwen3Config(
            **backbone_config), key_mapping={"^backbone": "model", "^horizontal_head": "lm_head"})`.

    Cost: n + m - 1 passes for n rows of m columns, each over at most a diagonal.
    Memory: keys and values of the heads' layers, of all slots.
    Loses: without such a folder, and nothing says how far its images are from the model's own.
    Methods of caches and attention, clips, layouts of LlamaGen's and GLM-Image's heads and models
    whose tokens form no rows are refused; steps are not captured. No published weights were at
    hand; beside the authors' code, random ones give the same tokens in float32.
    """

    heads: str = ""

    exactness: ClassVar[Exactness] = "relaxed"
    needs = frozenset({"layer states", "draft canvas"})
    needs_rows: ClassVar[bool] = True

    @property
    def excludes(self) -> Exclusions:
        others = dict.fromkeys(("own attention", "mixed passes"), "attends along diagonals")
        return {**super().excludes, **others}

    def decode(self, run: WindowRun) -> Generation:
        model: Any = run.model
        refuse(explain(self, model))
        layout = run.prompt.layout
        assert layout is not None
        if layout.frame and run.length > layout.frame:
            raise OptionError(
                f"length: expected one image of {layout.frame} slots for FlashAR, received "
                f"{run.length}; choose RowParallel()"
            )
        if model.setup.recorder is not None:
            raise OptionError(
                "outputs: expected tokens alone of FlashAR, which decides slots out of order, "
                "received a call for its cache, logits or scores, too; set "
                "return_dict_in_generate=False"
            )
        heads = open_once(
            self,
            model,
            Path(self.heads) / FOLDER.config,
            lambda: load_diagonal_heads(self.heads, model.output_matrix(), model.n_layers),
        )
        picture = Picture(layout, run.length, run.prompt.tokens.device)
        held = run.steps.declare("keys of the heads"), run.steps.declare("values of the heads")
        rows = run.rows
        rows.widen(run.length)
        branches = run.prompt.branches

        def step_fn() -> None:
            turn = rows.passes.clamp(max=len(picture.counts) - 2)  # [B], the diagonal to decide
            before = picture.list_cells(turn)  # [B, K], those of the diagonal before
            cells = picture.list_cells(turn + 1)  # [B, J]
            turns = turn.repeat(branches)[:, None]  # [R, 1]
            entries = before.repeat(branches, 1)  # [R, K]

            columns = picture.slots[before].where(before >= 0, -1) + rows.origin
            lengths = rows.lengths[:, None]
            n_read = int((lengths + (turns * picture.width).clamp(max=picture.n_cells)).max())
            place = torch.arange(n_read, device=turn.device) - lengths  # [R, P], as cells
            reads = (place < 0) | picture.is_before(place, turns)
            positions = lengths + entries
            logits = run.passes.logits(
                Pass(
                    rows.model_inputs(columns, rows.tokens),
                    positions=positions,
                    cache_indices=positions,
                    reads=reads[:, None],
                )
            )
            run.passes.n_behind += entries.numel() - len(entries)

            states = model.last_states.to(heads.vertical_head.weight)
            x, h = states.chunk(2, -1)  # [R, K, C]
            cache = heads.empty_cache(len(x), picture.n_cells)
            if held[0].value is not None:  # [B, G, S, …]
                cache = [each.get().transpose(0, 1).flatten(0, 1) for each in held]
            index = torch.arange(picture.n_cells, device=turn.device).expand(len(x), -1)
            reads = picture.is_before(index, turns.clamp(min=1))
            v = heads.look_down(x, entries.clamp(min=0), reads, cache)
            v = v.where(turns[..., None] > 0, x)
            for each, value in zip(held, cache, strict=True):
                each.hold(value.unflatten(0, (branches, -1)).transpose(0, 1))

            fused = heads.fuse(logits, h, v, *picture.neighbours(cells.repeat(branches, 1)))
            slots = picture.slots[cells]
            columns = rows.origin + slots
            scores = run.params.apply(fused, branches, rows.tokens, columns, slots, layout)
            noise = run.noise.frozen(slots, run.vocab_size, run.params.temperature)
            rows.tokens.scatter_(1, columns, run.backend.run(argmax, scores + noise))

            ahead = rows.n_generated[:, None] + picture.ahead  # [B, L], slots
            known = picture.known[ahead]
            window = known.where(known >= 0, rows.tokens.gather(1, rows.origin + ahead))
            run.passes.record(fused, scores.amax(-1).sum(1, True).expand_as(window))
            run.accept(window, (picture.turns[ahead] <= turn[:, None])[:, 1:])

        run.stats.notes.append("total_variation: FlashAR does not know it")
        model.keep_states(True, (heads.config.vertical_start_layer, model.n_layers))
        try:
            return run.run(step_fn)
        finally:
            model.keep_states(False)


class Picture:
    """The slots of an image by diagonals. A *cell* is a slot whose token is not known in advance,
    numbered in raster order; diagonal -1 is the prompt's last token, as cell -1.
    """

    def __init__(self, layout: Layout, length: int, device: torch.device) -> None:
        slots = torch.arange(length, device=device)
        forced = layout.forced(slots[None])
        known = torch.full_like(slots, -1) if forced is None else forced[0]
        self.slots = (known < 0).nonzero()[:, 0]  # [S], of the cells
        self.n_cells = len(self.slots)
        self.width = int((known[: layout.columns] < 0).sum())  # m
        cells = slots[: self.n_cells]
        self.diagonals = cells // self.width + cells % self.width  # [S]
        turns = torch.full_like(slots, -1).scatter(0, self.slots, self.diagonals)
        # of every slot its token where that is known, else -1, and the pass that decides it; behind
        # the last one nothing counts
        self.known = pad(known, (0, length))
        self.turns = pad(turns, (0, length))
        self.ahead = slots

        order = self.diagonals.argsort(stable=True)  # from top to bottom
        parts = order.split(self.diagonals.bincount().tolist())
        self.counts = slots.new_tensor([1, *map(len, parts)])  # from diagonal -1 on
        # [T + 1, K], cells of diagonals -1, 0, …, the last one again behind them
        self.table = pad_sequence([slots[:1] - 1, *parts], True, -1).cummax(1).values
        self.entries = torch.empty_like(cells)  # [S], of each cell among its diagonal
        self.entries[order] = torch.cat([slots[: len(part)] for part in parts])

    def list_cells(self, number: Tensor) -> Tensor:
        """Cells `[B, K]` of each row's diagonal -1 + `number` `[B]`, from top to bottom."""
        return self.table[number, : int(self.counts[number].max())]

    def is_before(self, cells: Tensor, turns: Tensor) -> Tensor:
        """Whether there are such cells, on diagonals before those of `turns`; negative ones too."""
        diagonals = self.diagonals[cells.clamp(0, self.n_cells - 1)]
        return (cells < self.n_cells) & (diagonals < turns)

    def neighbours(self, cells: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of cells `[R, J]`: entries of the left and of the upper one in the diagonal before, and
        whether there are such; 0 and False.
        """
        has_left = cells % self.width > 0
        has_above = cells >= self.width
        left = self.entries[cells - 1].where(has_left, 0)
        above = self.entries[cells - self.width].where(has_above, 0)
        return left, above, has_left, has_above
