"""Are the tokens those of another run? Row by row, with the reason where they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mmaccel.canvas_contracts import kind_of
from mmaccel.evaluation.exactness import first_divergence
from mmaccel.evaluation.forced_scores import explain_parting
from mmaccel.pipelines.picture_request import Pictures
from mmaccel.results import EXACT_DTYPE
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise


@dataclass(frozen=True)
class Check:
    """One promise, or what stands beside it.

    Attributes:
        name: of the check.
        promised: whether the policy promises that it holds.
        holds: whether it does.
        said: in words.
        figures: what was measured, ready for JSON.
    """

    name: str
    promised: bool
    holds: bool
    said: str
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def is_broken(self) -> bool:
        """A promise that does not hold."""
        return self.promised and not self.holds

    def to_dict(self) -> dict[str, Any]:
        """All fields and `is_broken`, ready for JSON."""
        return {**asdict(self), "is_broken": self.is_broken}


def compare_rows(
    name: str,
    pipe: Any,
    plain: Pictures,
    made: Pictures,
    seeds: Sequence[int],
    filters: Filters,
    *,
    promised: bool,
    width: int | None,
    dtype: str = EXACT_DTYPE,
) -> Check:
    """Tokens of two runs of the same captions and seeds.

    A row that parts where rounding explains it (`mmaccel.evaluation.forced_scores`) keeps the
    promise; on a canvas, where there is no next slot, nothing explains one.

    Args:
        name: of the check.
        pipe: a `TextToImage`.
        plain: what the other run is held against.
        made: the other run.
        seeds: one per row, as the runs had them.
        filters: of both runs.
        promised: whether the tokens have to be the same.
        width: of a window's pass, to measure rounding with; None leaves partings unexplained, as
            where the draws of a run do not come from the plain loop's noise.
        dtype: that the model computes in.
    """
    total, length = plain.tokens.shape
    parts = first_divergence(made.tokens, plain.tokens)
    rows = (parts < length).nonzero()[:, 0].tolist()
    if kind_of(pipe.model) != "window" or filters.processor is not None:
        width = None
    found = []
    for row in [] if width is None else rows:
        assert width is not None
        noise = Noise.from_seed([seeds[row]], 1, pipe.model.device)
        slot, caption = int(parts[row]), plain.prompts[row]
        parting = explain_parting(
            pipe, caption, plain.tokens[row], slot, int(made.tokens[row, slot]), filters, noise,
            min(width, length), getattr(torch, dtype),
        )  # fmt: skip
        found.append({"row": row, "caption": caption, "seed": seeds[row], **asdict(parting)})
    is_rounding = bool(found) and all(f["is_rounding"] for f in found)
    said = f"{total - len(rows)} of {total} rows the same"
    if rows:
        said += f", the others up to token {int(parts[rows].min())}"
        if found:
            # the row that rounding explains least is the one to look at
            shown = next((own for own in found if not own["is_rounding"]), found[0])
            said += f" ({_tell(shown)})"
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
    return Check(name, promised, not rows or is_rounding, said, figures)


def _tell(parting: dict[str, Any]) -> str:
    """Why a row may part, in words."""
    gap, rounding = parting["gap"], parting["rounding"]
    told = "a token that cannot be there" if gap is None else f"gap {gap:.2g} there"
    over = rounding > parting["limit"]
    more = f", more than {parting['limit']:.2g}: no rounding" if over else ""
    return f"{told}, rounding {rounding:.2g}{more}"


def cut_rows(made: Pictures, count: int) -> Pictures:
    """The first rows of a run; its stats stay those of all."""
    return Pictures(
        made.images[:count],
        made.tokens[:count],
        made.passes[:count],
        made.stats,
        made.prompts[:count],
        made.first,
    )
