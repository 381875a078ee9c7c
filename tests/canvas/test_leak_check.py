"""A model whose blocks depend on later ones is refused where completed blocks are cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import CanvasPass, Denoiser, Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.results import Generation, exactness_in
from mmaccel.samplers.canvas.checks import check_leaks
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

FILLS = [-1e4, float("-inf")]
Leak = Callable[["Blocks", Tensor], Tensor]  # tokens to what each of them adds


def decode(policy: Any, model: Any, length: int = 12, **options: Any) -> Generation:
    ones = torch.ones(2, dtype=torch.int64)
    prompt, noise = Prompt(ones[:, None] * 0, ones), Noise.from_seed(1, 2)
    made: Generation = policy.sample(
        model, prompt, length, params=SamplingParams(), noise=noise, **options
    )
    return made


class Blocks(Denoiser):
    """Logits are a hash of what an entry sees at the cache indices it reads, in blocks of 4.

    Args:
        leaks: "" for a correct model; "reads" for one that attends to every cache index; "later"
            for one that sees the next block's first token alone.
        adds: what later blocks' tokens add to the logits, times the id.
        fill: of the last two ids.
    """

    block, supports_kv_cache = 4, True
    device = torch.device("cpu")

    def __init__(
        self,
        leaks: str = "",
        adds: Leak | None = None,
        *,
        vocab: int = 11,
        mask: int | None = 10,
        most: int | None = None,
        fill: float | None = None,
    ) -> None:
        self.leaks, self.adds, self.fill, self.max_positions = leaks, adds, fill, most
        self.vocab_size, self.mask_token = vocab, mask
        self.seen_tokens: list[Tensor] = []
        self.had_gradients = False

    @property
    def passes(self) -> int:
        return len(self.seen_tokens)

    def reserve(self, rows: int, cache_size: int) -> None:
        self.cache = torch.zeros(rows, cache_size, dtype=torch.float64)

    def forward(self, entries: CanvasPass) -> Tensor:
        self.seen_tokens.append(entries.tokens)
        self.had_gradients |= torch.is_grad_enabled()
        cache = self.cache[: len(entries.tokens)]
        hashed = (entries.tokens + 1).double() * (entries.positions + 2)
        cache.scatter_(1, entries.cache_indices, hashed)
        reads = entries.reads.expand(-1, entries.tokens.shape[1], -1).double()
        if self.leaks == "reads":
            reads = torch.ones_like(reads)
        seen = (reads * cache[:, None]).sum(-1).gather(1, entries.queries)
        at = entries.positions.gather(1, entries.queries)
        if self.leaks == "later":
            follows = entries.positions[:, None] == (at // 4 * 4 + 4)[..., None]
            seen = seen + (follows * entries.tokens[:, None]).sum(-1)
        ids = torch.arange(float(self.vocab_size))
        logits = torch.sin(ids * (1 + at[..., None]) * 1.7 + seen[..., None])
        if self.adds is not None:
            later = entries.positions[:, None] // 4 > at[..., None] // 4
            more = (later * self.adds(self, entries.tokens)[:, None]).sum(-1)
            logits = logits + more[..., None] * ids
        if self.fill is not None:
            logits[..., -2:] = self.fill
        return logits


def ids(model: Blocks, tokens: Tensor) -> Tensor:
    return tokens.double()


def masks(model: Blocks, tokens: Tensor) -> Tensor:
    return (tokens == model.mask_token).double()


def high_ids(model: Blocks, tokens: Tensor) -> Tensor:
    return ((tokens >= 8) & (tokens != model.mask_token)).double()


@pytest.mark.parametrize("leaks", ["reads", "later"])
def test_a_model_that_sees_later_blocks_is_refused_with_a_block_cache(leaks: str) -> None:
    model, found = Blocks(leaks), []
    with pytest.raises(UnsupportedModelError):
        decode(mmaccel.Stepwise(cache="block"), model, on_step=found.append)
    assert found == [] and model.passes <= 3 and not model.had_gradients
    assert decode(mmaccel.Stepwise(), model).stats.passes == 12  # every pass computes everything


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_correct_model_is_served(dtype: torch.dtype) -> None:
    class Rounded(Blocks):
        def forward(self, entries: CanvasPass) -> Tensor:
            return super().forward(entries).to(dtype)

    plain = decode(mmaccel.Stepwise(), Rounded())
    made = decode(mmaccel.Stepwise(cache="block"), Rounded())
    assert torch.equal(made.tokens, plain.tokens)
    assert made.stats.exactness == exactness_in("bitwise", str(dtype).removeprefix("torch."))
    assert made.stats.positions < plain.stats.positions


@pytest.mark.parametrize(("vocab", "mask"), [(1, 0), (1, None)])
def test_where_nothing_can_be_compared_nothing_is_refused(vocab: int, mask: int | None) -> None:
    check_leaks(Blocks("reads", vocab=vocab, mask=mask), 1)
    for fill in (float("nan"), float("-inf")):
        check_leaks(Blocks("reads", vocab=2, mask=mask, fill=fill), 1)


@pytest.mark.parametrize(("vocab", "mask"), [(2, 1), (2, 0), (2, None), (3, None), (1, 5)])
@pytest.mark.parametrize("leaks", ["reads", "later"])
def test_two_tokens_are_enough(leaks: str, vocab: int, mask: int | None) -> None:
    check_leaks(Blocks(vocab=vocab, mask=mask), 1)
    with pytest.raises(UnsupportedModelError):
        check_leaks(Blocks(leaks, lambda model, tokens: tokens + 1.0, vocab=vocab, mask=mask), 1)


@pytest.mark.parametrize("fill", FILLS)
def test_padded_ids_hide_no_leak(fill: float) -> None:
    check_leaks(Blocks(fill=fill), 2)
    for leaks, adds in (("reads", None), ("", ids)):
        with pytest.raises(UnsupportedModelError):
            check_leaks(Blocks(leaks, adds, fill=fill), 2)


@pytest.mark.parametrize("adds", [masks, high_ids])
@pytest.mark.parametrize("vocab", [11, 40, 5000])
def test_any_token_of_a_later_block_may_leak(adds: Leak, vocab: int) -> None:
    with pytest.raises(UnsupportedModelError):
        check_leaks(Blocks(adds=adds, vocab=vocab), 1)


def test_a_model_that_returns_committed_tokens_can_still_leak() -> None:
    class ReturnsTokens(Blocks):
        def forward(self, entries: CanvasPass) -> Tensor:
            logits = super().forward(entries)
            tokens = entries.tokens.gather(1, entries.queries)[..., None]
            same = torch.arange(11) == tokens
            return torch.where((tokens == 10) | same, logits * (tokens == 10), float("-inf"))

    check_leaks(ReturnsTokens(), 2)
    with pytest.raises(UnsupportedModelError):
        check_leaks(ReturnsTokens("reads"), 2)


def test_the_self_check_uses_the_models_device() -> None:
    """And not torch's default device."""

    class Here(Blocks):
        def reserve(self, rows: int, cache_size: int) -> None:
            with torch.device("cpu"):
                super().reserve(rows, cache_size)

        def forward(self, entries: CanvasPass) -> Tensor:
            with torch.device("cpu"):
                return super().forward(entries)

    with torch.device("meta"):
        check_leaks(Here(), 2)
        with pytest.raises(UnsupportedModelError):
            check_leaks(Here("reads"), 2)


