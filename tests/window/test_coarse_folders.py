"""What a folder that is no coarse model of this model gets: one line before the first pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmaccel
from mmaccel import Coarse, Jacobi, OptionError, UnsupportedModelError
from tests.exactness.bitwise_runs import run
from tests.fixtures.coarse import StateLanguage, strong_coarse
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import ToyLanguage

WEIGHTS, CONFIG = "coarse.safetensors", "coarse.json"


def edit_weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return edit


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        content["config"] |= changes
        (folder / CONFIG).write_text(json.dumps(content))

    return edit


def of_another_model(folder: Path) -> None:
    strong_coarse(torch.eye(5) * 2, folder)


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:200])


BAD: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "NaN": (
        edit_weights(lambda w: w["mix.weight"].fill_(float("nan"))),
        UnsupportedModelError, "received NaN or infinity in mix.weight",
    ),
    "too large for float32": (
        edit_weights(lambda w: w.update({"mix.bias": w["mix.bias"].double() + 1e300})),
        UnsupportedModelError, "received NaN or infinity in mix.bias",
    ),
    "a tensor lacks": (
        edit_weights(lambda w: w.pop("gates.weight")), UnsupportedModelError, "received none",
    ),
    "other sizes": (edit_config(width=17), UnsupportedModelError, r"\[5, 17\].*received \[5, 16\]"),
    "cut": (cut, UnsupportedModelError, "safetensors cannot read"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), OptionError, f"received no {WEIGHTS}"),
    "no config": (lambda f: (f / CONFIG).unlink(), OptionError, f"received no {CONFIG}"),
    "no JSON": (lambda f: (f / CONFIG).write_text("{"), UnsupportedModelError, "a JSON object"),
    "sizes lack": (
        lambda f: (f / CONFIG).write_text("{}"), UnsupportedModelError, "under 'config'",
    ),
    "no neighbours": (edit_config(neighbours=[]), UnsupportedModelError, "1 to 256 neighbours"),
    "huge": (edit_config(width=10**9), UnsupportedModelError, "width as whole numbers"),
    "another vocabulary": (edit_config(vocab_size=6), OptionError, "5 tokens and states of 5"),
    "other states": (edit_config(hidden_size=9), OptionError, "received one for 5 and 9"),
    "another model": (of_another_model, OptionError, "received one of another model"),
}  # fmt: skip


@pytest.mark.parametrize("spoil, kind, said", BAD.values(), ids=BAD)
def test_one_line_before_the_first_pass(
    spoil: Callable[[Path], object], kind: type[Exception], said: str, tmp_path: Path
) -> None:
    source, model = strong_coarse(torch.eye(5), tmp_path), StateLanguage(5, depth=6)
    spoil(tmp_path)
    with pytest.raises(kind, match=said) as caught:
        run(Jacobi(6, source), {}, model=model)
    message = str(caught.value)
    assert "\n" not in message and "expected" in message and message.count(";") >= 1
    assert model.passes == 0


@pytest.mark.parametrize("candidates", [0, -1, True, 1.5, "3", None])
def test_candidates_are_an_integer(candidates: Any) -> None:
    with pytest.raises(OptionError, match="candidates: expected an integer >= 1"):
        Coarse("folder", candidates)


@pytest.mark.parametrize("folder", [None, 3, ["folder"]])
def test_a_folder_is_a_path(folder: Any) -> None:
    with pytest.raises(OptionError, match="expected a folder"):
        Coarse(folder)


def test_a_model_without_states(tmp_path: Path) -> None:
    source = strong_coarse(torch.eye(5), tmp_path)
    with pytest.raises(OptionError, match="hands out its hidden states.*received a ToyLanguage"):
        run(Jacobi(6, source), {}, model=ToyLanguage(5, depth=6))


def test_a_model_without_a_coarse_model_says_so_once() -> None:
    for drafts, n_notes in (("coarse", 1), ("auto", 0)):
        made = run(Jacobi(6, drafts), {}, model=StateLanguage(5, depth=6))
        plain = run(Jacobi(6, "neighbour"), {}, model=StateLanguage(5, depth=6))
        assert made.passes.equal(plain.passes)
        notes = [note for note in made.stats.notes if "drafts='neighbour' instead" in note]
        assert len(notes) == n_notes


@pytest.mark.parametrize("window", [1, 6, "adaptive"])
@pytest.mark.parametrize("length", [1, 14])
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
