"""Trained models end to end, whole images in float32, the same captions for all.

`measure_scenes`: transformers' own `generate` on `scenes`, as it is and with a static cache and its
compiled pass, against Jacobi in captured steps. What counts are calls after the first three of
their kind, which go on in their buffers and replay their records (widths that the adaptive window
first takes later are captured within them); the first call, in which libraries are set up and
passes captured, is reported separately. The figures are the faster of the two windows. One more
call of each kind, in which the device is waited for around every step, says which share of a call
lies outside the steps.

`measure_canvas`: canvas policies on `scenes-masked` against one slot a pass. What a bitwise policy
makes has to be what its reference made, token for token; a pass of another shape may round
otherwise, and where two tokens are next to equal an image goes another way from there on, so the
share of equal images is reported and at least `LEAST` of them have to be.

Seconds are those of the tokens. Cases of a model are measured one after the other, not in turn:
each goes on in the buffers of its last call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.parts import CheckError, reason_of
from benchmarks.gpu.steps import device_clock
from mmaccel.evaluation.measure import Case, measure
from mmaccel.pipelines.hosts.runner.cuda_graphs import CudaGraphRunner
from mmaccel.pipelines.models.scenes_vocabulary import CaptionWords
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.pipelines.text_to_image.registry import find_source
from mmaccel.policies import CanvasPolicy
from mmaccel.samplers.canvas.entropy_bounded import EntropyBounded
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.masked_parallel import MaskedParallel
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.step_runner import StepRunner

Row = dict[str, Any]
BATCHES = (1, 8, 64)
SCALES = (1.0, 2.0)
LIBRARY = ("library", "library-static")  # transformers' loop, and with a static cache
WINDOWS = (Jacobi(32), Jacobi("adaptive"))
CANVASES: tuple[CanvasPolicy, ...] = (
    Stepwise(order="halton"),
    LosslessUnmask(order="halton", drafts=8),
    LosslessUnmask(order="halton", drafts=16),
    EntropyBounded(gamma=16.0),
    MaskedParallel(steps=12),
)
LEAST = 0.8  # share of equal images of a bitwise policy
_WARM = 3  # calls of a window policy until all is captured


def measure_scenes(batch: int, device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """Images per second of each way, as a part of the report keeps them; tiny: four tokens."""
    is_gpu, length = device.type == "cuda", 4 if tiny else None
    graphs: Any = is_gpu or "auto"
    pipe = TextToImage.from_pretrained("scenes", device=device, dtype="float32", cuda_graphs=graphs)
    loop = Loop(pipe, length or pipe.length)
    rows: list[Row] = []
    for scale in SCALES[:1] if tiny else SCALES:
        fixed = {"batch": batch, "guidance": scale}
        plain, static = (time_library(loop, fixed, kind, tiny) for kind in LIBRARY)
        own = [plain, static] if static["seconds"] is not None else [plain]
        own += [time_policy(pipe, policy, fixed, length, tiny) for policy in WINDOWS]
        for row in own:
            compiled = static["seconds"] and static["seconds"] / row["seconds"]
            row |= {"speed_up": plain["seconds"] / row["seconds"], "over_compiled": compiled}
            row["compiled_reason"] = static["reason"]
        rows += own
    jacobi = [row for row in rows if row["policy"] is not None]
    eager = [row for row in jacobi if row["runner"] != "cuda graphs"]
    if eager and is_gpu:
        raise CheckError(f"{len(eager)} of {len(jacobi)} were not captured", {"scenes": rows})
    return {"scenes": rows, "figures": {} if eager else scenes_figures(jacobi)}


def scenes_figures(jacobi: Sequence[Row]) -> dict[str, float]:
    """Of one image the faster window, and of the scales the worse; of many the fastest."""
    figures: dict[str, float] = {}
    single: dict[float, Row] = {}
    for row in jacobi:
        best = single.get(row["guidance"], row)
        if row["batch"] == 1 and row["speed_up"] >= best["speed_up"]:
            single[row["guidance"]] = row
    if single:
        figures["product"] = min(row["speed_up"] for row in single.values())
        figures["scenes_outside"] = max(row["outside"] for row in single.values())
        compiled = [row["over_compiled"] for row in single.values()]
        if None not in compiled:
            figures["product_compiled"] = min(compiled)
    many = [row["images_per_s"] for row in jacobi if row["batch"] == BATCHES[-1]]
    return figures | ({"scenes_images_per_s": max(many)} if many else {})


class Loop:
    """transformers' own `generate` on `scenes`, beside its pipeline."""

    def __init__(self, pipe: TextToImage, length: int) -> None:
        from transformers import AutoModelForCausalLM

        folder = find_source("scenes")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model: Any = model.to(pipe.model.device).eval()
        self.words = CaptionWords.load(folder, pipe.image_model.layout.vocab_size)
        self.pipe, self.length = pipe, length

    def generate(self, captions: Sequence[str], scale: float, static: bool) -> Tensor:
        """Tokens `[B, L]`; its draws are its own."""
        words, device = self.words, self.model.device
        ids = [words.encode(caption) for caption in captions]
        longest = max(map(len, ids))
        padded = [[words.pad] * (longest - len(row)) + row for row in ids]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
        options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
        if scale != 1:
            empty = torch.tensor([words.unconditional()] * len(ids), device=device)
            options |= {"guidance_scale": scale, "negative_prompt_ids": empty}
        made = self.model.generate(
            torch.tensor(padded, device=device),
            attention_mask=torch.tensor(mask, device=device),
            do_sample=True,
            max_new_tokens=self.length,
            top_k=0,
            suppress_tokens=list(range(words.n_image_tokens, words.vocab_size)),
            **options,
        )
        tokens: Tensor = made[:, longest:]
        return tokens


