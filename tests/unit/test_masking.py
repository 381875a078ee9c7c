"""Masked training by hand: numbers of hidden slots, which, the loss there, what sees what."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from mmaccel.demo.masking import draw_counts, hidden_losses, hide, masked_loss, see_all, slots_of
from mmaccel.demo.token_pool import IGNORE


def test_counts_are_even_and_at_least_one() -> None:
    rng = np.random.default_rng(0)
    assert sorted(draw_counts(rng, 7, 7)) == [1, 2, 3, 4, 5, 6, 7]
    for _ in range(20):  # four rows over 8 slots: one row for each pair of numbers
        assert sorted((draw_counts(rng, 4, 8) - 1) // 2) == [0, 1, 2, 3]


def test_every_count_is_equally_likely_for_every_row() -> None:
    rng = np.random.default_rng(0)
    drawn = np.stack([draw_counts(rng, 3, 5) for _ in range(3000)])
    for row in range(3):
        shares = np.bincount(drawn[:, row], minlength=6)[1:] / 3000
        assert len(shares) == 5 and abs(shares - 0.2).max() < 0.04


def test_hidden_slots_are_slots_and_as_many_as_asked() -> None:
    labels = torch.tensor([[IGNORE, 3, 1, 2, IGNORE], [IGNORE, IGNORE, 0, 5, 6]])
    slots = slots_of(labels)
    seen = torch.zeros(2, 5)
    for k in range(200):
        hidden = hide(slots, np.array([2, 1]), np.random.default_rng(k))
        assert hidden.sum(1).tolist() == [2, 1] and not bool((hidden & ~slots).any())
        seen += hidden
    assert bool((seen[0, 1:4] > 100).all()) and bool((seen[1, 2:] > 40).all())


class Echo(torch.nn.Module):
    """Says at each position the id that stands there, loudly; remembers what it was shown."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab

    def model(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> SimpleNamespace:
        self.shown, self.mask = input_ids, attention_mask
        states = torch.nn.functional.one_hot(input_ids, self.vocab).float()
        return SimpleNamespace(last_hidden_state=states)

    def lm_head(self, states: Tensor) -> Tensor:
        return states * 4


@pytest.mark.parametrize("shift", [0, 1])
def test_losses_are_read_where_the_logits_stand(shift: int) -> None:
    ids = torch.tensor([[1, 2, 2, 3, 0], [1, 3, 2, 0, 0]])
    hidden = torch.tensor([[False, False, True, True, False], [False, True, False, False, False]])
    model = Echo(5)
    losses = hidden_losses(model, ids, hidden, mask_id=4, pad_id=0, shift=shift)
    assert model.shown.tolist() == [[1, 2, 4, 4, 0], [1, 4, 2, 0, 0]]
    right = float(-torch.tensor([0.0, 0, 4, 0, 0]).log_softmax(0)[2])
    wrong = right + 4
    # shift 0: the mask stands there, which is never the token; shift 1: 2 stands before 2
    wanted = [wrong, wrong, wrong] if shift == 0 else [right, wrong, wrong]
    assert losses.tolist() == pytest.approx(wanted)


def test_all_look_at_all_but_padding() -> None:
    mask = see_all(torch.tensor([[True, True, False], [True, True, True]]))
    assert mask.shape == (2, 1, 3, 3)
    low = torch.finfo(torch.float32).min
    assert mask[0, 0].tolist() == [[0, 0, low]] * 3
    assert mask[1, 0].tolist() == [[0, 0, 0]] * 3


def test_rows_or_tokens_weigh_the_same() -> None:
    losses = torch.tensor([1.0, 3.0, 5.0, 8.0])
    hidden = torch.tensor([[True, True, True, False], [False, True, False, False]])
    assert float(masked_loss(losses, hidden, power=1.0)) == pytest.approx((3 + 8) / 2)
    assert float(masked_loss(losses, hidden, power=0.0)) == pytest.approx(17 / 4)


def test_a_causal_model_given_the_mask_looks_both_ways() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, num_key_value_heads=2, **size)).eval()
    ids = torch.tensor([[1, 2, 3, 4, 0]])
    other = torch.tensor([[1, 2, 3, 5, 0]])
    padded = torch.tensor([[1, 2, 3, 4, 8]])
    valid = ids != 0
    with torch.no_grad():
        first, second, third = (
            model.model(input_ids=x, attention_mask=see_all(valid), use_cache=False)[0][0, 0]
            for x in (ids, other, padded)
        )
    assert not torch.allclose(first, second)
    assert torch.equal(first, third)
