"""Any default device of torch: every tensor is created where the model is.

Under `torch.device("meta")` a tensor that is created without a device has no values, so that its
first use fails or gives other tokens. Where libraries create such tensors themselves, in processors
that return them, only those that our own sources create go to that device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import mmaccel
from tests.attach.test_families import ROWS
from tests.fixtures import amused, diffusion_gemma, llada2, windows
from tests.fixtures.checkpoints import FAMILIES, SIZES, captions
from tests.fixtures.denoiser_targets import LENGTH, PADDED, TARGETS
from tests.fixtures.media import MEDIA, MediaCase, build_media, content, open_media
from tests.fixtures.tiny_lms import build_lm, left_padded
from tests.fixtures.tiny_model import CAPTIONS, masked_beside_plain
from tests.models.test_janus import IMAGE

THEIRS = ("llada2", "gemma", "amused", "janus", "emu3", "glm-image")  # call such processors
Call = Callable[[], Tensor]
SAMPLED: dict[str, Any] = dict(do_sample=True, top_k=9)


class OwnOnMeta(TorchFunctionMode):
    """The default device "meta", for tensors that our own sources create."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func in _device_constructors() and options.get("device") is None:
            if sys._getframe(1).f_globals["__name__"].startswith("mmaccel."):
                options = options | {"device": "meta"}
        return func(*args, **options)


def _attached(target: Any, policy: Any, call: Call, **options: Any) -> Call:
    """A call with a policy attached inside it, so that the self-check runs there too."""

    def run() -> Tensor:
        with mmaccel.attach(target, policy, seed=3, strict=True, **options):
            return call()

    return run


def _language(policy: Any) -> Call:
    model, given = build_lm("gemma3"), left_padded([[5, 6, 7, 8], [9, 10]])
    options = SAMPLED | {"repetition_penalty": 1.2, "max_new_tokens": 9}
    return _attached(model, policy, lambda: model.generate(**given, **options))


def _images(name: str) -> Call:
    model, given = windows.build_model(name), windows.prompts(name, ROWS)
    length = windows.LENGTHS[name]
    return _attached(
        model, "jacobi", lambda: model.generate(**given, **SAMPLED, max_new_tokens=length)
    )


def _janus() -> Call:
    model, given = windows.build_janus(), windows.janus_prompts(ROWS)
    return _attached(model, "jacobi", lambda: model.generate(**given, **(IMAGE | SAMPLED)))


def _denoiser(name: str) -> Call:
    target = TARGETS[name]()
    policy = mmaccel.LosslessUnmask(4, order="halton")
    return _attached(
        target, policy, lambda: target.generate(**PADDED, max_new_tokens=LENGTH, temperature=1.0)
    )


def _llada2() -> Call:
    pipe = llada2.build_pipe("blocks")
    options: dict[str, Any] = dict(
        prompt=["hello", "a b"], gen_length=16, block_length=8, output_type="seq",
        num_inference_steps=8, temperature=1.0, eos_early_stop=False,
    )  # fmt: skip
    policy = mmaccel.LosslessUnmask(cache="block")
    return _attached(pipe, policy, lambda: pipe(**options).sequences)


def _gemma() -> Call:
    pipe = diffusion_gemma.build_pipe()
    given: dict[str, Any] = dict(prompt=["abc", "x"], gen_length=12, output_type="seq")
    return _attached(pipe, mmaccel.EntropyBounded(0.1), lambda: pipe(**given).sequences)


def _amused() -> Call:
    pipe = amused.build_pipe()
    given: dict[str, Any] = dict(guidance_scale=3.0, output_type="latent")
    return _attached(pipe, mmaccel.LosslessUnmask(4), lambda: pipe(["abc", "x"], **given).images)


ATTACHED: dict[str, Callable[[], Call]] = {
    **{repr(p): lambda p=p: _language(p) for p in (mmaccel.Jacobi(4), mmaccel.Speculative(3),
       mmaccel.SpeculativeJacobi(4), mmaccel.GroupedSpeculative())},
    **{name: lambda name=name: _images(name) for name in windows.FAMILIES},
    **{name: lambda name=name: _denoiser(name) for name in TARGETS},
    "janus": _janus, "llada2": _llada2, "gemma": _gemma, "amused": _amused,
}  # fmt: skip


def _is_same(name: str, call: Call) -> bool:
    """Whether a call gives the same tokens under another default device."""
    plain = call()
    with OwnOnMeta() if name in THEIRS else torch.device("meta"):
        made = call()
    return made.device.type == "cpu" and torch.equal(made, plain)


@pytest.mark.parametrize("name", ATTACHED)
def test_attached_models(name: str) -> None:
    assert _is_same(name, ATTACHED[name]())


@pytest.mark.parametrize("family", FAMILIES)
def test_image_families(family: str, built: Callable[[str], Path]) -> None:
    pipe = mmaccel.TextToImage.from_pretrained(built(family), size=SIZES.get(family))
    assert _is_same(family, lambda: pipe(captions(family)[0], seed=0).tokens)


def test_the_demos_own_models(tmp_path: Path) -> None:
    for folder in masked_beside_plain(tmp_path):
        pipe = mmaccel.TextToImage.from_pretrained(folder)
        assert _is_same(folder.name, lambda: pipe(CAPTIONS, guidance_scale=2.0, seed=0).tokens)  # noqa: B023


@pytest.mark.parametrize("kind", MEDIA)
def test_speech_and_video(kind: str, tmp_path: Path) -> None:
    folders = build_media(kind, tmp_path)
    case = MediaCase(kind, folders, open_media(kind, folders))
    assert _is_same(
        kind, lambda: content(case.call(seed=[0, 1])[0] if case.speaks else case.call()[0])
    )


def test_a_call_without_a_seed_draws_one_on_the_cpu() -> None:
    model, given = build_lm("llama"), left_padded([[5, 6, 7, 8], [9, 10]])
    options = SAMPLED | {"max_new_tokens": 9}

    def call() -> Tensor:
        torch.manual_seed(5)
        with mmaccel.attach(model, mmaccel.Jacobi(4), strict=True):
            return model.generate(**given, **options)

    assert _is_same("llama", call)
