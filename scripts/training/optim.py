"""Muon in float32, and bfloat16 where it is fast: training on CPUs with and without bfloat16."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def choose_device(asked: str) -> str:
    """A device by its name; "auto" is a GPU where torch finds one."""
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_bfloat16_fast(device: torch.device | str) -> bool:
    """Whether a device computes matrices in bfloat16 itself.

    A CPU without instructions for it does so by the element: 40 times slower than in float32
    (measured on an AVX2 processor).
    """
    kind = torch.device(device).type
    return kind != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def mixed_precision(device: torch.device | str) -> torch.autocast:
    """Autocast to bfloat16 where that is fast; elsewhere nothing is cast."""
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=is_bfloat16_fast(device))


class MuonFloat32(torch.optim.Muon):
    """`torch.optim.Muon` with the same options and the same state; see there.

    It takes `adjust_lr_fn="match_rms_adamw"` only, and always uses Nesterov's momentum.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves every matrix that has a gradient by one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    shapes[matrix.shape].append(matrix)
            for matrices in shapes.values():
                self._move(group, matrices)
        return loss

    def _move(self, group: dict[str, Any], matrices: list[Tensor]) -> None:
        updates = []
        for matrix in matrices:
            slope, state = matrix.grad, self.state[matrix]
            assert slope is not None
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(slope)
            state["momentum_buffer"].lerp_(slope, 1 - group["momentum"])
            updates.append(slope.lerp(state["momentum_buffer"], group["momentum"]))
        moved = orthogonalise(
            torch.stack(updates), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        rate = group["lr"] * 0.2 * max(matrices[0].shape) ** 0.5
        for matrix, update in zip(matrices, moved, strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)


def orthogonalise(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Brings the singular values of matrices near 1 by a quintic Newton-Schulz iteration.

    Args:
        matrices: [N, R, C], float.
        coefficients: a, b, c of a x + b x^3 + c x^5.
        steps: of the iteration.
        eps: least norm that is divided by.

    Returns:
        [N, R, C], of the input's dtype.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide
