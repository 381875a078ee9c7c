"""Masked training by hand: numbers of hidden slots, which, the loss there, what attends to what.

The plain decoder on known distributions: orders, passes, guidance, given tokens.
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from mmaccel.demo.grammar.tasks import CANVAS, MASK, encode_answer, encode_prompt
from mmaccel.errors import OptionError
from scripts.training.data import IGNORE
from scripts.training.grammar_masked import build_grammar, grammar_reader
from scripts.training.masking import (
    MaskedModel,
    draw_counts,
    hidden_losses,
    hide,
    masked_loss,
    see_all,
    slots_of,
    unmask,
)


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
    """Predicts at each position the id that stands there, and records its inputs."""

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


def test_all_attend_to_all_but_padding() -> None:
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


def test_a_causal_model_given_the_mask_attends_both_ways() -> None:
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


class Pair(MaskedModel):
    """Two slots that must be alike, with tokens 0 and 1 equally likely; counts its passes."""

    passes = 0

    def logits(self, prompts: Sequence[Sequence[int]], canvas: Tensor) -> Tensor:
        Pair.passes += 1
        other = canvas.flip(1)
        logits = torch.zeros(*canvas.shape, 2)
        for token in (0, 1):
            logits[..., token] = torch.where((other == 2) | (other == token), 0.0, -1e4)
        return logits * (1.0 if prompts[0] else 0.0)


PAIR = Pair(None, slots=2, tokens=2, mask_id=2, pad_id=3, shift=0)


@pytest.mark.parametrize("order", ["random", "confidence", "left"])
def test_one_slot_a_pass_follows_the_distribution_and_two_do_not(order: str) -> None:
    Pair.passes = 0
    tokens, logs = unmask(PAIR, [[1]] * 400, seed=0, order=order)
    assert Pair.passes == 2
    assert bool((tokens[:, 0] == tokens[:, 1]).all()) and 150 < int(tokens[:, 0].sum()) < 250
    assert logs.tolist() == pytest.approx([math.log(0.5)] * 400)
    together, _ = unmask(PAIR, [[1]] * 400, seed=0, order=order, per_step=2)
    assert Pair.passes == 3
    assert 150 < int((together[:, 0] != together[:, 1]).sum()) < 250


def test_given_tokens_are_put_and_weighed() -> None:
    given = torch.tensor([[1, 1], [0, 1]])
    tokens, logs = unmask(PAIR, [[1]] * 2, seed=0, order="left", given=given)
    assert torch.equal(tokens, given)
    assert float(logs[0]) == pytest.approx(math.log(0.5)) and float(logs[1]) < -1000


def test_guidance_goes_from_the_free_prompt_towards_the_caption() -> None:
    # the free prompt's distribution is uniform; guidance 0 takes it, so slots need not be alike
    tokens, _ = unmask(PAIR, [[1]] * 400, seed=0, free=[], guidance=0.0)
    assert 150 < int((tokens[:, 0] != tokens[:, 1]).sum()) < 250
    with pytest.raises(OptionError, match="unconditional"):
        unmask(PAIR, [[1]], seed=0, guidance=2.0)
    with pytest.raises(OptionError, match="order"):
        unmask(PAIR, [[1]], seed=0, order="upwards")


def test_slots_are_read_after_prompts_of_any_length() -> None:
    torch.manual_seed(0)
    model = build_grammar().eval()
    reader = grammar_reader(model)
    prompts = [encode_prompt(p.split()) for p in ("copy a b c d e f g", "tell ann cat")]
    canvas = torch.tensor([encode_answer(("a",)), [MASK] * CANVAS])
    with torch.no_grad():
        both = reader.logits(prompts, canvas)
        for k, prompt in enumerate(prompts):
            ids = torch.tensor([prompt + canvas[k].tolist()])
            mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
            alone = model(input_ids=ids, attention_mask=mask).logits[0, len(prompt) :, :MASK]
            free = [i for i in range(MASK) if i not in reader.never]
            assert torch.allclose(both[k][:, free], alone[:, free], atol=1e-5)
    assert float(both[..., list(reader.never)].max()) < -1e30
    drawn, _ = unmask(reader, prompts, seed=1, per_step=8)
    assert int(drawn.max()) < MASK and not set(reader.never) & set(drawn.flatten().tolist())


def test_temperature_0_takes_the_likeliest() -> None:
    torch.manual_seed(0)
    reader = grammar_reader(build_grammar().eval())
    prompts = [encode_prompt(("copy", "a", "b"))]
    cold = [unmask(reader, prompts, seed=s, order="left", temperature=0)[0] for s in (1, 2)]
    warm = [unmask(reader, prompts, seed=s, order="left")[0] for s in (1, 2)]
    assert torch.equal(*cold) and not torch.equal(*warm)
