"""The logits chain: transformers' own logits processors, in their order, over a window.

Processors that read the prefix see what stands before each position: the prompt as transformers has
it, the tokens made and the drafts. Those with a form for windows are asked once, the others once
per position. A draft may be wrong, and a processor may choke on a wrong prefix (a grammar that
allows no next token, say). Such an error is kept and raised only if the run goes on to keep the
token, which it does exactly if the prefix was right.

Guidance: J. Ho, T. Salimans, 2022 (arXiv 2207.12598), in the form of G. Sanchez et al., 2023
(arXiv 2306.17806): on log-probabilities, as `UnbatchedClassifierFreeGuidanceLogitsProcessor` has
it.

transformers' own truncation as filters of ours: the same law, without a processor in the way.

`generate` ends its list of processors with temperature, top-k, top-p and min-p, in this order. They
say nothing about the prefix and stand last, as the same filters do here; taken out of the chain
they leave a pass that never waits for the host and that one kernel can draw from.

Departures: sums of probabilities are added up from the likeliest token down, where transformers
adds from the least likely up, so that a token whose mass lies within rounding of top-p's limit may
fall otherwise; so may one within rounding of min-p's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import OptionError, ShapeError
from mmaccel.pipelines.logits.processor_support import find_window_form, is_own
from mmaccel.samplers.sampling_params import SamplingParams

_SUPPRESS = "SuppressTokensLogitsProcessor"


class LogitsChain:
    """A `Processor` (see `mmaccel.samplers.sampling_params`) made of transformers' processors.

    Args:
        processors: each with its kind, "flat", "window" or "prefix".
        prompt: `[B, T]` int64, the prompt as transformers has it, padding included.
        origin: column of slot 0 in the line.

    Attributes:
        impossible: `[S]` int64, ids suppressed at every slot, or None.

    Cost: flat and window processors one call; prefix processors one call per position, and one host
        synchronisation.
    """

    def __init__(self, processors: Sequence[tuple[Any, str]], prompt: Tensor, origin: int) -> None:
        self._parts = [
            (kind, [processor for processor, _ in group])
            for kind, group in groupby(processors, key=lambda pair: pair[1])
        ]
        self._prompt, self._origin = prompt, origin
        self._choked: dict[tuple[int, int], Exception] = {}
        for _, part in self._parts:
            part[:] = [Suppression(p) if is_own(p, _SUPPRESS) else p for p in part]
        bans = [p.suppress_tokens for p, _ in processors if is_own(p, _SUPPRESS)]
        self.impossible = torch.cat([ids.flatten().long() for ids in bans]) if bans else None

    def __call__(self, scores: Tensor, line: Tensor, columns: Tensor) -> Tensor:
        """Scores `[B, W, V]`, line `[B, N]`, columns `[B, W]` to scores `[B, W, V]`."""
        given = scores.data_ptr()  # the caller's own; what is flat writes into nothing
        for kind, processors in self._parts:
            if kind == "flat":
                scores = self._all_at_once(processors, scores)
            elif kind == "window":
                scores = self._over_window(processors, scores, line, columns)
            else:
                scores = scores.clone() if scores.data_ptr() == given else scores
                self._one_by_one(processors, scores, line, columns)
        return scores

    def check(self, previous: Tensor, made: Tensor) -> None:
        """Raise what a processor raised about a prefix that turned out to be right.

        Args:
            previous: `[B]` int64, tokens each row had before the pass.
            made: `[B]` int64, tokens it has now.
        """
        if not self._choked:
            return
        before, now = previous.tolist(), made.tolist()
        for (row, slot), error in self._choked.items():
            if before[row] <= slot < now[row]:
                raise error
        self._choked.clear()

    @staticmethod
    def _all_at_once(processors: list[Any], scores: Tensor) -> Tensor:
        flat = scores.flatten(0, 1)  # [B * W, V]
        no_ids = flat.new_zeros(flat.shape[0], 0, dtype=torch.int64)
        for processor in processors:
            flat = processor(no_ids, flat)
        return flat.view_as(scores)

    def _over_window(
        self, processors: list[Any], scores: Tensor, line: Tensor, columns: Tensor
    ) -> Tensor:
        """Behind transformers' prompt, which may be shorter than the line's."""
        whole = torch.cat([self._prompt.to(line.device), line[:, self._origin :]], 1)
        ends = columns - self._origin + self._prompt.shape[1]
        for processor in processors:
            form = find_window_form(processor)
            if form is None:
                raise OptionError(
                    f"processors: expected a form for windows, received {processor!r}; "
                    'pass it as "prefix"'
                )
            scores = form(scores, whole, ends)
        return scores

    def _one_by_one(
        self, processors: list[Any], scores: Tensor, line: Tensor, columns: Tensor
    ) -> None:
        """Write into `scores`. Rows at the same slot share a call, as in transformers."""
        first: list[int] = (columns[:, 0] - self._origin).tolist()
        width = columns.shape[1]
        for slot in sorted({start + w for start in first for w in range(width)}):
            rows = [row for row, start in enumerate(first) if start <= slot < start + width]
            made = line[:, self._origin : self._origin + slot].to(self._prompt.device)
            ids = torch.cat([self._prompt, made], 1)
            entries = [slot - first[row] for row in rows]
            at = (torch.tensor(rows, device=line.device), torch.tensor(entries, device=line.device))
            current = scores[:, 0].clone()  # [B, V]; rows elsewhere are only company
            current[at[0]] = scores[at]
            for processor in processors:
                current = self._ask(processor, ids, current, rows, slot)
            scores[at] = current[at[0]].to(scores.dtype)

    def _ask(
        self, processor: Any, ids: Tensor, scores: Tensor, rows: list[int], slot: int
    ) -> Tensor:
        """One call for all rows; where it chokes, one for each row that counts."""
        if is_own(processor, "PrefixConstrainedLogitsProcessor"):  # knows its rows by number
            allowed = processor._prefix_allowed_tokens_fn

            def answer(row: int) -> Tensor:
                alone = type(processor)(lambda _, sentence: allowed(row, sentence), 1)
                return alone(ids[row : row + 1], scores[row : row + 1].clone())[0]
        else:
            try:
                return processor(ids, scores.clone())
            except Exception:  # kept below, if a row that counts is the reason

                def answer(row: int) -> Tensor:
                    return processor(ids[row].repeat(len(ids), 1), scores.clone())[row]

        result = scores.clone()
        for row in rows:
            try:
                result[row] = answer(row)
            except Exception as error:
                self._choked.setdefault((row, slot), error)
        return result


class Suppression:
    """`SuppressTokensLogitsProcessor`, which looks its ids up anew at every call, by a mask."""

    def __init__(self, processor: Any) -> None:
        self._ids = processor.suppress_tokens
        self._mask: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[N, V]` to the same with -inf at the ids; those outside 0..V-1 count for none."""
        if self._mask is None:
            known = torch.arange(scores.shape[-1], device=scores.device)
            self._mask = torch.isin(known, self._ids.to(scores.device))
        return scores.masked_fill(self._mask, float("-inf"))


