"""Trains a generator on a `Task`: `scenes`, `scenes-masked` or `grammar-masked`.

Muon (Jordan et al., 2024; Liu et al., 2025, arXiv 2502.16982, whose step-size matching is used)
moves the matrices, AdamW the rest; the step size rises, stays, and falls linearly over the last
steps. The averaged weights are the result. State is written every few minutes by renaming a
complete file, so a stopped run goes on where it was.
"""

from __future__ import annotations

import copy
import json
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from scripts.training.optim import MuonFloat32, is_bfloat16_fast, mixed_precision
from scripts.training.prefetch import Prefetcher

_PAUSE = 120  # seconds between two steps from which on they are not counted


class Task(Protocol):
    """A model to train: its weights, its batches, its loss.

    Attributes:
        options: what the log should say of it.
    """

    options: dict[str, Any]

    def build(self, start: str | None) -> Any:
        """A new model, float32; from the weights in the folder `start` where given."""
        ...

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """ids and labels [size, T] of batch `step`, the same whenever it is asked for."""
        ...

    def distinct(self, steps: int, size: int) -> int:
        """How many different examples the first `steps` batches hold."""
        ...

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        """Scalar to descend, nats."""
        ...

    def validate(self, model: Any, device: str) -> float | dict[str, float]:
        """Nats per token on examples that training never draws, or figures, `validation` first."""
        ...


@dataclass(frozen=True)
class GeneratorTraining:
    """How long and how fast; a stopped run may go on with other numbers.

    Attributes:
        steps: optimiser steps in all.
        fall: over how many last steps the step size falls to zero.
        batch: images per step.
        rate: peak step size of Muon.
        rate_rest: peak step size of AdamW.
        warmup: steps of rise.
        average: decay of the averaged weights.
        snapshots: steps at which the averaged weights are saved.
        compiled: `torch.compile` the model (needs a C compiler; a quarter faster on a CPU).
        start: folder of a trained generator to begin from, where the work folder has no state of
            its own; steps and images are counted anew, or from `begin`.
        begin: steps that `start` was trained for: counting and the data go on after them.
        mixed: bfloat16 where the device computes it; a narrow model may be faster in float32
            (twice, measured on a processor with AVX-512 and widths of 128 to 192).
        workers: processes that make batches; 0 makes them in this one.
        emphasis: how often an image with `left` or `right` in its caption comes for one other.
    """

    steps: int = 6000
    fall: int = 2000
    batch: int = 32
    rate: float = 3e-3
    rate_rest: float = 2e-3
    warmup: int = 100
    average: float = 0.998
    snapshots: tuple[int, ...] = (100, 250, 500, 1000, 2000, 3500, 5000, 8000, 11000)
    compiled: bool = False
    start: str | None = None
    begin: int = 0
    mixed: bool = True
    workers: int = 0
    emphasis: int = 1

    def share(self, step: int) -> float:
        """Step size at `step` as a share of its peak."""
        rise = (step - self.begin + 1) / self.warmup
        return max(0.0, min(1.0, rise, (self.steps - step) / max(self.fall, 1)))


