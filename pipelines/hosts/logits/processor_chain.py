"""The logits chain: transformers' own logits processors, in their order, over a window.

A processor that reads the prefix gets the tokens before each position: prompt, generated tokens,
drafts. An error that it raises (a grammar that allows no next token) is raised only if the run
accepts the token, since a draft may be wrong.

Guidance: J. Ho, T. Salimans, 2022 (arXiv 2207.12598), in the form of G. Sanchez et al., 2023 (arXiv
2306.17806): on log-probabilities, as in `UnbatchedClassifierFreeGuidanceLogitsProcessor`.

`take_warpers` turns the processors that `generate` ends its list with (temperature, top-H, top-k,
top-p, min-p, eta) into `SamplingParams`, which apply the same steps last: without them in the chain
a pass never synchronises with the host, and one kernel can draw.

Departures: probabilities are summed from the likeliest token down, where transformers sums from the
least likely up. So a token within rounding of the limit of top-p or min-p may be kept by one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Layout
from mmaccel.pipelines.hosts.logits.processor_support import find_window_form, is_own
from mmaccel.samplers.sampling_params import SamplingParams

_SUPPRESS = "SuppressTokensLogitsProcessor"


class LogitsChain:
    """A `Processor` (`samplers/sampling_params.py`) made of transformers' processors.

    Args:
        processors: each with its kind, "flat", "window" or "prefix".
        prompt: `[B, T]` int64, the prompt as transformers has it, padding included.
        origin: column of slot 0 in the token buffer.

    Cost: a call each; of a prefix processor one a position, and one host synchronisation.
    """

    def __init__(self, processors: Sequence[tuple[Any, str]], prompt: Tensor, origin: int) -> None:
        self._groups: list[tuple[str, list[Any]]] = []  # neighbours of one kind
        for kind, group in groupby(processors, key=lambda pair: pair[1]):
            alike = [Suppression(p) if is_own(p, _SUPPRESS) else p for p, _ in group]
            self._groups.append((kind, alike))
        self._prompt, self._origin = prompt, origin
        self._errors: dict[tuple[int, int], Exception] = {}  # (row, slot) -> what was raised
        # ids [S] that are suppressed at every slot
        bans = [p.suppress_tokens for p, _ in processors if is_own(p, _SUPPRESS)]
        self.impossible = torch.cat([ids.flatten().long() for ids in bans]) if bans else None

    def __call__(self, scores: Tensor, token_buffer: Tensor, columns: Tensor) -> Tensor:
        """Scores `[B, W, V]`, token buffer `[B, N]`, columns `[B, W]` to scores `[B, W, V]`."""
        of_caller = scores.data_ptr()  # flat processors write into nothing
        for kind, processors in self._groups:
            if kind == "flat":
                scores = self._all_at_once(processors, scores)
            elif kind == "window":
                scores = self._over_window(processors, scores, token_buffer, columns)
            else:
                scores = scores.clone() if scores.data_ptr() == of_caller else scores
                self._one_by_one(processors, scores, token_buffer, columns)
        return scores

    def check(self, previous: Tensor, lengths: Tensor) -> None:
        """Raise what a processor raised about a prefix that was accepted: of rows that had
        `previous` `[B]` tokens before the pass, and have `lengths` `[B]` now.
        """
        if not self._errors:
            return
        before, now = previous.tolist(), lengths.tolist()
        for (row, slot), error in self._errors.items():
            if before[row] <= slot < now[row]:
                raise error
        self._errors.clear()

    @staticmethod
    def _all_at_once(processors: list[Any], scores: Tensor) -> Tensor:
        flat = scores.flatten(0, 1)  # [B * W, V]
        no_ids = flat.new_zeros(flat.shape[0], 0, dtype=torch.int64)
        for processor in processors:
            flat = processor(no_ids, flat)
        return flat.view_as(scores)

    def _over_window(
        self, processors: list[Any], scores: Tensor, token_buffer: Tensor, columns: Tensor
    ) -> Tensor:
        generated = token_buffer[:, self._origin :]
        # the prefix begins with transformers' own prompt, padding included
        prefix = torch.cat([self._prompt.to(generated.device), generated], 1)
        ends = columns - self._origin + self._prompt.shape[1]
        for processor in processors:
            form = find_window_form(processor)
            assert form is not None  # as its reading of prefixes was found
            scores = form(scores, prefix, ends)
        return scores

    def _one_by_one(
        self, processors: list[Any], scores: Tensor, token_buffer: Tensor, columns: Tensor
    ) -> None:
        """Writes into `scores`. Rows at the same slot share a call, as in transformers."""
        first: list[int] = (columns[:, 0] - self._origin).tolist()
        width = columns.shape[1]
        for slot in sorted({start + w for start in first for w in range(width)}):
            rows = [row for row, start in enumerate(first) if start <= slot < start + width]
            generated = token_buffer[:, self._origin : self._origin + slot]
            ids = torch.cat([self._prompt, generated.to(self._prompt.device)], 1)
            entries = [slot - first[row] for row in rows]
            at = token_buffer.new_tensor(rows), token_buffer.new_tensor(entries)
            current = scores[:, 0].clone()  # [B, V]; results of rows at other slots are not used
            current[at[0]] = scores[at]
            for processor in processors:
                current = self._call(processor, ids, current, rows, slot)
            scores[at] = current[at[0]].to(scores.dtype)

    def _call(
        self, processor: Any, ids: Tensor, scores: Tensor, rows: list[int], slot: int
    ) -> Tensor:
        """One call for all rows; if it raises, one call for each of `rows`."""
        if is_own(processor, "PrefixConstrainedLogitsProcessor"):  # its function takes row numbers
            allowed = processor._prefix_allowed_tokens_fn

            def call_for(row: int) -> Tensor:
                alone = type(processor)(lambda _, sentence: allowed(row, sentence), 1)
                return alone(ids[row : row + 1], scores[row : row + 1].clone())[0]
        else:
            try:
                return processor(ids, scores.clone())
            except Exception:  # stored below, if one of `rows` is the reason

                def call_for(row: int) -> Tensor:
                    return processor(ids[row].repeat(len(ids), 1), scores.clone())[row]

        result = scores.clone()
        for row in rows:
            try:
                result[row] = call_for(row)
            except Exception as error:
                self._errors.setdefault((row, slot), error)
        return result


class Suppression:
    """`SuppressTokensLogitsProcessor` with a mask that is computed once."""

    def __init__(self, processor: Any) -> None:
        self._ids = processor.suppress_tokens
        self._mask: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._mask is None:
            known = torch.arange(scores.shape[-1], device=scores.device)
            self._mask = torch.isin(known, self._ids.to(scores.device))
        return scores.masked_fill(self._mask, float("-inf"))


@dataclass(frozen=True)
class LogGuidance(SamplingParams):
    """`SamplingParams` with guidance on log-probabilities: ``s (log c - log u) + log u``."""

    def to_model_scores(
        self, logits: Tensor, branches: int, slots: Tensor, layout: Layout | None
    ) -> Tensor:
        conditional, unconditional = logits.float().log_softmax(-1).chunk(2)
        scores = (conditional - unconditional).mul_(self.guidance_scale).add_(unconditional)
        allowed = layout.allowed(slots) if layout is not None else None
        return scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))


_WARPERS = {  # class -> its setting, in the order in which `SamplingParams` applies them
    "TemperatureLogitsWarper": "temperature",
    "TopHLogitsWarper": "top_h",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "EtaLogitsWarper": "eta_cutoff",
}
_ATTRIBUTES = {"eta_cutoff": "epsilon"}  # setting -> attribute of its warper, of another name


def take_warpers(
    kinds: Sequence[tuple[Any, str]], samples: bool
) -> tuple[list[tuple[Any, str]], dict[str, Any]]:
    """Arguments of `SamplingParams` for the warpers at the end of a call's processors, and the
    others: of transformers' own classes with plain settings, in the order of `_WARPERS`, if tokens
    are drawn.
    """
    order = list(_WARPERS.values())
    rest = list(kinds)
    taken = dict[str, Any]()
    last = len(order)
    while samples and rest:
        processor = rest[-1][0]
        name = _WARPERS.get(type(processor).__name__)
        if name is None or not is_own(processor, type(processor).__name__):
            break
        index = order.index(name)
        value = getattr(processor, _ATTRIBUTES.get(name, name))
        value = value.item() if isinstance(value, torch.Tensor) else value
        plain = getattr(processor, "filter_value", -float("inf")) == -float("inf")
        least = getattr(processor, "min_tokens_to_keep", 1)
        if index >= last or not plain or least != 1 or not 0 < value < float("inf"):
            break
        taken[name], last = value, index
        rest.pop()
    return rest, taken
