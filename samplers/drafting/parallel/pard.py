"""PARD: a small model drafts a whole window in one pass, over masks.

Z. An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation",
arXiv 2504.18583, section 3: a causal model is trained to predict, behind a text and k mask tokens,
the token k + 1 places on. All masks are one token. The pass that reads what was accepted reads W -
2 masks behind it, and its last W - 1 entries score the W - 1 drafts, none from another.

Published checkpoints (amd/PARD-Llama-3.2-1B, amd/PARD-Qwen2.5-0.5B, amd/PARD-Qwen3-0.6B) name the
mask `pard_token` in their configuration; vLLM also reads `ptd_token_id`.

Departures: every row proceeds at its own pace. Any causal LM with an id to spare runs; one that was
not trained for it drafts badly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mmaccel.checks import check_int
from mmaccel.contracts import Pass
from mmaccel.errors import OptionError
from mmaccel.samplers.arithmetic import as_called
from mmaccel.samplers.drafting.contract import Drafter, Drafts, OpenRun
from mmaccel.samplers.drafting.draft_model import ModelDrafter, ModelSource
from mmaccel.samplers.drafting.in_turn import draft_at_once

_NAMES = ("pard_token", "ptd_token_id")


@dataclass(frozen=True)
class Pard(ModelSource):
    """Drafts of a small model, all in one pass over mask tokens.

    Args:
        model: a causal LM of transformers or a `TokenModel`. Its keys and values are the drafter's.
        mask_token: id of a mask; None: `pard_token` or `ptd_token_id` of the model's configuration.

    Loses: in long windows: the farther a draft, the less it knows of what is before it; with models
    that were not trained to read masks. No published checkpoint was at hand.
    """

    mask_token: int | None = None

    keeps_predictions = False

    def __post_init__(self) -> None:
        super().__post_init__()
        mask = self.mask_token
        if mask is None:
            mask = _find_mask(self.model.model)
        check_int("Pard.mask_token", mask, 0, self.model.n_inputs - 1, hint="it is an id of a mask")
        object.__setattr__(self, "mask_token", mask)

    def open(self, run: OpenRun) -> Drafter:
        """Cost: the prompt in a pass of the small model."""
        drafter = PardDrafter(self, self.model, run.steps.declare("next slot of the draft model"))
        drafter.prefill(run)
        return drafter


def _find_mask(model: Any) -> int:
    config = {} if model is None else model.config.to_dict()
    for name in _NAMES:
        if name in config:
            mask: int = config[name]
            return mask
    raise OptionError(
        f"Pard.mask_token: expected {' or '.join(_NAMES)} in the configuration, received "
        "neither; give mask_token=, the id that the model was trained with"
    )


@dataclass(eq=False)
class PardDrafter(ModelDrafter):
    def draft(self, run: OpenRun) -> Drafts:
        rows = run.rows
        branches = run.prompt.branches
        source = self.source
        assert isinstance(source, Pard) and source.mask_token is not None
        if run.width == 1:  # nothing to draft; what was not read is read with the next drafts
            return Drafts(rows.slots[:, :0])
        unread = self.unread(run)
        most = int(unread.max())
        entry = torch.arange(most + run.width - 1, device=unread.device)  # of [R, N]
        back = 1 + unread[:, None] - entry  # of the first draft's column, [B, N]
        is_mask = (back < 1).repeat(branches, 1)
        columns = (rows.columns[:, :1] - back.clamp(min=1)).clamp(min=0)
        tokens = rows.model_inputs(columns, rows.tokens)
        tokens = tokens.masked_fill(is_mask, source.mask_token)
        _, lengths = run.prompt.text
        start = lengths - 1 + (rows.n_generated - unread).repeat(branches)
        with as_called():
            logits = self.model.forward(Pass(tokens, start.clamp(min=0)))
        run.stats.draft_passes += 1
        self.next_slot.hold(rows.slots[:, 0].clone())
        at = unread.repeat(branches)[:, None] + entry[: run.width - 1]  # the last token, and masks
        at = at[..., None].expand(-1, -1, logits.shape[-1])
        return draft_at_once(run, logits.gather(1, at))
