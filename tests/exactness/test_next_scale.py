"""The distribution of next-scale decoding, of a network whose images of sides 1 and 2 can all be
enumerated, and bugs that the proof must reject.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import NextScale, Noise, SamplingParams, Stepwise
from mmaccel.contracts import Prompt
from mmaccel.evaluation.exactness.g_test import GTest, count_sequences, g_test, power
from mmaccel.evaluation.exactness.reference_models import sample_distribution
from mmaccel.pipelines.hosts.next_scale.model import NextScaleModel
from mmaccel.samplers.canvas.scale_pass import ScalePass
from mmaccel.tokenizers_vq.multi_scale import MultiScaleQuantizer, Scales
from tests.fixtures.next_scale import build

Patch = pytest.MonkeyPatch
SIDES, CODES, SCALE = (1, 2), 3, 1.6
SAMPLES, LEVEL = 5_000, 1e-3
IDS = {False: [CODES + 4], True: [CODES + 4, CODES + 8]}  # of a class, and of none


def model() -> NextScaleModel:
    return build("class", sides=SIDES, n_codes=CODES, depth=1)


@cache
def joint(guided: bool) -> Tensor:
    """`[V ** 5]`: of every image the product of its tokens' probabilities, from whole passes; the
    second scale alone is guided.
    """
    every = torch.tensor(list(product(range(CODES), repeat=5)))
    one = model()
    sums = one._sums(every)
    conditions = [torch.full((len(every), 1), id - CODES) for id in IDS[guided]]
    branches = [one.model(ids, ids >= 0, sums).double() for ids in conditions]
    c, u = branches[0], branches[-1]
    share = torch.tensor([0.0] + [1.0] * 4)[:, None]
    logits = u + (1 + share * (SCALE - 1)) * (c - u) if guided else c
    chances = logits.softmax(-1).gather(2, every[..., None])[..., 0]
    return chances.prod(1)


def compare(policy: Any, guided: bool) -> GTest:
    ids = torch.tensor(IDS[guided]).repeat_interleave(SAMPLES)[:, None]
    prompt = Prompt(ids, torch.ones_like(ids[:, 0]), 1 + guided, layout=Scales(SIDES, CODES))
    params = SamplingParams(guidance_scale=SCALE if guided else 1.0)
    noise = Noise.from_seed(5, SAMPLES)
    made = policy.sample(model(), prompt, 5, params=params, noise=noise)
    return g_test(count_sequences(made.tokens, CODES), joint(guided))


@pytest.mark.parametrize(
    ("policy", "guided"), [(NextScale(), False), (NextScale(), True), (Stepwise(), True)], ids=repr
)
def test_images_have_the_networks_distribution(policy: Any, guided: bool) -> None:
    assert float(joint(guided).sum()) == pytest.approx(1, abs=1e-6)
    test = compare(policy, guided)
    assert test.p_value > LEVEL
    assert power(0.1, SAMPLES, test.degrees, LEVEL) > 0.99


def forget_the_sum(patch: Patch) -> None:
    """The second scale is drawn without what the first one added."""
    shrink = MultiScaleQuantizer.shrink
    patch.setattr(MultiScaleQuantizer, "shrink", lambda self, total, k: shrink(self, 0 * total, k))


def guide_every_scale_alike(patch: Patch) -> None:
    patch.setattr(Scales, "guidance_share", lambda self, slots: torch.ones_like(slots).float())


def read_another_row(patch: Patch) -> None:
    """The tokens before are those of the next row."""
    forward = ScalePass._forward

    def wrong(self: Any, canvas: Any, scale: int, rows: Any) -> Any:
        tokens = canvas.tokens
        canvas.tokens = tokens.roll(1, 0)
        made = forward(self, canvas, scale, rows)
        canvas.tokens = tokens
        return made

    patch.setattr(ScalePass, "_forward", wrong)


@pytest.mark.parametrize(
    "plant",
    [forget_the_sum, guide_every_scale_alike, read_another_row],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_is_rejected(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    joint(True)  # of the right model
    plant(monkeypatch)
    assert compare(NextScale(), True).p_value < 1e-9


def test_the_report_has_an_enumerable_model_of_scales(monkeypatch: Patch) -> None:
    for policy in (NextScale(), Stepwise()):
        assert sample_distribution(policy, "canvas", SAMPLES).p_value > LEVEL
    read_another_row(monkeypatch)
    assert sample_distribution(NextScale(), "canvas", SAMPLES).p_value < 1e-9
