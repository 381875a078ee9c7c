"""Folders that are no EAGLE heads of the model that opens them: one line before a pass."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mmaccel import CausalLMWindow, Eagle, Jacobi, Noise, SamplingParams
from mmaccel.errors import OptionError, UnsupportedModelError
from tests.fixtures.heads import make_head
from tests.fixtures.spoiled import Spoil, edit_weights
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt
from tests.messages.case import Refused

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def edit_config(**changes: Any) -> Spoil:
    def edit(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(content | changes))

    return edit


BAD: dict[str, tuple[Spoil, type[Exception], tuple[str, ...]]] = {
    "another width": (edit_config(hidden_size=48), OptionError, ("of width 32", "of width 48")),
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
        says=("its decoder has no list of its layers", "another source"),
        error=UnsupportedModelError,
    ),
)
