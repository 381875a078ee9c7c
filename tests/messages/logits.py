"""Processors of logits: their numbers."""

from __future__ import annotations

from typing import Any

import mmaccel
from tests.messages.case import Refused


def _penalty(**options: Any) -> Any:
    return mmaccel.WindowedRepetitionPenalty(**{"penalty": 1.1, "window": 64} | options)


CASES = tuple(
    Refused(
        f"{make.__name__.strip('_')} with {name}={value!r}",
        lambda make=make, name=name, value=value: make(**{name: value}),
        (f"{name}: expected ",),
    )
    for make, name, values in (
        (_penalty, "penalty", (0, -1.0, float("nan"), "1", True)),
        (_penalty, "window", (0, 2.0, True)),
        (mmaccel.RepetitionAwareSampling, "window", (0, -3, "10")),
        (mmaccel.RepetitionAwareSampling, "share", (0, 1.1, float("nan"), None)),
        (mmaccel.RepetitionAwareSampling, "top_p", (0.0, 1.5, True)),
        (mmaccel.RepetitionAwareSampling, "top_k", (0, 2.5, None)),
        (mmaccel.RepetitionAwareSampling, "start", (-1, 1.0)),
        (mmaccel.RepetitionAwareSampling, "redraw", ("some",)),
        (mmaccel.FrustratinglySimple, "alpha", (-0.1, 1.1)),
        (mmaccel.FrustratinglySimple, "top_k", (0, 2.5)),
        (mmaccel.FrustratinglySimple, "n", (0, True)),
        (mmaccel.FrustratinglySimple, "beta", (-0.1, 1.1)),
        (mmaccel.TopNSigma, "n_sigma", (0, -1.0, "1")),
        (mmaccel.EntropyTemperature, "theta", (0.0, float("nan"))),
    )
    for value in values
)
