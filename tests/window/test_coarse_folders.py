"""Models without a coarse model, and prompts that the model itself has processed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mmaccel
from mmaccel import Jacobi
from tests.exactness.bitwise_runs import run
from tests.fixtures.coarse import StateLanguage, strong_coarse
from tests.fixtures.tiny_lms import build_lm


def test_a_model_without_a_coarse_model_says_so_once() -> None:
    cases = (("coarse", "neighbour", 1), ("auto", "previous-frame", 0))  # a clip
    for drafts, other, n_notes in cases:
        made = run(Jacobi(6, drafts), {}, model=StateLanguage(5, depth=6))
        plain = run(Jacobi(6, other), {}, model=StateLanguage(5, depth=6))
        assert made.passes.equal(plain.passes)
        notes = [note for note in made.stats.notes if "drafts='neighbour' instead" in note]
        assert len(notes) == n_notes


@pytest.mark.parametrize(("window", "length"), [(1, 14), (6, 1), ("adaptive", 14)])
def test_a_prompt_that_the_models_own_prefill_processed(
    window: int | str, length: int, tmp_path: Path
) -> None:
    """The first pass of a window of one slot is no pass of the model: no state is known."""
    model = build_lm("llama")
    source = strong_coarse(model.get_output_embeddings().weight.detach(), tmp_path, strength=0.5)
    embeddings = model.get_input_embeddings()(torch.tensor([[5, 9, 11, 2], [7, 8, 9, 4]]))
    options = dict(inputs_embeds=embeddings, max_new_tokens=length, do_sample=False)
    options |= dict(eos_token_id=None, pad_token_id=0)
    plain = model.generate(**options)
    handle = mmaccel.attach(model, Jacobi(window, source))
    assert model.generate(**options).equal(plain) and not handle.stats.fallbacks
