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
from tests.fixtures.toy_models import ToyLanguage, make_prompt
from tests.messages.case import Refused
from tests.messages.eagle import edit_config
from tests.window.test_eagle import make_head

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


def _head_of(ids: tuple[int, ...]) -> None:
    model = build_lm("llama")
    with TemporaryDirectory() as folder:
        head = make_head(model, Path(folder), third=True, n_ids=3)
        _decode(mmaccel.Jacobi(4, mmaccel.Eagle(str(head), ids=ids)), model)


def _mtp(spoil: Callable[[Path], object]) -> None:
    from tests.fixtures.mtp import open_mtp_model, save_mtp

    with TemporaryDirectory() as name:
        folder = save_mtp(Path(name))
        spoil(folder)
        _decode(mmaccel.Jacobi(4, "mtp"), open_mtp_model(folder))


def _mtp_of_no_folder() -> None:
    from transformers import MellumForCausalLM

    from tests.fixtures.mtp import build_config

    _decode(mmaccel.Jacobi(4, "mtp"), MellumForCausalLM(build_config()).eval())


def _dflash(spoil: Callable[[Path], object], window: int | str = 4) -> None:
    from tests.window.test_dflash import build_target, save_draft

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
    Refused("ids that are a number", lambda: _trim(7), says=("ids: expected a list", "7")),
    Refused("no ids", lambda: _trim([]), says=("ids: expected a list", "frequent_ids")),
    Refused("ids that are no integers", lambda: _trim([0.5, 1]), says=("expected a list", "0.5")),
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
        "a map of another draft model",
        lambda: mmaccel.share_ids(build_lm("llama"), 50, [1, 2, 3]),
        says=("the draft model's 40 ids, received 3",),
    ),
    Refused(
        "an unknown id that the draft model lacks",
        lambda: mmaccel.share_ids(build_lm("llama"), 50, unknown=40),
        says=("unknown", "0..39", "40"),
    ),
    Refused(
        "more ids than texts have",
        lambda: mmaccel.frequent_ids([[1, 2], [2]], 3),
        says=("at most 2", "received 3", "give more texts"),
    ),
    Refused(
        "a parallel draft model that is none",
        lambda: mmaccel.Pard("small"),  # type: ignore[arg-type]
        says=("Pard.model", "causal LM", "small"),
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
        "a parallel draft model with another vocabulary",
        lambda: _decode(
            mmaccel.Jacobi(4, mmaccel.Pard(build_lm("llama", vocab_size=39), mask_token=3))
        ),
        says=("expected a vocabulary of 40, received 39", "mmaccel.share_ids"),
    ),
    Refused(
        "a tree of parallel drafts",
        lambda: mmaccel.Speculative(
            8, drafts=mmaccel.Pard(build_lm("llama"), mask_token=3), tree=mmaccel.Comb(2, 3)
        ),
        says=("tree", "Pard"),
    ),
    Refused("a mask below 0", lambda: mmaccel.OwnCanvas(-1), says=("OwnCanvas.mask_token", "-1")),
    Refused("a shift of two", lambda: mmaccel.OwnCanvas(3, 2), says=("OwnCanvas.shift", "2")),
    Refused(
        "a mask that the model does not read",
        lambda: _decode(mmaccel.Jacobi(4, mmaccel.OwnCanvas(40))),
        says=("a mask token in 0..39", "mask_token=40"),
    ),
    Refused(
        "a canvas over layers that see the last positions alone",
        lambda: _decode(mmaccel.Jacobi(4, mmaccel.OwnCanvas(3)), build_lm("gemma3")),
        says=("entries can see each other", "the last 5 positions alone", "another source"),
    ),
    Refused(
        "a canvas of a model without layers",
        lambda: mmaccel.Jacobi(4, mmaccel.OwnCanvas(3)).sample(
            ToyLanguage(5), make_prompt([[1]]), 4, params=SamplingParams(), noise=_NOISE
        ),
        says=("entries can see each other", "not cache and attend by functions of mmaccel"),
    ),
    Refused(
        "ids that a head does not score",
        lambda: _head_of(tuple({*range(40)} - {*_scored()})),
        says=("Eagle.ids", "that the head scores"),
    ),
)

