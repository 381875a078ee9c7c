"""Compares the tokens of two runs row by row, and explains where they diverge.

A window's pass adds in another order than a pass of one token, so its logits differ in their last
bits. That explains a divergence where the token taken was below the best one by no more than these
differences; a wider gap is a bug. Both are measured on the model itself, by forwarding the plain
loop's tokens again, one by one and in windows. Differences of more than half of the digits are a
bug themselves, such as a window that attends to later tokens, and explain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Pass
from mmaccel.evaluation.exactness.g_test import first_divergence
from mmaccel.pipelines.text_to_image.outputs import ImageOutput
from mmaccel.results import EXACT_DTYPE
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.run_lock import alone
from mmaccel.samplers.sampling_params import SamplingParams

_MAX_GAP = 4  # a gap of so many times the largest difference seen still counts as rounding


@dataclass(frozen=True)
class Check:
    """One guarantee, or a measurement without one.

    Attributes:
        name: of the check.
        guaranteed: whether the policy guarantees that it holds.
        holds: whether it does.
        said: in words.
        figures: what was measured, ready for JSON.
    """

    name: str
    guaranteed: bool
    holds: bool
    said: str
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def is_broken(self) -> bool:
        """A guarantee that does not hold."""
        return self.guaranteed and not self.holds

    def to_dict(self) -> dict[str, Any]:
        """All fields and `is_broken`, ready for JSON."""
        return {**asdict(self), "is_broken": self.is_broken}


@dataclass(frozen=True)
class Decoding:
    """How the rows that are compared were decoded.

    Attributes:
        pipe: a `TextToImage`.
        params: of the runs.
        width: of a window's pass, to measure rounding with; None measures none.
        dtype: of the model.
    """

    pipe: Any
    params: SamplingParams
    width: int | None
    dtype: str = EXACT_DTYPE

    @property
    def can_be_explained(self) -> bool:
        """Whether rounding can be measured."""
        is_window = self.pipe.model.kind == "window"
        return self.width is not None and is_window and self.params.processor is None


def compare_rows(
    name: str,
    decoding: Decoding,
    plain: ImageOutput,
    made: ImageOutput,
    seeds: Sequence[int],
    *,
    guaranteed: bool,
) -> Check:
    """Tokens of two runs of the same prompts and seeds.

    A row that diverges where rounding explains it (`explain_divergence`) keeps the guarantee; on a
    canvas, where there is no next slot, nothing explains one.

    Args:
        name: of the check.
        decoding: of both runs; without a width divergences are unexplained, as where the draws of a
            run do not come from the plain loop's noise.
        plain: what the other run is compared with.
        made: the other run.
        seeds: one per row, as the runs had them.
        guaranteed: whether the tokens have to be the same.
    """
    total, length = plain.tokens.shape
    parts = first_divergence(made.tokens, plain.tokens)
    rows = (parts < length).nonzero()[:, 0].tolist()
    found = []
    for row in rows if decoding.can_be_explained else []:
        noise = Noise.from_seed([seeds[row]], 1, decoding.pipe.model.device)
        slot = int(parts[row])
        caption = plain.prompts[row]
        other = int(made.tokens[row, slot])
        parting = explain_divergence(
            decoding, caption, plain.tokens[row], slot, other=other, noise=noise
        )
        found.append({"row": row, "caption": caption, "seed": seeds[row], **asdict(parting)})
    is_rounding = bool(found) and all(f["is_rounding"] for f in found)
    said = f"{total - len(rows)} of {total} rows the same"
    if rows:
        said += f", the others up to token {int(parts[rows].min())}"
        if found:
            # the row that rounding explains least is reported
            shown = next((own for own in found if not own["is_rounding"]), found[0])
            said += f" ({_describe(shown)})"
        said += ": rounding explains it" if is_rounding else ""
    figures = {
        "rows": total,
        "same": total - len(rows),
        "length": length,
        "first_divergence": [None if p == length else p for p in parts.tolist()],
        "partings": found,
        "passes": float(made.passes.double().mean()),
        "tokens_per_pass": made.stats.tokens_per_pass,
    }
    return Check(name, guaranteed, not rows or is_rounding, said, figures)


def _describe(parting: dict[str, Any]) -> str:
    """Why a row diverges, in words."""
    gap, rounding = parting["gap"], parting["rounding"]
    reason = "a token of probability 0" if gap is None else f"gap {gap:.2g} there"
    over = rounding > parting["limit"]
    more = f", more than {parting['limit']:.2g}: no rounding" if over else ""
    return f"{reason}, rounding {rounding:.2g}{more}"


def cut_rows(made: ImageOutput, count: int) -> ImageOutput:
    """The first rows of a run; its stats stay those of all."""
    return ImageOutput(
        made.images[:count],
        made.tokens[:count],
        made.passes[:count],
        made.stats,
        made.prompts[:count],
        made.first,
    )


@dataclass(frozen=True)
class Divergence:
    """Where a row diverges from the plain loop, and whether rounding explains it.

    Attributes:
        slot: index of the first other token.
        gap: by which the worse of both tokens was below the best there, in the units of the scores
            (noise included); None where truncation rules it out.
        rounding: largest difference of a score between passes of one token and of a window.
        limit: above which such a difference is no rounding: half of the digits.
        is_rounding: whether rounding explains the divergence.
    """

    slot: int
    gap: float | None
    rounding: float
    limit: float
    is_rounding: bool


def explain_divergence(
    decoding: Decoding, caption: str, tokens: Tensor, slot: int, *, other: int, noise: Noise
) -> Divergence:
    """Measure the slot where a run diverged from the plain loop.

    Args:
        decoding: of the run, over a window; without a processor.
        caption: of the row.
        tokens: `[L]` int64, of the plain loop.
        slot: where the other run diverges.
        other: its token there.
        noise: of the row, B of 1.

    Cost: L passes of one token and L / width of a window.
    """
    assert decoding.width is not None
    pipe, params = decoding.pipe, decoding.params
    width = min(decoding.width, len(tokens))
    single = forced_scores(pipe, caption, tokens[: slot + 1], params, noise, 1)
    wide = forced_scores(pipe, caption, tokens, params, noise, width)[: slot + 1]
    both = single.isfinite() & wide.isfinite()
    rounding = float((single - wide)[both].abs().max())
    limit = math.sqrt(torch.finfo(getattr(torch, decoding.dtype)).eps) * float(
        single[both].abs().max()
    )
    both_tokens = [other, int(tokens[slot])]
    gaps = [
        float(scores[slot].max() - scores[slot, both_tokens].min()) for scores in (single, wide)
    ]
    gap = next((own for own in gaps if math.isfinite(own)), None)  # cut by one of them alone
    is_rounding = gap is not None and rounding <= limit and gap <= _MAX_GAP * rounding
    return Divergence(slot, gap, rounding, limit, is_rounding)


@torch.no_grad()
def forced_scores(
    pipe: Any, caption: str, tokens: Tensor, params: SamplingParams, noise: Noise, width: int
) -> Tensor:
    """Scores plus frozen noise at every slot of given tokens, the last of which is not processed.

    Args:
        pipe: a `TextToImage` over a window.
        caption, noise: as in `explain_divergence`.
        params: without a processor.
        tokens: `[L]` int64.
        width: tokens forwarded in one pass.

    Returns:
        `[L, V]` float32; the argmax is the token that a run draws there. At temperature 0, where
        the params leave one token, before truncation.
    """
    temperature = params.temperature  # 0 draws no noise
    if temperature == 0:
        params = SamplingParams(params.guidance_scale)
    model = pipe.model
    found = []
    with alone(model):
        prompt = pipe.image_model.prompt(
            [pipe.image_model.encode(caption)], params.guidance_scale != 1
        )
        rows, longest = prompt.tokens.shape
        model.reserve(rows, longest + len(tokens))
        if longest > 1:
            model.prefill(Pass(prompt.tokens[:, :-1], torch.zeros_like(prompt.lengths)))
        last = prompt.tokens.gather(1, prompt.lengths[:, None] - 1)  # [R, 1]
        own = tokens.to(last.device)
        token_buffer = torch.cat([last, own[:-1].expand(rows, -1)], 1)  # [R, L]
        for first in range(0, len(tokens), width):
            part = token_buffer[:, first : first + width].contiguous()
            logits = model.forward(Pass(part, prompt.lengths - 1 + first))
            slots = torch.arange(first, first + part.shape[1], device=own.device)[None]
            empty = torch.zeros_like(slots[:, :0])
            scores = params.apply(
                logits, prompt.branches, empty, slots, slots, prompt.layout
            )  # [1, W, V]; no processor reads the tokens
            drawn = noise.frozen(slots, scores.shape[-1], temperature)
            found.append((scores + drawn)[0].cpu())
    return torch.cat(found)