def time_library(loop: Loop, fixed: Row, kind: str, tiny: bool) -> Row:
    """A row of transformers' loop; no seconds where the compiler of its static cache fails."""
    row = fixed | {"route": kind, "policy": None, "captures": [], "tokens_per_pass": 1.0}
    row |= {"outside": None, "attention": "", "forward": "", "runner": "eager", "reason": ""}
    captions = _captions(loop.pipe, fixed["batch"])
    is_static = kind == LIBRARY[1]

    def run(seed: int) -> None:
        torch.manual_seed(seed)
        loop.generate(captions, fixed["guidance"], is_static)

    try:
        runs = _measure(run, loop.model.device, _WARM, tiny)
    except Exception as error:
        if not is_static:
            raise
        return row | {"seconds": None, "reason": reason_of(error)}
    return row | _seconds(runs, fixed["batch"])


def time_policy(
    pipe: TextToImage, policy: Jacobi, fixed: Row, length: int | None, tiny: bool
) -> Row:
    """A row of a policy; rows end after `length` tokens, None draws whole images."""
    batch, device = fixed["batch"], pipe.model.device
    captions = _captions(pipe, batch)

    def run(index: int) -> Row:
        first = (index + _WARM) * batch  # each run has its own seeds
        began = time.perf_counter()
        made = pipe(
            captions,
            policy=policy,
            seed=range(first, first + batch),
            guidance_scale=fixed["guidance"],
            on_step=None if length is None else lambda p: torch.full_like(p.lengths, length),
        )
        seconds = time.perf_counter() - began - made.stats.pixel_seconds
        return {"seconds": seconds, "stats": made.stats}

    runs = _measure(run, device, _WARM, tiny)
    stats = [own["stats"] for own in runs if own["index"] >= 0]
    with timed_steps(device) as steps:
        again = run(-_WARM)
    last = stats[-1]
    return (
        fixed
        | {"route": "direct", "policy": repr(policy)}
        | _seconds(runs, batch)
        | {
            "captures": [runs[0]["stats"].captures, *(own.captures for own in stats)],
            "tokens_per_pass": sum(s.tokens for s in stats) / sum(s.row_passes for s in stats),
            "outside": 1 - sum(steps) / again["seconds"],
            "attention": last.attention,
            "forward": last.route,
            "runner": last.runner,
            "reason": last.runner_reason,
        }
    )