CASES += (
    Refused(
        "multi-token prediction of a model without",
        lambda: _decode(mmaccel.Jacobi(4, "mtp")),
        says=("num_mtp_layers", "LlamaForCausalLM", "another source"),
    ),
    Refused(
        "multi-token prediction of a model from no folder",
        _mtp_of_no_folder,
        says=("from a checkpoint", "MellumForCausalLM", "from_pretrained"),
    ),
    Refused(
        "multi-token prediction without its weights",
        lambda: _mtp(edit_weights(WEIGHTS, lambda w: [w.pop(k) for k in [*w] if "mtp" in k])),
        says=("weights of multi-token prediction", "copy the folder again"),
        error=UnsupportedModelError,
    ),
    Refused(
        "multi-token prediction that lacks a tensor",
        lambda: _mtp(edit_weights(WEIGHTS, lambda w: w.pop("mtp.fc.weight"))),
        says=("weights of multi-token prediction", "copy the folder again"),
        error=UnsupportedModelError,
    ),
    Refused(
        "multi-token prediction over a toy",
        lambda: mmaccel.Jacobi(4, "mtp").sample(
            ToyLanguage(5), make_prompt([[1]]), 4, params=SamplingParams(), noise=_NOISE
        ),
        says=("hands out its hidden states", "ToyLanguage"),
    ),
    Refused(
        "no folder of DFlash",
        lambda: mmaccel.DFlash(3),
        says=("DFlash.folder", "received 3", "the folder of a network"),
    ),  # type: ignore[arg-type]
    Refused(
        "DFlash of another width",
        lambda: _dflash(edit_config(hidden_size=48)),
        says=("of width 32 with a mask among 40", "of width 48 with mask 39"),
    ),
    Refused(
        "DFlash with a mask beyond the vocabulary",
        lambda: _dflash(edit_config(dflash_config={"mask_token_id": 40, "target_layer_ids": [0]})),
        says=("a mask among 40 tokens", "with mask 40"),
    ),
    Refused(
        "DFlash over a layer that is not there",
        lambda: _dflash(edit_config(dflash_config={"mask_token_id": 1, "target_layer_ids": [2]})),
        says=("target_layer_ids in 0..1", "(2,)"),
    ),
    Refused(
        "DFlash 2",
        lambda: _dflash(edit_config(selector_rank=256)),
        says=("DFlash 2 is not read", "selector_rank"),
        error=UnsupportedModelError,
    ),
    Refused(
        "DFlash with stretched positions",
        lambda: _dflash(edit_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4})),
        says=("a DFlash network", "rope_type"),
        error=UnsupportedModelError,
    ),
    Refused(
        "DFlash with layers that slide nowhere",
        lambda: _dflash(edit_config(layer_types=["sliding_attention"] * 2, sliding_window=None)),
        says=("layer_types of 2 layers and a sliding_window", "None"),
        error=UnsupportedModelError,
    ),
    Refused(
        "a window wider than the block",
        lambda: _dflash(lambda folder: None, window=6),
        says=("window: expected at most 5", "received 6", "window=5"),
    ),
    Refused(
        "a window of no fixed width over a block",
        lambda: _dflash(lambda folder: None, window="adaptive"),
        says=("window: expected at most 5", "adaptive"),
    ),
)


def _scored() -> list[int]:
    """Ids that the head of `_head_of` scores."""
    from safetensors.torch import load_file

    with TemporaryDirectory() as folder:
        head = make_head(build_lm("llama"), Path(folder), third=True, n_ids=3)
        found: list[int] = (load_file(head / "model.safetensors")["d2t"] + torch.arange(3)).tolist()
        return found