@dataclass(frozen=True)
class LogGuidance(SamplingParams):
    """SamplingParams whose guidance works on log-probabilities: ``s (log c - log u) + log u``."""

    def _guide(self, logits: Tensor, branches: int) -> Tensor:
        if branches != 2:
            raise ShapeError(
                f"guidance: expected 2 branches, received {branches}; "
                "put the unconditional prompts behind the others"
            )
        conditional, unconditional = logits.log_softmax(-1).chunk(2)
        return (conditional - unconditional).mul_(self.guidance_scale).add_(unconditional)


_WARPERS = {  # class -> its number; in the order in which filters run
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}


def take_warpers(
    kinds: Sequence[tuple[Any, str]], samples: bool
) -> tuple[list[tuple[Any, str]], dict[str, Any]]:
    """Split the warpers at the end of a call's processors off.

    Args:
        kinds: processors in order, each with its kind.
        samples: whether tokens are drawn; otherwise nothing is taken.

    Returns:
        What is left, and arguments of `SamplingParams` for what was taken: those at the end that are
        exactly transformers' own, in the order of filters and with plain settings.
    """
    order = list(_WARPERS.values())
    rest, taken = list(kinds), dict[str, Any]()
    last = len(order)
    while samples and rest:
        processor = rest[-1][0]
        name = _WARPERS.get(type(processor).__name__)
        if name is None or not is_own(processor, type(processor).__name__):
            break
        place, value = order.index(name), getattr(processor, name)
        plain = getattr(processor, "filter_value", -float("inf")) == -float("inf")
        least = getattr(processor, "min_tokens_to_keep", 1)
        if place >= last or not plain or least != 1 or not 0 < value < float("inf"):
            break
        taken[name], last = value, place
        rest.pop()
    return rest, taken
