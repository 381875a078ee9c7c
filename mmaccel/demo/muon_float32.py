"""Muon whose orthogonalisation runs in float32, for processors without bfloat16 arithmetic.

Jordan et al., 2024; Liu et al., 2025, arXiv 2502.16982. `torch.optim.Muon` casts each matrix to
bfloat16 for its Newton-Schulz iteration, which a CPU without such instructions computes by the
element: on two cores of an AVX2 processor a step of `scenes-masked`'s optimiser took 13.5 s, this
one 0.3 s, beside 3.3 s of forward and backward passes. Departure: the precision alone, and matrices
of one shape go through the iteration together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
