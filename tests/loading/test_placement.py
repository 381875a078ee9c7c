"""Where a model runs and in which format: "auto", names of dtypes, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmaccel.pipelines.hosts.loading.placement import choose_device, choose_dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("FP32", torch.float32),
        ("torch.bfloat16", torch.bfloat16),
        ("double", torch.float64),
        (torch.float16, torch.float16),
        ("auto", torch.float32),
    ],
)
def test_names_of_dtypes(name: Any, dtype: torch.dtype) -> None:
    assert choose_dtype(name, "cpu") == dtype


@pytest.mark.parametrize(
    ("there", "device"),
    [(("cuda", "mps"), "cuda"), (("mps", "xpu"), "mps"), (("xpu",), "xpu"), ((), "cpu")],
)
def test_auto_is_the_first_device_there(
    there: tuple[str, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cuda", "mps", "xpu"):
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda n=name: n in there)
    assert choose_device() == device


@pytest.mark.parametrize(
    ("capability", "dtype"), [((8, 0), torch.bfloat16), ((7, 5), torch.float16)]
)
def test_auto_is_bfloat16_where_a_gpu_computes_it(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_dtype("auto", "cuda") == dtype
    assert choose_dtype("fp32", "cuda") == torch.float32
