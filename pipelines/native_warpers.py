"""transformers' own truncation as filters of ours: the same law, without a processor in the way.

`generate` ends its list of processors with temperature, top-k, top-p and min-p, in this order. They
say nothing about the prefix and stand last, as the same filters do here; taken out of the chain
they leave a pass that never waits for the host and that one kernel can draw from.

Departures: sums of probabilities are added up from the likeliest token down, where transformers
adds from the least likely up, so that a token whose mass lies within rounding of top-p's limit may
fall otherwise; so may one within rounding of min-p's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmaccel.pipelines.processor_kinds import is_own

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
        What is left, and arguments of `Filters` for what was taken: those at the end that are
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
