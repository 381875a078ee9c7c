"""Models spread over memories and devices by accelerate make their own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.pipelines.hosts.transformers_release import CACHE
from tests.fixtures.fake_device import DEVICE, FakeTensor, fake_device
from tests.fixtures.their_weights import (
    LENGTH,
    PROMPTS,
    WIDE,
    check_own_tokens,
    decode,
    load,
)
from tests.fixtures.tiny_lms import build_lm

pytest.importorskip("accelerate")
_PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")


def _map(*on_disk: str) -> dict[str, str]:
    parts = (*_PARTS, "model.rotary_emb")
    return {part: "disk" if part in on_disk else "cpu" for part in parts}


@pytest.mark.slow
@pytest.mark.parametrize(
    "device_map",
    [
        _map("model.embed_tokens", "model.layers.0", "lm_head"),  # model.device is "meta"
        {"": "disk"},
    ],
    ids=["first half", "everything"],
)
def test_weights_on_a_disk(tmp_path: Path, device_map: dict[str, str]) -> None:
    model = load(tmp_path, device_map=device_map, offload_folder=tmp_path / "offload")
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    check_own_tokens(model)
    plain = load(tmp_path).generate(**PROMPTS, **LENGTH, do_sample=False)
    assert decode(model, mmaccel.Jacobi(8), do_sample=False)[0].equal(plain)
    _, stats = decode(model, mmaccel.Jacobi(8, drafts="online"), do_sample=True)
    assert stats.passes <= 14


@pytest.mark.parametrize("second", [_PARTS[2:4], _PARTS[1:2]], ids=str)
def test_two_devices(second: tuple[str, ...]) -> None:
    """Some parts on a fake device: each layer's keys and values lie where its layer is."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    expected = decode(build_lm("llama", **WIDE), mmaccel.Jacobi(8), do_sample=True)[0]
    found: dict[int, set[bool]] = {}
    with fake_device() as device:
        model = build_lm("llama", **WIDE)
        cpu = torch.device("cpu")
        for name in (*_PARTS, "model.rotary_emb"):
            part, where = model.get_submodule(name), device if name in second else cpu
            part.to(where)
            hook = AlignDevicesHook(skip_keys=CACHE)
            add_hook_to_module(part, hook)
            hook.execution_device = where  # told before, it looks for the device's driver
        add_hook_to_module(model, AlignDevicesHook(cpu, io_same_device=True, skip_keys=CACHE))
        model.hf_device_map = {n: str(DEVICE) if n in second else "cpu" for n in _PARTS}

        def note(module: Any, given: Any, options: dict[str, Any], out: Any) -> None:
            for number, layer in enumerate(getattr(options.get(CACHE), "layers", ())):
                if layer.keys is not None:
                    found.setdefault(number, set()).add(isinstance(layer.keys, FakeTensor))

        model.model.register_forward_hook(note, with_kwargs=True)
        assert mmaccel.supports(model)
        made, stats = decode(model, mmaccel.Jacobi(8), do_sample=True)
    assert Tensor.equal(made, expected) and stats.exactness == "bitwise"
    assert found == {n: {f"model.layers.{n}" in second} for n in (0, 1)}
