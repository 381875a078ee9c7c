"""The trained model end to end: transformers' own `generate`, as it is and with a static cache and
its compiled pass, against Jacobi in captured steps.

All make whole images of `scenes` in float32, the same captions; seconds are those of the tokens.
What counts are calls after the first three of their kind, which go on in their buffers and replay
their records (widths that the adaptive window first takes later are captured within them); the
first call, in which libraries are set up and passes captured, is reported separately. The figures
are the faster of the two windows. One more call of each kind, in which the device is waited for
around every step, says which share of a call lies outside the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.parts import CheckError
from benchmarks.gpu.steps import device_clock
from benchmarks.route_runs import Routes, Way
from mmaccel.contracts import Policy
from mmaccel.kernels.device_errors import is_device_error
from mmaccel.pipelines.runner.cuda_graphs import CudaGraphRunner
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.step_runner import EagerRunner

BATCHES = (1, 8, 64)
SCALES = (1.0, 2.0)
POLICIES: tuple[Policy | None, ...] = (None, Jacobi(32), Jacobi("adaptive"))
STATIC = "library-static"  # the route of `benchmarks.route_runs` with a static cache
_WARM = 3  # calls of a kind until all is captured
_REPEATS = 2  # calls after those


def measure_scenes(
    device: torch.device,
    routes: Routes | None = None,
    *,
    batches: Sequence[int] = BATCHES,
    scales: Sequence[float] = SCALES,
    repeats: int = _REPEATS,
    needs_graphs: bool = True,
) -> dict[str, Any]:
    """Images per second of each way, as a part of the report keeps them.

    Args:
        device: where to run.
        routes: runs one batch; None: `scenes`, on the device, in captured steps.
        batches, scales: batch sizes and guidance scales; figures are of 1 and of the largest in
            `BATCHES`.
        repeats: timed runs of each.
        needs_graphs: whether eager passes are a failure; otherwise they fill no figure.

    Raises:
        CheckError: something that was to be captured was not.
    """
    routes = Routes("scenes", device=device, cuda_graphs=True) if routes is None else routes
    rows = []
    for scale in scales:
        for batch in batches:
            own = [_measure(routes, policy, batch, scale, repeats, device) for policy in POLICIES]
            plain, compiled = (
                own[0]["seconds"],
                _measure_static(routes, batch, scale, repeats, device),
            )
            if compiled["seconds"] is not None:
                own.insert(1, compiled)
            rows += [
                row
                | {
                    "speed_up": plain / row["seconds"],
                    "over_compiled": compiled["seconds"] and compiled["seconds"] / row["seconds"],
                    "compiled_reason": compiled["reason"],
                }
                for row in own
            ]
    jacobi = [row for row in rows if row["policy"] is not None]
    eager = [row for row in jacobi if row["runner"] != "cuda graphs"]
    if eager and needs_graphs:
        raise CheckError(f"{len(eager)} of {len(jacobi)} were not captured", {"scenes": rows})
    return {"scenes": rows, "figures": {} if eager else _find_figures(jacobi, scales, batches)}


def _find_figures(
    jacobi: list[dict[str, Any]], scales: Sequence[float], batches: Sequence[int]
) -> dict[str, float]:
    """Of one image the faster window, and of the scales the worse; of many the fastest."""
    figures = {}
    if 1 in batches:
        single = [
            max(
                (row for row in jacobi if (row["batch"], row["guidance"]) == (1, scale)),
                key=lambda row: row["speed_up"],
            )
            for scale in scales
        ]
        figures["product"] = min(row["speed_up"] for row in single)
        figures["scenes_outside"] = max(row["outside"] for row in single)
        if all(row["over_compiled"] is not None for row in single):
            figures["product_compiled"] = min(row["over_compiled"] for row in single)
    many = [row["images_per_s"] for row in jacobi if row["batch"] == BATCHES[-1]]
    return figures | ({"scenes_images_per_s": max(many)} if many else {})


def _measure_static(
    routes: Routes, batch: int, scale: float, repeats: int, device: torch.device
) -> dict[str, Any]:
    """transformers' loop with a static cache and its compiled pass; no seconds where it fails."""
    try:
        return _measure(routes, None, batch, scale, repeats, device, STATIC)
    except Exception as error:  # whatever its compiler raises; the rows say so
        if is_device_error(error):
            raise
        said = " ".join(str(error).split())[:200]
        return {"seconds": None, "reason": f"{type(error).__name__}: {said}"}


@contextmanager
def timed_steps(device: torch.device) -> Iterator[list[float]]:
    """Inside the block, the seconds of every step of a run; the device is waited for around each.

    A step is a captured pass with all that is captured with it; on a CPU, a pass.
    """
    kind: Any = CudaGraphRunner if device.type == "cuda" else EagerRunner
    own, clock = kind.run_step, device_clock(device)
    seconds: list[float] = []

    def run_step(self: Any, key: Hashable | None, step: Callable[[], None]) -> bool:
        began = clock()
        done: bool = own(self, key, step)
        seconds.append(clock() - began)
        return done

    kind.run_step = run_step
    try:
        yield seconds
    finally:
        kind.run_step = own


def _measure(
    routes: Routes,
    policy: Policy | None,
    batch: int,
    scale: float,
    repeats: int,
    device: torch.device,
    library: str = "library",
) -> dict[str, Any]:
    """One way; the first run is reported separately, the other two that capture are left out."""
    examples = routes.pipe.image_model.examples
    captions = [examples[n % len(examples)] for n in range(batch)]
    way = Way(library if policy is None else "direct", policy, batch, scale)
    # each run has its own seeds, and all ways the same
    made = [
        routes.run(way, captions, range(run * batch, (run + 1) * batch))
        for run in range(_WARM + repeats)
    ]
    first, pieces = made[0], made[_WARM:]
    seconds = sum(piece.seconds for piece in pieces) / (repeats * batch)
    stats = [piece.stats for piece in pieces if piece.stats is not None]
    tokens, passes = sum(s.tokens for s in stats), sum(s.row_passes for s in stats)
    outside = None
    if policy is not None:
        with timed_steps(device) as steps:
            piece = routes.run(way, captions, range(batch))
        outside = 1 - sum(steps) / piece.seconds
    return {
        "batch": batch,
        "guidance": scale,
        "route": way.route,
        "policy": None if policy is None else repr(policy),
        "seconds": seconds,
        "images_per_s": 1 / seconds,
        "first_seconds": first.seconds / batch,
        "captures": [p.stats.captures for p in (first, *pieces) if p.stats is not None],
        "tokens_per_pass": tokens / passes if passes else 1.0,
        "outside": outside,
        "attention": stats[-1].attention if stats else "",
        "forward": stats[-1].route if stats else "",
        "runner": stats[-1].runner if stats else "eager",
        "reason": stats[-1].runner_reason if stats else "",
    }
