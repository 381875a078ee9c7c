"""Peak memory of an attached model against the library's own run, byte by byte.

The unit is X = 4 B W V bytes, one float for every token of every slot of a window. Jacobi's peak
exceeds the library's by what its window holds at once:

- the noise that is kept for the window and for as many slots in advance, 2 X;
- without guidance, 3 X: the window's noise, logits, and scores;
- with guidance, 6 X: noise, logits of both branches (2), their logarithms (2), the guided scores.

A plain run keeps the noise of its slot and of 16 in advance. While noise is made, 2^16 values at a
time take 16 bytes each.

The scores of a window's last slot, from which the next drafts come, exist twice: 2 X / W more.
A logits processor that reads the prefix would take one more. Hidden states are small compared with
the vocabulary, and fit into the tolerance of a tenth.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from tests.fixtures.live_memory import PeakMemory
from tests.fixtures.tiny_lms import build_lm

pytestmark = pytest.mark.slow

BATCH, VOCAB, WINDOW = 4, 2000, 16
UNIT = 4 * BATCH * WINDOW * VOCAB
NOISE = 4 * BATCH * (1 + 16) * VOCAB + 16 * 2**16
ATTACHED = mmaccel.Autoregressive(), mmaccel.Jacobi(window=WINDOW)


def _peak(policy: Any, prompt: int, new: int, **options: Any) -> int:
    """Bytes beyond the weights, with one padded row and a logits processor."""
    model = build_lm("llama", vocab_size=VOCAB, max_position_embeddings=512, eos_token_id=None)
    mmaccel.supports(model)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(4, VOCAB, (BATCH, prompt), generator=random)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    call = {"input_ids": ids, "attention_mask": mask, "do_sample": True, "top_k": 0}
    call |= {"max_new_tokens": new, "suppress_tokens": [3, 7]} | options
    with PeakMemory([*model.parameters(), *model.buffers()]) as memory:
        if policy is None:
            model.generate(**call)
        else:
            with mmaccel.attach(model, policy, seed=3, strict=True) as run:
                model.generate(**call)
            assert run.stats is not None and run.stats.tokens == BATCH * new
    return memory.peak


@pytest.mark.parametrize(("scale", "copies", "new"), [(1.0, 5, 240), (2.0, 8, 80)])
def test_a_window_takes_what_its_vocabulary_does(scale: float, copies: int, new: int) -> None:
    guided: dict[str, Any] = {}
    if scale != 1:
        guided = {"guidance_scale": scale, "negative_prompt_ids": torch.full((BATCH, 5), 9)}
    library, plain, jacobi = (_peak(policy, 10, new, **guided) for policy in (None, *ATTACHED))
    assert plain <= 1.1 * library + NOISE
    assert jacobi <= 1.1 * library + (copies + 2 / WINDOW) * UNIT


def test_a_long_prompt_takes_one_rows_mask() -> None:
    library, plain = _peak(None, 300, 4), _peak(mmaccel.Autoregressive(), 300, 4)
    assert plain <= 1.1 * library


@pytest.mark.parametrize(("prompt", "new"), [(120, 24), (30, 150)])
def test_the_cache_of_all_tokens_is_reserved_after_the_prompts_pass(prompt: int, new: int) -> None:
    library, plain = _peak(None, prompt, new), _peak(mmaccel.Autoregressive(), prompt, new)
    assert plain <= 1.1 * library + NOISE


def test_the_measure_sees_every_storage_once() -> None:
    held = torch.ones(1000)
    with PeakMemory([held]) as memory:
        first = held + 1  # 4000 bytes
        second = first.view(10, 100).T + 1.0  # 4000, as the view is none
        assert memory.peak == 8000
        del first, second
        third = torch.zeros(500)
        assert memory.peak == 8000 and third.sum() == 0
