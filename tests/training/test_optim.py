"""Muon in float32 against `torch.optim.Muon`, and its iteration against singular values."""

from __future__ import annotations

import pytest
import torch

from scripts.training.optim import MuonFloat32, choose_device, orthogonalise

SHAPES = ((6, 4), (4, 6), (6, 4), (5, 5))
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize("shape", [(7, 3), (3, 7)])
def test_the_iteration_is_its_polynomial_on_the_singular_values(shape: tuple[int, int]) -> None:
    matrices = torch.randn(2, *shape, dtype=torch.float64, generator=torch.manual_seed(0))
    a, b, c = COEFFICIENTS
    for matrix, got in zip(matrices, orthogonalise(matrices, COEFFICIENTS, 5, 1e-7), strict=True):
        u, values, v = torch.linalg.svd(matrix, full_matrices=False)
        values = values / values.square().sum().sqrt()
        for _ in range(5):
            values = a * values + b * values**3 + c * values**5
        torch.testing.assert_close(got, u @ values.diag() @ v)


def test_steps_are_those_of_torch_but_for_its_precision() -> None:
    """Five steps move by 0.2 sqrt(6) 0.1 each; bfloat16 keeps eight bits of an update."""
    start = [torch.randn(s, generator=torch.manual_seed(k)) for k, s in enumerate(SHAPES)]
    slopes = [torch.randn(5, *s, generator=torch.manual_seed(9 + k)) for k, s in enumerate(SHAPES)]
    ends = []
    for kind in (torch.optim.Muon, MuonFloat32):
        matrices = [torch.nn.Parameter(s.clone()) for s in start]
        optimiser = kind(matrices, lr=0.1, weight_decay=0.5, adjust_lr_fn="match_rms_adamw")
        for step in range(5):
            for matrix, slope in zip(matrices, slopes, strict=True):
                matrix.grad = slope[step].clone()
            optimiser.step()
        ends.append([m.detach() for m in matrices])
    for theirs, ours, before in zip(*ends, start, strict=True):
        assert (theirs - before).abs().max() > 0.1
        torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0)


def test_state_goes_over_to_torch_and_a_matrix_without_gradient_stays() -> None:
    matrices = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(2, 2))]
    optimiser = MuonFloat32(matrices, lr=0.1, adjust_lr_fn="match_rms_adamw")
    matrices[0].grad = torch.full((3, 2), 2.0)
    optimiser.step()
    assert torch.equal(matrices[1], torch.ones(2, 2))
    other = torch.optim.Muon(matrices, lr=0.1, adjust_lr_fn="match_rms_adamw")
    other.load_state_dict(optimiser.state_dict())
    kept = other.state[matrices[0]]["momentum_buffer"]
    torch.testing.assert_close(kept, torch.full((3, 2), 2.0 * 0.05))


def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_gpu, found in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert choose_device("auto") == found
        assert choose_device("cpu") == "cpu"
