"""A model that is both: a bidirectional pass over masks drafts, a causal pass of it verifies.

Block diffusion models that were made from an autoregressive model, or trained for both (J. Liu et
al., "TiDAR: Think in Diffusion, Talk in Autoregression", arXiv 2511.08923; C. Wu et al., Fast-dLLM
v2, arXiv 2509.26328; S. Cheng et al., SDAR, arXiv 2510.06303), also predict the next token under a
causal mask, and tokens are those of the causal model. The draft pass writes its keys and values at
the indices of the window, in the model's own cache; the verifying pass writes them anew.

Departures: a window is drafted in one pass, without steps of denoising; it begins where the row is,
and not at a multiple of the block; drafting and verifying are two passes, which TiDAR makes in one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mmaccel.capabilities import explain, refuse
from mmaccel.checks import Domain, within
from mmaccel.contracts import Pass
from mmaccel.errors import OptionError
from mmaccel.model_parts import CanvasDrafts
from mmaccel.samplers.arithmetic import as_called
from mmaccel.samplers.drafting.contract import Drafter, Drafts, DraftSource, OpenRun
from mmaccel.samplers.drafting.in_turn import draft_at_once


@dataclass(frozen=True)
class OwnCanvas(DraftSource):
    """Drafts of the model itself, which sees the window's masks in both directions.

    Args:
        mask_token: id of an open slot, as the model was trained with.
        shift: 1 if logits are those of the next position (Fast-dLLM v2), 0 if of their own (SDAR).

    Loses: where fewer than two tokens a window are accepted, as a window costs two passes of the
    large model. Tokens are those of the causal model, which may differ from its canvas loop's.
    Sliding layers, `attention=` and prompts of more than ids are refused. No published model was at
    hand.
    """

    mask_token: int = field(metadata={"domain": Domain(hint="it is an id of a mask")})
    shift: int = within(1, 0, 1, "1 suits models made from causal ones")

    needs = frozenset({"draft canvas"})
    keeps_predictions = False
    reads_last_scores = False
    needs_layers = True

    def open(self, run: OpenRun) -> Drafter:
        model = run.model
        if self.mask_token >= model.n_inputs:
            raise OptionError(
                f"drafts: expected a mask token in 0..{model.n_inputs - 1}, received {self!r}; "
                "take that of this model"
            )
        refuse(explain(self, model))
        return CanvasDrafter(self)


@dataclass(eq=False)
class CanvasDrafter(Drafter):
    def propose(self, run: OpenRun) -> Drafts:
        source = self.source
        assert isinstance(source, OwnCanvas)
        rows = run.rows
        prompt = run.prompt
        if run.width == 1:
            return Drafts(rows.slots[:, :0])
        before = (rows.columns[:, :1] - 1).clamp(min=0)
        last = rows.model_inputs(before, rows.tokens)  # [R, 1]
        masks = last.new_full((len(last), run.width - 1), source.mask_token)
        start = prompt.lengths - 1 + rows.n_generated.repeat(prompt.branches)
        entries = Pass(torch.cat([last, masks], 1), start.clamp(min=0))
        model = run.model
        assert isinstance(model, CanvasDrafts)
        with as_called():
            logits = model.forward_canvas(entries)  # [R, W, V]
        run.stats.draft_passes += 1
        first = 1 - source.shift
        return draft_at_once(run, logits[:, first : first + run.width - 1])
