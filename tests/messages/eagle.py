"""Folders that are no EAGLE heads of the model that opens them: one line before a pass."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mmaccel import CausalLMWindow, Eagle, Jacobi, Noise, SamplingParams, TextToImage
from mmaccel.errors import OptionError, UnsupportedModelError
from tests.fixtures.checkpoints import SIZES, build_checkpoint, captions
from tests.fixtures.spoiled import Spoil, edit_weights
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import ToyLanguage, make_prompt
from tests.messages.case import Refused
from tests.window.test_eagle import make_head

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def edit_config(**changes: Any) -> Spoil:
    def edit(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(content | changes))

    return edit


BAD: dict[str, tuple[Spoil, type[Exception], tuple[str, ...]]] = {
    "another vocabulary": (edit_config(vocab_size=41), OptionError, ("40 tokens", "for 41")),
    "another width": (edit_config(hidden_size=48), OptionError, ("of width 32", "of width 48")),
    "a layer that is not there": (
        edit_config(eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
        OptionError,
        ("in 0..1, received (0, 1, 2)",),
    ),
    "targets elsewhere": (
        edit_weights(WEIGHTS, lambda w: w["d2t"].fill_(50)),
        UnsupportedModelError,
        ("expected d2t of tokens among 40",),
    ),
    "two layers": (
        edit_weights(WEIGHTS, lambda w: w.update({"layers.1.mlp.up_proj.weight": torch.zeros(2)})),
        UnsupportedModelError,
        ("layers.1.mlp.up_proj.weight' none",),
    ),
    "stretched positions": (
        edit_config(rope_scaling={"rope_type": "yarn"}),
        UnsupportedModelError,
        ("without rope_scaling", "yarn"),
    ),
}


def _open(spoil: Spoil) -> Any:
    """A run with a head whose folder was spoiled."""

    def call() -> None:
        model = build_lm("llama")
        with TemporaryDirectory() as name:
            folder = make_head(model, Path(name), third=True)
            spoil(folder)
            passes: list[object] = []
            model.register_forward_pre_hook(lambda *given: passes.append(given))
            try:
                _decode(CausalLMWindow(model), Eagle(name))
            finally:
                assert not passes

    return call


def _draw(family: str) -> None:
    with TemporaryDirectory() as folder:
        checkpoint = build_checkpoint(family, Path(folder))
        pipe = TextToImage.from_pretrained(checkpoint, device="cpu", size=SIZES.get(family))
        pipe(captions(family)[0], policy=Jacobi(window=4, drafts=Eagle("head")))


def _decode(window: Any, source: Eagle) -> None:
    Jacobi(window=4, drafts=source).sample(
        window, make_prompt([[5, 6]]), 6, params=SamplingParams(), noise=Noise.from_seed(0, 1)
    )


CASES = (
    *(
        Refused(name, _open(spoil), says=says, error=error)
        for name, (spoil, error, says) in BAD.items()
    ),
    Refused(
        "a model whose layers are no list",
        lambda: _decode(CausalLMWindow(build_lm("gpt2")), Eagle("head")),
        says=("whose decoder has no list of its layers", "another source"),
    ),
    Refused(
        "a window over image tokens",
        lambda: _draw("emu3"),
        says=("whose tokens have embeddings and a head of their own",),
    ),
    Refused(
        "a model without hidden states",
        lambda: _decode(ToyLanguage(7), Eagle("head")),
        says=("hands out its hidden states", "ToyLanguage", "ngram"),
    ),
    Refused(
        "no folder", lambda: Eagle(3), says=("Eagle.folder", "received 3", "the folder of a head")
    ),  # type: ignore[arg-type]
)
