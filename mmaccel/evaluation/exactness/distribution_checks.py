"""Two checks of a distribution: sequences of an enumerable model, and images of the user's own.

The first is a G-test, or for canvas policies an enumeration without sampling. The second is a
permutation test of features (`mmaccel.evaluation.exactness.mmd`). Each states what it would have
seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from mmaccel.evaluation.exactness.canvas_enumeration import can_enumerate, enumerate_paths
from mmaccel.evaluation.exactness.g_test import power, total_variation
from mmaccel.evaluation.exactness.identity import Check
from mmaccel.evaluation.exactness.mmd import measure_power, permutation_test
from mmaccel.evaluation.exactness.reference_models import (
    ReferenceDenoiser,
    families,
    sample_distribution,
)
from mmaccel.evaluation.quality.frechet import Array

LEVEL = 1e-4  # of the G-test; wrong once in 10 000 reports of right samplers
MMD_LEVEL = 0.01
_VISIBLE = 0.03  # total variation whose power is stated
_NAME, _FEATURES = "distribution of an enumerable model", "features of images"


def check_distribution(policy: Any, kind: str, samples: int) -> list[Check]:
    """The distribution of whole sequences; no check for canvas policies that cannot be enumerated.

    Args:
        policy: an instance.
        kind: "window" or "canvas".
        samples: sequences to draw; canvas policies draw none.
    """
    guaranteed = policy.exactness != "relaxed"
    if kind == "canvas":
        if not can_enumerate(policy):
            return []
        apart = {
            name: total_variation(
                enumerate_paths(policy, ReferenceDenoiser(joint), 4, 3).joint, joint
            )
            for name, joint in families().items()
        }
        worst = max(apart.values())
        said = f"total variation {worst:.2g} at worst, over six joints of 4 slots, no sampling"
        return [Check(_NAME, guaranteed, worst < 1e-6, said, {"total_variation": apart})]
    test = sample_distribution(policy, samples)
    sees = power(_VISIBLE, samples, test.degrees, LEVEL)
    said = (
        f"G-test p = {test.p_value:.3g} ({test.degrees} degrees, {samples} sequences); a total "
        f"variation of {_VISIBLE:g} is seen with probability {sees:.4f}"
    )
    figures = {**asdict(test), "level": LEVEL, "visible": _VISIBLE, "power": sees}
    figures["statistic"] = test.statistic if np.isfinite(test.statistic) else None
    return [Check(_NAME, guaranteed, test.p_value >= LEVEL, said, figures)]


def check_features(policy: Any, first: Array, second: Array, captions: Sequence[str]) -> Check:
    """Features of images of the same prompts and of independent seeds.

    Args:
        policy: of the second.
        first: `[N, D]`, of the plain loop's images.
        second: `[N, D]`.
        captions: N prompts; labels are permuted within a prompt alone.
    """
    numbers = {caption: k for k, caption in enumerate(dict.fromkeys(captions))}
    own = [numbers[caption] for caption in captions]
    test = permutation_test(first, second, groups=(own, own))
    said = (
        f"permutation test p = {test.p_value:.3g} ({len(first)} and {len(second)} images of "
        f"{len(numbers)} prompts); "
    )
    if test.least > MMD_LEVEL:  # holds whatever the images are: no guarantee is held to that
        said += f"cannot fail: no p-value below {test.least:.3g} is possible; give more images"
        return Check(_FEATURES, False, True, said, {**asdict(test), "power": None})
    sizes = (len(first), len(second))
    sees = measure_power(first, sizes, groups=(own, own), level=MMD_LEVEL)
    visible = "none tested" if sees.visible is None else f"{sees.visible:g} standard deviations"
    said += f"smallest shift seen four times out of five: {visible}"
    figures = {**asdict(test), "power": {**asdict(sees), "chances": list(sees.chances.items())}}
    guaranteed = policy.exactness != "relaxed"
    return Check(_FEATURES, guaranteed, test.p_value >= MMD_LEVEL, said, figures)
