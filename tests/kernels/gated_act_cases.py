"""The gate of an MLP in Triton against the specification, which rounds once more in half."""

from __future__ import annotations

from functools import partial

import torch

from mmaccel.kernels import gated_act as specification
from mmaccel.kernels import gated_act_triton as triton_version
from mmaccel.kernels.gated_act import Activation
from tests.kernels.case import Case

_OFF = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def _compare(kind: Activation, device: torch.device, dtype: torch.dtype) -> None:
    """Widths around a block, and columns of a larger tensor; gates from -8 to 8."""
    for rows, width in ((1, 1), (3, 100), (2, 1024), (5, 1025)):
        generator = torch.Generator().manual_seed(width)
        whole = 2.7 * torch.randn(rows, 2 * width + 6, generator=generator)
        packed = whole.to(device, dtype)[:, 4 : 4 + 2 * width]
        assert triton_version.refuse_gated_act(packed, kind) is None
        made, expected = (v.gated_act(packed, kind) for v in (triton_version, specification))
        assert made.dtype == dtype
        torch.testing.assert_close(made, expected, atol=_OFF[dtype], rtol=_OFF[dtype])


def _refusals(device: torch.device, dtype: torch.dtype) -> None:
    packed = torch.zeros(2, 8, device=device, dtype=dtype)
    assert "float64" in (triton_version.refuse_gated_act(packed.double()) or "")
    assert "apart" in (triton_version.refuse_gated_act(packed[:, ::2]) or "")


_KINDS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
CASES = [Case(kind, partial(_compare, kind)) for kind in _KINDS]
CASES += [Case("refusals", _refusals, (torch.float32,))]