def _captions(pipe: TextToImage, batch: int) -> list[str]:
    examples = pipe.image_model.examples
    return [examples[n % len(examples)] for n in range(batch)]


def _measure(
    run: Callable[[int], Row | None], device: torch.device, warm_up: int, tiny: bool
) -> list[Row]:
    """Two calls after the first ones; tiny: one after one."""
    repeats, warm_up = (1, 1) if tiny else (2, warm_up)
    return list(measure([Case("", run)], repeats, warm_up=warm_up, device=device))


def _seconds(runs: Sequence[Row], batch: int) -> Row:
    """Of an image, of all calls that count and of the first one."""
    counted = [own["seconds"] for own in runs if own["index"] >= 0]
    seconds = sum(counted) / (len(counted) * batch)
    first = runs[0]["seconds"] / batch
    return {"seconds": seconds, "images_per_s": 1 / seconds, "first_seconds": first}


@contextmanager
def timed_steps(device: torch.device) -> Iterator[list[float]]:
    """Inside the block, the seconds of every step of a run; the device is waited for around each.

    A step is a captured pass with all that is captured with it; on a CPU, a pass.
    """
    kind: Any = CudaGraphRunner if device.type == "cuda" else StepRunner
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


def measure_canvas(device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """Seconds an image of each policy, as a part of the report keeps them."""
    pipe = TextToImage.from_pretrained("scenes-masked", device=device, dtype="float32")
    policies = CANVASES[1:3] if tiny else CANVASES  # a slot a pass takes a CPU a minute
    rows = [
        row
        for batch in ((1,) if tiny else (1, 8))
        for row in time_canvases(pipe, policies, batch, tiny)
    ]
    wrong = [
        row["policy"]
        for row in rows
        if row["exactness"] == "bitwise" and row["same"] < LEAST * row["pictures"]
    ]
    if wrong:
        raise CheckError(f"other tokens than the reference's: {', '.join(wrong)}", {"canvas": rows})
    speed_up = min(row["speed_up"] for row in rows if row["policy"] == repr(policies[1]))
    return {"canvas": rows, "figures": {} if tiny else {"canvas_lossless_speed_up": speed_up}}


def time_canvases(
    pipe: TextToImage, policies: Sequence[CanvasPolicy], batch: int, tiny: bool = False
) -> list[Row]:
    """A row for each policy; the first is the reference."""
    captions = _captions(pipe, batch)
    rows: list[Row] = []
    reference: list[Tensor] = []
    for policy in policies:

        def run(index: int, policy: CanvasPolicy = policy) -> Row:
            first = (index + 1) * batch  # each run has its own seeds, and all policies the same
            made = pipe(captions, policy=policy, seed=range(first, first + batch))
            return {"seconds": made.stats.seconds, "stats": made.stats, "tokens": made.tokens}

        runs = _measure(run, pipe.model.device, 1, tiny)
        reference = reference or [own["tokens"] for own in runs]
        same = [(own["tokens"] == x).all(1).sum() for own, x in zip(runs, reference, strict=True)]
        passes = [own["stats"].row_passes for own in runs[1:]]
        row = {"batch": batch, "policy": repr(policy), "exactness": runs[0]["stats"].exactness}
        row |= {"passes": sum(passes) / (len(passes) * batch), **_seconds(runs, batch)}
        row |= {"same": int(sum(same)), "pictures": len(runs) * batch}
        row["speed_up"] = (rows[0] if rows else row)["seconds"] / row["seconds"]
        rows.append(row)
    return rows