@pytest.mark.parametrize("most", [5, 7, 8, 9])
def test_what_fits_of_a_second_block_is_self_checked(most: int) -> None:
    with pytest.raises(UnsupportedModelError):
        check_leaks(Blocks("reads", most=most), 2)
    model = Blocks(most=most)
    check_leaks(model, 2)
    assert [tokens.shape for tokens in model.seen_tokens] == [(2, min(most, 8))] * 3


@pytest.mark.parametrize("most", [3, 4])
def test_a_single_block_leaks_nowhere(most: int) -> None:
    model = Blocks("reads", most=most)
    check_leaks(model, 2)
    assert model.passes == 0


@pytest.mark.parametrize("share", [1e-3, 0.05, 0.4])
def test_small_leaks_count_and_rounding_does_not(share: float) -> None:
    """Shares of the standard deviation of a sine, in the largest of 11 ids."""

    def little(model: Blocks, tokens: Tensor) -> Tensor:
        return masks(model, tokens) * share * 0.5**0.5 / 4 / 10

    if share < 1e-2:
        check_leaks(Blocks(adds=little), 2)
    else:
        with pytest.raises(UnsupportedModelError):
            check_leaks(Blocks(adds=little), 2)


def test_a_self_checked_model_is_not_checked_again() -> None:
    class Checked(Blocks):
        is_self_checked = True

    for kind, passes in ((Checked, 0), (Blocks, 3)):
        model = kind()
        made = decode(mmaccel.Stepwise(cache="block"), model)
        assert model.passes == made.stats.passes + passes
