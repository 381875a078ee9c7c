"""Samples of both routes have the distribution that the model's own logits give.

In place of the toy language of `tests.fixtures.toy_distribution` a Llama of three ids. Other suites
over decoders of transformers take the fixture `fused`; logits of the routes are compared in
`tests/runner/test_fused_decoder.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import CausalLMWindow
from tests.fixtures.fused_lms import build_decoder
from tests.fixtures.toy_distribution import Setting, assert_exact


class OwnForward:
    """A decoder of transformers as `enumerate_distribution` takes it: its own call, no cache."""

    def __init__(self, model: Any) -> None:
        self.model, self.vocab_size = model, model.config.vocab_size

    @torch.no_grad()
    def logits_of(self, prefix: Sequence[int]) -> list[float]:
        """Logits after one prefix."""
        logits: Tensor = self.model(input_ids=torch.tensor([list(prefix)])).logits
        return logits[0, -1].tolist()


@dataclass(frozen=True, eq=False)
class Decoder(Setting):
    """A setting whose language is a decoder of transformers."""

    @cached_property
    def model(self) -> Any:
        return build_decoder("llama with biases", vocab_size=3, hidden_size=16, head_dim=8,
                             intermediate_size=24, num_attention_heads=2, num_key_value_heads=1,
                             bos_token_id=None, eos_token_id=None)  # fmt: skip

    def language(self, seed: int = 1) -> Any:
        return OwnForward(self.model)


DECODERS = {
    "free": Decoder(samples=25_000, length=3),
    "guided": Decoder(
        samples=30_000,
        cases=(((1, 2), (0,)), ((2,), (1, 0, 1))),
        length=3,
        options={"guidance_scale": 1.5, "temperature": 1.2},
    ),
}


@pytest.mark.parametrize(
    ("policy", "name", "fused"),
    [
        (mmaccel.Jacobi(3, "random"), "free", True),
        (mmaccel.SpeculativeJacobi(3, "maximal"), "guided", True),
        (mmaccel.Speculative(3), "free", False),
    ],
    ids=str,
)
def test_samples_have_the_distribution_of_the_models_own_logits(
    name: str, policy: Any, fused: bool
) -> None:
    setting = DECODERS[name]
    window = CausalLMWindow(setting.model, fused=fused)
    assert_exact(policy, setting, model=window)
    assert window.route.name == ("fused" if fused else "model")
