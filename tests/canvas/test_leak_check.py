"""A model whose blocks look at later ones is refused where whole blocks are kept, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.canvas_contracts import CanvasPass
from mmaccel.contracts import Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.results import Generation
from mmaccel.samplers.canvas.checks import check_leaks
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

REFUSED = "depend on no later block.*a .* whose first block"
FILLS = [-1e4, -1e9, torch.finfo(torch.float32).min, float("-inf")]
Leak = Callable[["Blocks", Tensor], Tensor]  # tokens to what each of them adds


def decode(policy: Any, model: Any, length: int = 12, **options: Any) -> Generation:
    ones = torch.ones(2, dtype=torch.int64)
    prompt, noise = Prompt(ones[:, None] * 0, ones), Noise.from_seed(1, 2)
    made: Generation = policy.sample(
        model, prompt, length, params=SamplingParams(), noise=noise, **options
    )
    return made


class Blocks:
    """Logits are a hash of what an entry sees at its places, in blocks of 4.

    Args:
        leaks: "" for a model that keeps its word; "reads" for one that looks at every place;
            "later" for one that looks at the next block's first token alone.
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
        self.tokens_processed: list[Tensor] = []
        self.had_gradients = False

    @property
    def passes(self) -> int:
        return len(self.tokens_processed)

    def reserve(self, rows: int, cache_size: int) -> None:
        self.kept = torch.zeros(rows, cache_size, dtype=torch.float64)

    def forward(self, entries: CanvasPass) -> Tensor:
        self.tokens_processed.append(entries.tokens)
        self.had_gradients |= torch.is_grad_enabled()
        kept = self.kept[: len(entries.tokens)]
        held = (entries.tokens + 1).double() * (entries.positions + 2)
        kept.scatter_(1, entries.cache_indices, held)
        reads = entries.reads.expand(-1, entries.tokens.shape[1], -1).double()
        if self.leaks == "reads":
            reads = torch.ones_like(reads)
        seen = (reads * kept[:, None]).sum(-1).gather(1, entries.queries)
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
def test_a_model_that_sees_later_blocks_is_refused_where_they_are_kept(leaks: str) -> None:
    model, told = Blocks(leaks), []
    with pytest.raises(UnsupportedModelError, match="depend on no later block.*a Blocks whose"):
        decode(mmaccel.Stepwise(cache="block"), model, on_step=told.append)
    assert told == [] and model.passes <= 3 and not model.had_gradients
    assert decode(mmaccel.Stepwise(), model).stats.passes == 12  # every pass is over it all


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_model_that_keeps_its_word_is_served(dtype: torch.dtype) -> None:
    class Rounded(Blocks):
        def forward(self, entries: CanvasPass) -> Tensor:
            return super().forward(entries).to(dtype)

    plain = decode(mmaccel.Stepwise(), Rounded())
    made = decode(mmaccel.Stepwise(cache="block"), Rounded())
    assert torch.equal(made.tokens, plain.tokens) and made.stats.exactness == "bitwise"
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
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        check_leaks(Blocks(leaks, lambda model, tokens: tokens + 1.0, vocab=vocab, mask=mask), 1)


@pytest.mark.parametrize("fill", FILLS)
def test_padded_ids_hide_nothing(fill: float) -> None:
    check_leaks(Blocks(fill=fill), 2)
    for leaks, adds in (("reads", None), ("", ids)):
        with pytest.raises(UnsupportedModelError, match=REFUSED):
            check_leaks(Blocks(leaks, adds, fill=fill), 2)


