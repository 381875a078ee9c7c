"""Within the fused route: windows, batches and drafts change no token, as on the model's own.

And samples of both routes have the distribution that the model's own logits give, sequence by
sequence (`tests.fixtures.toy_distribution`, in place of the toy language a Llama of three ids). The
other suites over decoders of transformers take the fixture `fused`.
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
from tests.fixtures.tiny_lms import left_padded
from tests.fixtures.toy_distribution import Setting, assert_exact

MODELS = ("llama with biases", "gemma3", "cohere", "gemma2, capped", "gpt2", "gpt_neox", "opt")
ROWS = [[5, 6, 7, 8, 11, 2, 30], [9, 10], [4, 4, 4, 17]]
LENGTH = 24


def generate(
    model: Any, policy: Any, rows: list[list[int]], fused: bool, seeds: list[int], **options: Any
) -> tuple[Tensor, Any]:
    with mmaccel.attach(model, policy, strict=True, seed=seeds, fused=fused) as handle:
        made = model.generate(
            **left_padded(rows), max_new_tokens=LENGTH, pad_token_id=0, eos_token_id=None, **options
        )
        stats = handle.stats
    assert stats is not None and stats.route == ("fused" if fused else "model")
    return made[:, -LENGTH:], stats


@pytest.mark.parametrize("name", MODELS)
def test_the_routes_agree_with_the_librarys_own_greedy_loop(name: str) -> None:
    """Their logits differ in the last bits, which changes none of these tokens."""
    model = build_decoder(name)
    own = model.generate(
        **left_padded(ROWS), max_new_tokens=LENGTH, pad_token_id=0, eos_token_id=None,
        do_sample=False,
    )[:, -LENGTH:]  # fmt: skip
    for fused in (False, True):
        made, _ = generate(model, mmaccel.Jacobi(8), ROWS, fused, [0, 0, 0], do_sample=False)
        assert made.equal(own)


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
    ("policy", "name"),
    [
        (mmaccel.Jacobi(3, "random"), "free"),
        (mmaccel.SpeculativeJacobi(3, "maximal"), "guided"),
        (mmaccel.Speculative(3), "free"),
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
