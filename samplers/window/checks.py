"""What a window run refuses, before its first pass and after one."""

from __future__ import annotations

from typing import Any

from mmaccel.contracts import Policy, Prompt
from mmaccel.errors import NumericsError, OptionError, ShapeError
from mmaccel.samplers.noise import Noise


def check_run(policy: Policy, model: Any, prompt: Prompt, length: int, noise: Noise) -> None:
    """Refuse what cannot be run.

    Raises:
        OptionError: a model that fills a canvas, or length < 1.
        ShapeError: the noise is for another batch.
    """
    if not hasattr(model, "prefill"):
        raise OptionError(
            f"policy: expected one that fills a canvas for a {type(model).__name__}, received "
            f"{policy!r}, which decodes token after token; choose one such as Stepwise()"
        )
    if length < 1:
        raise OptionError(
            f"length: expected at least 1 token, received {length}; ask for 1 or more"
        )
    if noise.seeds.shape[0] != prompt.batch:
        raise ShapeError(
            f"noise: expected {prompt.batch} rows, received {noise.seeds.shape[0]}; "
            "make it for this batch"
        )


def invalid_logits(rows: tuple[int, ...], loosen: str = "params") -> NumericsError:
    """The error of scores that are no law.

    Args:
        rows: whose they are.
        loosen: what may have left no token.
    """
    return NumericsError(
        "scores: expected finite logits with at least one possible token, received NaN, "
        f"infinity or none; check the model's dtype and weights, or loosen the {loosen}",
        rows,
    )