@pytest.mark.parametrize("fill", FILLS)
def test_which_ids_are_possible_may_not_change(fill: float) -> None:
    class Where(Blocks):
        def forward(self, entries: CanvasPass) -> Tensor:
            logits = super().forward(entries) * 0
            last = entries.tokens[:, -1:].expand_as(entries.queries)
            return logits.scatter(2, last[..., None] % 9, fill)

    with pytest.raises(UnsupportedModelError, match=REFUSED):
        check_leaks(Where(), 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_where_logits_are_finite_may_not_change(value: float) -> None:
    class Where(Blocks):
        def forward(self, entries: CanvasPass) -> Tensor:
            is_blank = bool((entries.tokens[:, -1] == self.mask_token).all())
            self.fill = -1e9 if is_blank else value
            return super().forward(entries)

    with pytest.raises(UnsupportedModelError, match=REFUSED):
        check_leaks(Where(), 1)


@pytest.mark.parametrize("pair", [(-1e9, -2e9), (-1e4, -1.1e4), (-1e9, float("-inf"))])
def test_what_is_as_good_as_masked_is_all_the_same(pair: tuple[float, float]) -> None:
    class Noisy(Blocks):
        def forward(self, entries: CanvasPass) -> Tensor:
            self.fill = pair[self.passes % 2]
            return super().forward(entries)

    check_leaks(Noisy(), 2)


@pytest.mark.parametrize("adds", [masks, high_ids])
@pytest.mark.parametrize("vocab", [11, 40, 5000])
def test_any_token_of_a_later_block_may_leak(adds: Leak, vocab: int) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        check_leaks(Blocks(adds=adds, vocab=vocab), 1)


def test_later_tokens_are_masks_and_come_from_the_whole_vocabulary() -> None:
    model, again = Blocks(vocab=40, fill=-1e9), Blocks(vocab=40, fill=-1e9)
    for each in (model, again):
        check_leaks(each, 5)
    assert model.passes == 3 and all(
        map(torch.equal, model.tokens_processed, again.tokens_processed)
    )
    fed = torch.stack(model.tokens_processed)  # [3, 5, 8]
    assert bool((fed[..., :4] == torch.tensor([10, 1, 10, 3])).all())
    blank, one, other = fed[..., 4:].flatten(1)
    assert bool((blank == 10).all()) and bool((one != other).all())
    assert bool((one.diff() < 0).any())  # in no order
    drawn = set(one.tolist()) | set(other.tolist())
    assert drawn == set(range(38)) - {10}  # 38 and 39 are padding


def test_committed_tokens_that_are_given_back_hide_nothing() -> None:
    class GivesBack(Blocks):
        def forward(self, entries: CanvasPass) -> Tensor:
            logits = super().forward(entries)
            tokens = entries.tokens.gather(1, entries.queries)[..., None]
            same = torch.arange(11) == tokens
            return torch.where((tokens == 10) | same, logits * (tokens == 10), float("-inf"))

    check_leaks(GivesBack(), 2)
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        check_leaks(GivesBack("reads"), 2)


def test_the_self_check_goes_by_the_models_device() -> None:
    """Not by the one that tensors are made on where nothing is said."""

    class Here(Blocks):
        def reserve(self, rows: int, cache_size: int) -> None:
            with torch.device("cpu"):
                super().reserve(rows, cache_size)

        def forward(self, entries: CanvasPass) -> Tensor:
            with torch.device("cpu"):
                return super().forward(entries)

    with torch.device("meta"):
        check_leaks(Here(), 2)
        with pytest.raises(UnsupportedModelError, match=REFUSED):
            check_leaks(Here("reads"), 2)


@pytest.mark.parametrize("most", [5, 7, 8, 9])
def test_what_fits_of_a_second_block_is_self_checked(most: int) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        check_leaks(Blocks("reads", most=most), 2)
    model = Blocks(most=most)
    check_leaks(model, 2)
    assert [tokens.shape for tokens in model.tokens_processed] == [(2, min(most, 8))] * 3


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
        with pytest.raises(UnsupportedModelError, match=REFUSED):
            check_leaks(Blocks(adds=little), 2)


def test_who_has_checked_a_model_says_so() -> None:
    class Checked(Blocks):
        is_self_checked = True

    for kind, passes in ((Checked, 0), (Blocks, 3)):
        model = kind()
        made = decode(mmaccel.Stepwise(cache="block"), model)
        assert model.passes == made.stats.passes + passes
