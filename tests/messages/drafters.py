"""Drafters that do not fit the model that they draft for: one line before a pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import mmaccel
from mmaccel import CausalLMWindow, Noise, SamplingParams
from mmaccel.errors import UnsupportedModelError
from tests.fixtures.spoiled import edit_weights
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt
from tests.messages.case import Refused
from tests.messages.eagle import edit_config

WEIGHTS = "model.safetensors"
_NOISE = Noise.from_seed(0, 1)


def _decode(policy: Any, model: Any = None) -> None:
    """A run, which must end before any pass of the model."""
    model = build_lm("llama") if model is None else model
    passes: list[object] = []
    model.register_forward_pre_hook(lambda *given: passes.append(given))
    try:
        policy.sample(
            CausalLMWindow(model),
            make_prompt([[5, 6]]),
            6,
            params=SamplingParams(),
            noise=_NOISE,
        )
    finally:
        assert not passes


def _trim(ids: object) -> None:
    mmaccel.trim_vocabulary(build_lm("llama"), ids)


def _open_file(name: str, content: bytes) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_bytes(content)
        _trim(file)


def _mtp(spoil: Callable[[Path], object]) -> None:
    from tests.fixtures.mtp import open_mtp_model, save_mtp

    with TemporaryDirectory() as name:
        folder = save_mtp(Path(name))
        spoil(folder)
        _decode(mmaccel.Jacobi(4, "mtp"), open_mtp_model(folder))


def _dflash(spoil: Callable[[Path], object], window: int | str = 4) -> None:
    from tests.fixtures.heads import build_target, save_draft

    with TemporaryDirectory() as name:
        folder = save_draft("authors", Path(name))
        spoil(folder)
        _decode(mmaccel.Jacobi(window, mmaccel.DFlash(str(folder))), build_target())


CASES = (
    Refused(
        "a draft model with another vocabulary",
        lambda: _decode(mmaccel.Speculative(4, build_lm("llama", vocab_size=39))),
        says=("expected a vocabulary of 40, received 39", "mmaccel.share_ids"),
    ),
    Refused("an id beyond the vocabulary", lambda: _trim([3, 40]), says=("in 0..39, received 40",)),
    Refused(
        "an id twice",
        lambda: _trim(torch.tensor([3, 4, 3])),
        says=("3 of which 2 differ", "name each once"),
    ),
    Refused(
        "a file that is cut",
        lambda: _open_file("ids.json", b"[1, 2"),
        says=("a JSON list of ids", "what cannot be read"),
        error=UnsupportedModelError,
    ),
    Refused(
        "a parallel draft model whose configuration names no mask",
        lambda: mmaccel.Pard(build_lm("llama")),
        says=("Pard.mask_token", "pard_token or ptd_token_id", "give mask_token="),
    ),
    Refused(
        "a mask that the draft model does not read",
        lambda: mmaccel.Pard(build_lm("llama"), mask_token=40),
        says=("Pard.mask_token", "0..39", "40"),
    ),
    Refused(
        "a canvas over layers that see the last positions alone",
        lambda: _decode(mmaccel.Jacobi(4, mmaccel.OwnCanvas(3)), build_lm("gemma3")),
        says=("entries that see each other", "the last 5 positions alone", "another source"),
        error=UnsupportedModelError,
    ),
)

CASES += (
    Refused(
        "multi-token prediction of a model without",
        lambda: _decode(mmaccel.Jacobi(4, "mtp")),
        says=("num_mtp_layers", "LlamaForCausalLM", "another source"),
    ),
    Refused(
        "multi-token prediction without its weights",
        lambda: _mtp(edit_weights(WEIGHTS, lambda w: [w.pop(k) for k in [*w] if "mtp" in k])),
        says=("weights of multi-token prediction", "copy the folder again"),
        error=UnsupportedModelError,
    ),
    Refused(
        "DFlash 2",
        lambda: _dflash(edit_config(selector_rank=256)),
        says=("DFlash 2 is not read", "selector_rank"),
        error=UnsupportedModelError,
    ),
    Refused(
        "a window wider than the block",
        lambda: _dflash(lambda folder: None, window=6),
        says=("window: expected at most 5", "received 6", "window=5"),
    ),
)