def train_generator(
    work: str | Path, task: Task, plan: GeneratorTraining, device: str = "cpu"
) -> None:
    """Trains, or goes on training, in a work folder.

    Args:
        work: holds what the task reads; receives `generator.pt`, `generator.jsonl` (losses, and
            plan and task each time a run begins), `snapshots/step-N/` and `generator/`.
        task: what to train.
        plan: how.
        device: "cpu" or "cuda".
    """
    work = Path(work)
    torch.manual_seed(0)
    model = task.build(plan.start)
    model = model.to(device).train()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimisers = _optimisers(model, plan, device)
    state_file = work / "generator.pt"
    step, seconds = plan.begin, 0.0
    if state_file.exists():
        step, seconds = _resume(state_file, model, average, optimisers, device)
    if plan.compiled:  # in place, so that the names of the weights stay
        model.model.compile(dynamic=False)
    parameters, averages = list(model.parameters()), list(average.parameters())
    _note(work, {"step": step, "plan": asdict(plan), "task": task.options})
    source: Task | Prefetcher = Prefetcher(task, plan.workers) if plan.workers else task
    recent: list[float] = []
    saved = began = latest = time.time()
    while step < plan.steps:
        if time.time() - latest > _PAUSE:  # the process was suspended
            began += time.time() - latest
        latest = time.time()
        share = plan.share(step)
        for optimiser, peak in zip(optimisers, (plan.rate, plan.rate_rest), strict=True):
            optimiser.param_groups[0]["lr"] = peak * share
        ids, labels = source.batch(step, plan.batch)
        with mixed_precision(device) if plan.mixed else nullcontext():
            loss = task.loss(model, ids.to(device), labels.to(device), step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step += 1
        done = step - plan.begin
        pace = min(plan.average, done / (done + 10))
        torch._foreach_lerp_(averages, parameters, 1 - pace)
        recent.append(loss.item())
        last = step == plan.steps
        if step % 50 == 0 or last:
            line: dict[str, Any] = {
                "step": step,
                "loss": round(sum(recent) / len(recent), 4),
                "share": round(share, 4),
            }
            line |= {
                "pictures": step * plan.batch,
                "distinct": task.distinct(step, plan.batch),
            }
            line["seconds"] = round(seconds + time.time() - began, 1)
            recent.clear()
            if step % 250 == 0 or last or step in plan.snapshots:
                found = task.validate(average, device)
                figures = found if isinstance(found, dict) else {"validation": found}
                line |= {name: round(value, 4) for name, value in figures.items()}
            _note(work, line)
        if step in plan.snapshots:
            save_half(average, work / "snapshots" / f"step-{step}")
        if last or time.time() - saved > 180:
            saved = time.time()
            _save(state_file, model, average, optimisers, step, seconds + saved - began)
            save_half(average, work / "generator")
    if isinstance(source, Prefetcher):
        source.close()


def _save(
    file: Path,
    model: Any,
    average: Any,
    optimisers: list[torch.optim.Optimizer],
    step: int,
    seconds: float,
) -> None:
    """Writes all that a run needs to go on (complete or not at all)."""
    state = {
        "model": model.state_dict(),
        "average": average.state_dict(),
        "step": step,
        "optimisers": [o.state_dict() for o in optimisers],
        "seconds": seconds,
    }
    torch.save(state, file.with_suffix(".partial"))
    file.with_suffix(".partial").replace(file)


def _resume(
    file: Path,
    model: Any,
    average: Any,
    optimisers: list[torch.optim.Optimizer],
    device: str,
) -> tuple[int, float]:
    """Reads what `_save` wrote; steps and seconds so far."""
    state = torch.load(file, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    average.load_state_dict(state["average"])
    for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    return state["step"], state["seconds"]


def _note(work: Path, line: dict[str, Any]) -> None:
    with (work / "generator.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")


def save_half(model: Any, folder: Path) -> None:
    """Writes a model in float16 where `from_pretrained` finds it (complete or not at all)."""
    partial = folder.with_name(folder.name + ".partial")
    copy.deepcopy(model).half().save_pretrained(partial)
    folder.mkdir(parents=True, exist_ok=True)
    for file in partial.iterdir():
        file.replace(folder / file.name)
    partial.rmdir()


def _optimisers(model: Any, plan: GeneratorTraining, device: str) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    is_fast = torch.device(device).type == "cpu" and plan.mixed and is_bfloat16_fast(device)
    muon = torch.optim.Muon if is_fast else MuonFloat32  # a GPU takes matrices of a shape at once
    return [
        muon(matrices, lr=plan.rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=plan.rate_rest, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """Weights of a generator that `save_half` wrote, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def load_generator(folder: str | Path, device: str = "cpu") -> Any:
    """The generator saved in a folder, float32, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()
