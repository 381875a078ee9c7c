"""The trained model end to end: transformers' own `generate` against Jacobi in captured steps.

Both make whole images of `scenes` in float32, the same captions; seconds are those of the tokens.
What counts are calls after the first of their kind, which go on in its buffers and replay its
records (widths that the adaptive window first takes later are captured within them); the first
call, in which libraries are set up and passes captured, is reported separately. The figures are the
faster of the two windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.parts import CheckError
from benchmarks.route_runs import Routes, Way
from mmaccel.contracts import Policy
from mmaccel.samplers.window.jacobi import Jacobi

BATCHES = (1, 8, 64)
SCALES = (1.0, 2.0)
POLICIES: tuple[Policy | None, ...] = (None, Jacobi(32), Jacobi("adaptive"))
_REPEATS = 2  # after the first call of a kind, which is reported separately


def measure_scenes(
    device: torch.device,
    routes: Routes | None = None,
    *,
    batches: Sequence[int] = BATCHES,
    scales: Sequence[float] = SCALES,
    repeats: int = _REPEATS,
) -> dict[str, Any]:
    """Images per second of each way, as a part of the report keeps them.

    Args:
        device: where to run.
        routes: runs one batch; None: `scenes`, on the device, in captured steps.
        batches, scales: batch sizes and guidance scales; figures are of 1 and of the largest.
        repeats: timed runs of each.

    Raises:
        CheckError: something that was to be captured was not.
    """
    routes = Routes("scenes", device=device, cuda_graphs=True) if routes is None else routes
    rows = []
    for scale in scales:
        for batch in batches:
            own = [_measure(routes, policy, batch, scale, repeats) for policy in POLICIES]
            plain = own[0]["seconds"]
            rows += [row | {"speed_up": plain / row["seconds"]} for row in own]
    jacobi = [row for row in rows if row["policy"] is not None]
    eager = [row for row in jacobi if row["runner"] != "cuda graphs"]
    if eager:
        raise CheckError(f"{len(eager)} of {len(jacobi)} were not captured", {"scenes": rows})
    single = [
        max(row["speed_up"] for row in jacobi if (row["batch"], row["guidance"]) == (1, scale))
        for scale in scales
    ]
    widest = [row["images_per_s"] for row in jacobi if row["batch"] == max(batches)]
    figures = {"product": min(single), "scenes_images_per_s": max(widest)}
    return {"scenes": rows, "figures": figures}


def _measure(
    routes: Routes, policy: Policy | None, batch: int, scale: float, repeats: int
) -> dict[str, Any]:
    """One way; the first run is reported separately."""
    examples = routes.pipe.image_model.examples
    captions = [examples[n % len(examples)] for n in range(batch)]
    way = Way("library" if policy is None else "direct", policy, batch, scale)
    # each run has its own seeds, and all ways the same
    first, *pieces = [
        routes.run(way, captions, range(run * batch, (run + 1) * batch))
        for run in range(repeats + 1)
    ]
    seconds = sum(piece.seconds for piece in pieces) / (repeats * batch)
    stats = [piece.stats for piece in pieces if piece.stats is not None]
    tokens, passes = sum(s.tokens for s in stats), sum(s.row_passes for s in stats)
    return {
        "batch": batch, "guidance": scale, "policy": None if policy is None else repr(policy),
        "seconds": seconds, "images_per_s": 1 / seconds, "first_seconds": first.seconds / batch,
        "captures": [p.stats.captures for p in (first, *pieces) if p.stats is not None],
        "tokens_per_pass": tokens / passes if passes else 1.0,
        "runner": stats[-1].runner if stats else "eager",
        "reason": stats[-1].runner_reason if stats else "",
    }  # fmt: skip
