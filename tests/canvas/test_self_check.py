"""The self-check of wrapped models refuses those that do not follow positions, masks or cache."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.contracts import CanvasPass, Denoiser
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.diffusion_lm.masked_lm import MaskedLM
from mmaccel.pipelines.hosts.diffusion_lm.models import LLaDADenoiser, SDARDenoiser
from mmaccel.pipelines.hosts.transformers_release import CACHE
from tests.fixtures.canvas import MASK
from tests.fixtures.denoisers import TinyLLaDA
from tests.fixtures.sdar import TinySDAR
from tests.fixtures.tiny_lms import build_lm


def bent(**changes: Any) -> Any:
    """A Llama whose forward changes its inputs."""
    model = build_lm("llama", initializer_range=0.35).double()
    forward = model.forward

    def bend(**inputs: Any) -> Any:
        for name, change in changes.items():
            inputs[name] = change(inputs)
        return forward(**inputs)

    model.forward = bend
    return model


def causal(inputs: dict[str, Any]) -> torch.Tensor:
    mask: torch.Tensor = inputs["attention_mask"]
    low = torch.finfo(mask.dtype).min
    at = inputs["position_ids"]
    n = at.shape[1]
    if mask.shape[-1] != n:
        return mask
    return mask.masked_fill((at[:, None] > at[..., None])[:, None], low)


def test_good_models_are_checked_once() -> None:
    model = build_lm("qwen3").double()
    MaskedLM(model, MASK)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    MaskedLM(model, MASK)
    assert calls == []
    MaskedLM(model, MASK, shift=1)
    assert len(calls) == 8  # three of whole rows and alone, two plain, three scrambled
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        MaskedLM(build_lm("llama").to(dtype), MASK, block=4)
        MaskedLM(build_lm("llama").to(dtype), MASK, shift=1)


class Blocks(Denoiser):
    """Somebody's model: a hash of what an entry sees at the cache indices it reads, in blocks of 4.

    Args:
        leaks: whether it attends to every cache index.
    """

    block, supports_kv_cache, vocab_size, mask_token = 4, True, 11, 10
    device = torch.device("cpu")
    passes = 0

    def __init__(self, leaks: bool) -> None:
        self.leaks = leaks

    def reserve(self, rows: int, cache_size: int) -> None:
        self.cache = torch.zeros(rows, cache_size, dtype=torch.float64)

    def forward(self, entries: CanvasPass) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        self.passes += 1
        cache = self.cache[: len(entries.tokens)]
        hashed = (entries.tokens + 1).double() * (entries.positions + 2)
        cache.scatter_(1, entries.cache_indices, hashed)
        reads = entries.reads.expand(-1, entries.tokens.shape[1], -1).double()
        reads = torch.ones_like(reads) if self.leaks else reads
        seen = (reads * cache[:, None]).sum(-1).gather(1, entries.queries)[..., None]
        at = entries.positions.gather(1, entries.queries)[..., None]
        return torch.sin(torch.arange(11.0) * (1 + at) * 1.7 + seen)


def is_refused(model: Any) -> bool:
    """Whether a model is refused as one that leaks, where blocks are cached."""
    try:
        mmaccel.attach(model, mmaccel.Stepwise(cache="block")).detach()
    except UnsupportedModelError as error:
        assert "later blocks" in str(error) or "a longer one than alone" in str(error)
        return True
    return False


@pytest.mark.parametrize("leaks", [False, True])
def test_a_model_of_somebody_else_is_checked_where_its_blocks_are_cached(leaks: bool) -> None:
    model: Any = Blocks(leaks)
    plain = mmaccel.attach(model, mmaccel.Stepwise())
    assert model.passes == 0
    plain.detach()
    if leaks:
        assert is_refused(model)
        return
    made = []
    for cache in ("block", "none"):
        with mmaccel.attach(model, mmaccel.Stepwise(cache=cache)) as handle:
            made.append(model.generate(torch.tensor([[5, 3]]), max_new_tokens=12))
    assert torch.equal(*made) and handle.stats.passes == 12


@pytest.mark.parametrize("fill", [None, float("-inf")])
@pytest.mark.parametrize("vocab", [11, 5000])
@pytest.mark.parametrize("leaks", [True, False])
def test_a_block_that_sees_whether_later_slots_are_open_is_refused(
    leaks: bool, vocab: int, fill: float | None
) -> None:
    """Slots of a later block are open when a block is cached, and filled afterwards."""

    class Counting(Blocks):
        vocab_size = vocab

        def forward(self, entries: CanvasPass) -> torch.Tensor:
            logits = super().forward(entries).repeat(1, 1, -(-vocab // 11))[..., :vocab].clone()
            block = entries.positions.gather(1, entries.queries)[..., None] // 4
            is_later = entries.positions[:, None] // 4 > block
            n_open = (is_later & (entries.tokens == 10)[:, None]).sum(-1, keepdim=True)
            logits += leaks * n_open * torch.arange(vocab) / vocab
            if fill is not None:
                logits[..., -2:] = fill  # padded ids
            return logits

    assert is_refused(Counting(False)) == leaks


@pytest.mark.parametrize("most", [8, 12, None])
def test_a_model_is_checked_within_its_positions(most: int | None) -> None:
    class Short(Blocks):
        max_positions = most

        def forward(self, entries: CanvasPass) -> torch.Tensor:
            assert most is None or int(entries.positions.max()) < most
            return super().forward(entries)

    model: Any = Short(False)
    with mmaccel.attach(model, mmaccel.Stepwise(cache="block")):
        made = model.generate(torch.tensor([[5, 3]]), max_new_tokens=6)
    assert made.shape == (1, 8)
    assert is_refused(Short(True))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"attention_mask": causal}, "no later position|in a batch with a longer one"),
        ({"attention_mask": lambda i: i["attention_mask"] * 0}, "in a batch with a longer one"),
    ],
)
def test_a_decoder_that_ignores_its_mask_is_refused(changes: Any, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        MaskedLM(bent(**changes), MASK)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"position_ids": lambda i: torch.zeros_like(i["position_ids"])}, ""),  # it has none
        (
            {"position_ids": lambda i: torch.arange(i["position_ids"].shape[1])[None]},
            "scrambled cache indices|from cached keys",
        ),
        ({CACHE: lambda i: None}, "received a RuntimeError"),
    ],
)
def test_a_decoder_that_ignores_positions_or_cache_is_served_without_one(
    changes: Any, words: str
) -> None:
    model = MaskedLM(bent(**changes), MASK)
    assert model.supports_kv_cache == (not words) and re.search(words, model.kv_cache_reason)


def test_a_causal_model_is_refused() -> None:
    class Causal(TinyLLaDA):
        def forward(self, *args: Any, **inputs: Any) -> SimpleNamespace:
            bias = inputs["attention_bias"]
            return super().forward(*args, **(inputs | {"attention_bias": bias & bias.tril()}))

    model = Causal(40)
    with pytest.raises(UnsupportedModelError, match="depend on no later position"):
        LLaDADenoiser(model, MASK)


def test_a_model_that_reads_later_blocks_is_refused() -> None:
    class Leaking(TinySDAR):
        kernel_dtypes = (torch.float64,)  # a leak is detected in one row too

        def forward(self, *args: Any, **inputs: Any) -> SimpleNamespace:
            mask = inputs["attention_mask"]
            inputs["attention_mask"] = mask.any(2, keepdim=True).expand_as(mask)
            return super().forward(*args, **inputs)

    words = "logits of the first block that depend on later blocks"
    with pytest.raises(UnsupportedModelError, match=words):
        SDARDenoiser(Leaking(40), MASK, block=4)

    def leak(inputs: dict[str, Any]) -> torch.Tensor:
        mask: torch.Tensor = inputs["attention_mask"]
        return mask.amax(2, keepdim=True).expand_as(mask)

    with pytest.raises(UnsupportedModelError, match="that depend on later blocks"):
        MaskedLM(bent(attention_mask=leak), MASK, block=4)
