"""The widgets that shape the law tokens are drawn from."""

from __future__ import annotations

from mmaccel.comfy.table import Widget

OWN = "-1 takes what the model's authors recommend."
_NONE = ((-1.0, None),)


def law_widgets() -> tuple[Widget, ...]:
    """Temperature, top-k, top-p and min-p."""
    return (
        Widget(
            "temperature", "float", -1.0,
            f"How freely tokens are drawn: 0 always takes the likeliest, 1 the model's own law. "
            f"{OWN}",
            -1, 100, 0.05, stands_for=_NONE,
        ),
        Widget(
            "top_k", "int", -1, f"Keep the k likeliest tokens; 0 keeps all. {OWN}",
            -1, 2**31 - 1, 1, stands_for=((-1, None),),
        ),
        Widget(
            "top_p", "float", -1.0,
            f"Keep the likeliest tokens that make up this share; 1 keeps all. {OWN}",
            -1, 1, 0.01, stands_for=_NONE,
        ),
        Widget(
            "min_p", "float", -1.0,
            f"Keep tokens with this share of the likeliest one's; 0 keeps all. {OWN}",
            -1, 1, 0.01, stands_for=_NONE,
        ),
    )  # fmt: skip
