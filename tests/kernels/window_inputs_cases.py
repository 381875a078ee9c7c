"""A window's inputs in Triton: the specification's drafts, tokens, positions and token buffer."""

from __future__ import annotations

from functools import partial

import torch

from mmaccel.kernels import window_inputs as specification
from mmaccel.kernels import window_inputs_triton as triton_version
from tests.kernels.case import Case

_ORIGIN = 3


def _compare(
    batch: int, branches: int, width: int, proposes: bool, forces: bool,
    device: torch.device, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Rows that have no token yet, some, and more predictions than the window is wide."""
    generator = torch.Generator().manual_seed(width)

    def draw(*shape: int, most: int = 100) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator)

    n_generated = draw(batch, most=9)
    n_generated[0] = 0
    wide = draw(batch, _ORIGIN + 9 + width + 5)
    filled = _ORIGIN + n_generated + draw(batch, most=width + 2)
    rows = batch * branches
    proposed = draw(batch, width - 1) if proposes else None
    forced = draw(batch, width - 1, most=3) - 1 if forces else None
    last, lengths = draw(rows, 1), 1 + draw(rows, most=7)
    made = []
    for version in (triton_version, specification):
        buffer = wide.clone().to(device)[:, 1:]  # rows further apart than they are long
        given = [
            None if value is None else value.to(device)
            for value in (n_generated, filled, last, lengths, proposed, forced)
        ]
        options = {"origin": _ORIGIN, "width": width}
        assert triton_version.refuse_window_inputs(buffer, *given, **options) is None
        made.append((buffer, *version.window_inputs(buffer, *given, **options)))
    for received, wanted in zip(*made):
        assert (received is None) == (wanted is None)
        assert received is None or torch.equal(received, wanted)
    assert proposes == (made[1][1] is not None)


_ONCE = (torch.float32,)  # nothing here is a float
CASES = [
    Case(
        f"{b} rows of {g} branches, {w} slots{', drafts' * p}{', forced' * f}",
        partial(_compare, b, g, w, p, f),
        _ONCE,
    )
    for b, g in ((1, 1), (3, 2))
    for w, p, f in ((1, False, False), (1, True, False), (5, False, False), (32, True, False),
                    (33, True, True))
]  # fmt: skip
