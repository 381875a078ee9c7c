"""The plain masked decoder on laws that are known: orders, passes, guidance, given tokens."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mmaccel.demo.grammar_measure import grammar_reader
from mmaccel.demo.grammar_task import build_grammar
from mmaccel.demo.grammar_words import CANVAS, MASK, encode_answer, encode_prompt
from mmaccel.demo.masked_decode import MaskedModel, unmask
from mmaccel.errors import OptionError


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
def test_one_slot_a_pass_follows_the_law_and_two_do_not(order: str) -> None:
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
    # the free prompt's law is uniform; guidance 0 is that law, so slots need not be alike
    tokens, _ = unmask(PAIR, [[1]] * 400, seed=0, free=[], guidance=0.0)
    assert 150 < int((tokens[:, 0] != tokens[:, 1]).sum()) < 250
    with pytest.raises(OptionError, match="unconditional"):
        unmask(PAIR, [[1]], seed=0, guidance=2.0)
    with pytest.raises(OptionError, match="order"):
        unmask(PAIR, [[1]], seed=0, order="upwards")


def test_slots_are_read_behind_prompts_of_any_length() -> None:
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
