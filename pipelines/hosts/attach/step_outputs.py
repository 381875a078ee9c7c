"""What `generate` returns next to its sequences: outputs of every step, and the cache.

transformers' loop stores what each pass of one token gives out. A window pass covers several slots,
each row its own: `StepOutputs` sorts values of accepted slots into an entry per step. After a row's
end they go on with padding until all rows have ended, as the loop does.

Shapes: see `mmaccel.contracts`; **C** hidden width.

Source: `transformers.generation.utils.GenerationMixin._sample`, 5.17 to 5.24.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.pipelines.hosts.generate_call import PER_LAYER, PER_STEP
from mmaccel.pipelines.hosts.transformers_release import CACHE
from mmaccel.samplers.window.recorder import StepRecorder, process_filler

if TYPE_CHECKING:
    from mmaccel.samplers.window.run import WindowRun


class StepOutputs(StepRecorder):
    """What one `generate` call records.

    Args:
        names: what to record, of the values of `PER_STEP` and `PER_LAYER`.
        mask: `[B, T]` bool, columns of the prompt that are attended to; the others are not in a
            window's cache.
        filler: what ended rows go on with; None where all rows end together.
        cache: a transformers cache that gets the keys and values of all tokens but the last, or
            None. It holds the prompt already if its length is that of the prompt.
        dtype: of the scores; logits are float32.
    """

    def __init__(
        self,
        names: frozenset[str],
        mask: Tensor,
        filler: Tensor | None,
        cache: Any,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._dtype = dtype
        self.is_active = bool(names)
        self._mask = mask
        self._filler = filler
        self._cache = cache
        self._prompt_output: Any = None
        self._windows: list[int | None] | None = None
        self._is_uncached = False
        self._steps: dict[str, list[Any]] = {name: [] for name in names}
        self._noted: dict[str, tuple[Any, int]] = {}  # value, entries skipped
        self._n_steps = 0

    def take_prompt(self, output: Any, cache: Any) -> None:
        """Take the values of step 0 from the model's output of the prompt's pass. The layers of
        `cache`, which it filled, say which columns attention weights have; None for a call without
        one, whose loop gives out all tokens' values at every step.
        """
        self._prompt_output = output
        self._is_uncached = cache is None
        if cache is not None:
            self._windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]

    def record(self, name: str, value: Any, skipped: int = 0) -> None:
        """Values per layer are tuples of tensors with R rows."""
        if name in self._steps and value is not None:
            self._noted[name] = value, skipped

    def accept(self, first: Tensor, n_new: Tensor) -> None:
        """Cost: one host synchronisation, one copy per slot."""
        starts: list[int] = first.tolist()
        ends = [start + n for start, n in zip(starts, n_new.tolist())]
        gained = [row for row, end in enumerate(ends) if end > starts[row]]
        first_step = min((starts[row] for row in gained), default=0)
        for step in range(first_step, max((ends[row] for row in gained), default=0)):
            # rows are at steps of their own: these have accepted a token at this one
            rows = [row for row in gained if starts[row] <= step < ends[row]]
            entries = [step - starts[row] for row in rows]  # of the window
            for name, (value, skipped) in self._noted.items() if rows else ():
                at = [entry - skipped for entry in entries]  # of the noted value
                steps = self._steps[name]
                steps += [None] * (step + 1 - len(steps))
                if name in PER_STEP.values():
                    dtype = self._dtype if name == "scores" else torch.float32
                    part = value[rows, at].to(dtype)  # [n, V]
                    steps[step] = _put(steps[step], part, rows, len(starts))
                elif step > 0:
                    steps[step] = self._store_layers(name, step, value, rows, at)
        self._noted = {}

    def finish(self, run: WindowRun) -> None:
        lengths: list[int] = run.rows.n_generated.tolist()
        self._n_steps = max(lengths)
        if self._filler is not None and min(lengths) < self._n_steps:
            process_filler(run, self, self._filler)
        if self._cache is not None:
            self._fill_cache(run)

    def scores(self, n_steps: int) -> tuple[Tensor, ...]:
        """Scores `[B, V]` of the first steps, during a run."""
        return tuple(self._steps["scores"][:n_steps])

    def collect(self) -> dict[str, Any]:
        """Fields of transformers' output object: a tuple of steps for everything recorded."""
        fields: dict[str, Any] = {}
        for name, steps in self._steps.items():
            if name in PER_LAYER.values():
                steps[:1] = [getattr(self._prompt_output, name)]
                if steps[0] is None:  # the model gives out none
                    steps = [None] * self._n_steps
                elif self._is_uncached:
                    steps = list(accumulate(steps, _grow))
            fields[name] = tuple(steps[: self._n_steps])
        return fields | ({} if self._cache is None else {CACHE: self._cache})

    def _store_layers(
        self, name: str, step: int, layers: Any, rows: list[int], entries: list[int]
    ) -> tuple[Tensor, ...]:
        """Values per layer of a step, with those of some rows in them."""
        before = self._steps[name][step]
        batch = len(self._mask)
        if name == "hidden_states":  # [R, W, C] -> [B, 1, C]
            parts = [value[rows, entries][:, None] for value in layers]
        else:  # [R, H, W, S] -> [B, H, 1, T + step]
            parts = [
                self._to_columns(value[rows, :, entries], rows, step, window)[:, :, None]
                for value, window in zip(layers, self._windows or [None] * len(layers))
            ]
        stored = [None] * len(parts) if before is None else before
        return tuple(_put(old, part, rows, batch) for old, part in zip(stored, parts))

    def _to_columns(
        self, weights: Tensor, rows: list[int], step: int, window: int | None
    ) -> Tensor:
        """Attention weights `[n, H, S]` over cache indices, over transformers' columns instead."""
        index = torch.cat([self._prompt_index(), self._new_index(step)], 1)[rows]
        index = index[:, None].to(weights.device)  # [n, 1, T + step], of all heads
        taken = weights.gather(2, index.clamp(min=0).expand(-1, weights.shape[1], -1))
        taken = taken.where(index >= 0, 0)
        return taken if window is None else taken[..., -window:]

    def _prompt_index(self) -> Tensor:
        """`[B, T]` int64, cache indices of the prompt's columns, -1 where nobody attends."""
        return torch.where(self._mask, self._mask.cumsum(1) - 1, -1)

    def _new_index(self, n_tokens: int) -> Tensor:
        """`[B, n_tokens]` int64, cache indices of the first generated tokens."""
        index = torch.arange(n_tokens, device=self._mask.device)
        return self._mask.sum(1, keepdim=True) + index

    def _fill_cache(self, run: WindowRun) -> None:
        """Append the keys and values that transformers' loop would have appended."""
        index = self._new_index(self._n_steps - 1)
        if int(self._cache.get_seq_length()) < self._mask.shape[1]:
            index = torch.cat([self._prompt_index(), index], 1)
        if not index.shape[1]:
            return
        model: Any = run.model
        for layer, (keys, values) in enumerate(model.run_caches().read(index)):
            self._cache.update(keys, values, layer)


def _grow(before: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Hidden states `[B, N, C]` or weights `[B, H, N, N]` of each layer with one more token's,
    `[B, 1, C]` or `[B, H, 1, N + 1]`.
    """
    wide = (pad(old, (0, row.shape[-1] - old.shape[-1])) for old, row in zip(before, new))
    return tuple(torch.cat(pair, -2) for pair in zip(wide, new))


def _put(before: Tensor | None, part: Tensor, rows: list[int], batch: int) -> Tensor:
    if len(rows) == batch:
        return part
    if before is None:
        before = part.new_zeros(batch, *part.shape[1:])
    before[rows] = part
    return before
