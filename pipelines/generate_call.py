"""One call of transformers' `_sample`, read as a decoding task: prompt, length, filters, stops.

Source: `transformers.generation.utils.GenerationMixin.generate` and `_sample`, 5.17 to 5.23.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.contracts import Layout, Prompt
from mmaccel.pipelines.logits_chain import LogGuidance
from mmaccel.pipelines.processor_kinds import find_kind, is_own
from mmaccel.results import Generation
from mmaccel.samplers.filters import Filters

GUIDANCE = "UnbatchedClassifierFreeGuidanceLogitsProcessor"


@dataclass
class GenerateCall:
    """Arguments of one `_sample` call.

    Attributes:
        model: the model.
        ids: `[B, T]` int64, padded on the left.
        processors: transformers' `LogitsProcessorList`.
        criteria: transformers' `StoppingCriteriaList`.
        config: transformers' `GenerationConfig`.
        synced_gpus: as in `_sample`.
        streamer: as in `_sample`.
        others: everything meant for the model's forward.
        layout: what is known about the tokens to be made, or None.
        assume_stateless: whether processors of the caller's own count as marked, see
            `mmaccel.stateless`.
    """

    model: Any
    ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    synced_gpus: bool = False
    streamer: Any = None
    others: dict[str, Any] = field(default_factory=dict)
    layout: Layout | None = None
    assume_stateless: bool = False

    @property
    def guidance(self) -> Any:
        """The guidance processor, if it comes first."""
        first = self.processors[0] if self.processors else None
        return first if is_own(first, GUIDANCE) else None

    @property
    def mask(self) -> Tensor:
        """`[B, T]` bool, False on padding."""
        mask = self.others.get("attention_mask")
        return torch.ones_like(self.ids, dtype=torch.bool) if mask is None else mask.bool()

    @property
    def length(self) -> int | None:
        """Tokens to make for every row, if that is limited."""
        limits = [c.max_length for c in self.criteria if _is_criterion(c, "MaxLengthCriteria")]
        return min(limits) - self.ids.shape[1] if limits else None

    @property
    def pad(self) -> Tensor | None:
        """What fills a finished row; None if such rows go on, as no criterion names an end."""
        named = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        return self.config._pad_token_tensor if named else None

    @property
    def needs_feed(self) -> bool:
        """Whether somebody has to be shown the tokens one by one."""
        known = ("MaxLengthCriteria", "EosTokenCriteria")
        plain = all(any(_is_criterion(c, name) for name in known) for c in self.criteria)
        return self.streamer is not None or not plain

    def kinds(self) -> list[tuple[Any, str]]:
        """Processors behind guidance, each with its kind or the reason why it is refused."""
        rest = self.processors[1:] if self.guidance is not None else self.processors
        return [(processor, find_kind(processor, self.assume_stateless)) for processor in rest]

    def filters(self, chosen: dict[str, Any]) -> Filters:
        """Filters of the call; `chosen` are fields that were found among its processors."""
        chosen = {"temperature": 1.0 if self.config.do_sample else 0.0} | chosen
        if self.guidance is None:
            return Filters(**chosen)
        return LogGuidance(float(self.guidance.guidance_scale), **chosen)

    def unconditional(self) -> tuple[Tensor, Tensor]:
        """Negative prompts and their mask, `[B, U]` each; by default the prompt's last token."""
        context = self.guidance.unconditional_context
        ids, mask = context["input_ids"], context["attention_mask"]
        ids = self.ids[:, -1:] if ids is None else ids.to(self.ids.device)
        mask = torch.ones_like(ids) if mask is None else mask.to(self.ids.device)
        return ids, mask.bool()

    def prompt(self) -> Prompt:
        """Rows without their padding; with guidance, the unconditional rows behind them."""
        branches = [(self.ids, self.mask)]
        if self.guidance is not None:
            branches.append(self.unconditional())
        longest = max(ids.shape[1] for ids, _ in branches)
        aligned = [
            pad(align_left(ids, mask), (0, longest - ids.shape[1])) for ids, mask in branches
        ]
        lengths = torch.cat([mask.sum(1) for _, mask in branches])
        tokens = torch.cat(aligned)[:, : int(lengths.max())]
        stops = [c.eos_token_id for c in self.criteria if _is_criterion(c, "EosTokenCriteria")]
        device = self.model.device
        stop_tokens = torch.cat([s.flatten().to(device) for s in stops]) if stops else None
        tokens, lengths = tokens.to(device), lengths.to(device)
        return Prompt(tokens, lengths, len(branches), stop_tokens, self.layout)


def _is_criterion(criterion: Any, name: str) -> bool:
    own = type(criterion)
    return own.__module__ == "transformers.generation.stopping_criteria" and own.__name__ == name


def align_left(ids: Tensor, mask: Tensor) -> Tensor:
    """Move padding from the left to the right; what fills it is never looked at."""
    shift = ids.shape[1] - mask.sum(1, keepdim=True)
    index = torch.arange(ids.shape[1], device=ids.device) + shift  # [B, T]
    return ids.gather(1, index.clamp(max=ids.shape[1] - 1))


def hand_over(ids: Tensor, made: Generation, filler: Tensor | None, as_output: bool) -> Any:
    """What `generate` returns.

    Args:
        ids: `[B, T]` int64, prompts as they were given.
        made: tokens `[B, L]` of these rows.
        filler: `[]` int64, what stands behind the end of a row; None where rows have none.
        as_output: whether transformers' output object is wanted.

    Returns:
        `[B, T + longest]` int64, or the object with it.
    """
    longest = int(made.lengths.max())
    tokens = made.tokens[:, :longest]
    if filler is not None:
        index = torch.arange(longest, device=tokens.device)
        is_real = index < made.lengths[:, None]
        tokens = torch.where(is_real, tokens, filler.to(tokens.device))
    sequences = torch.cat([ids, tokens.to(ids.device)], 1)
    if not as_output:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=cast(Any, sequences))
