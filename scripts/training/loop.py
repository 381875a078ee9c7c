"""The one loop that trains every model here; a model's own file has its data, network and loss.

Muon (Jordan et al., 2024; Liu et al., 2025, arXiv 2502.16982, whose step-size matching is used)
moves the matrices of layers, AdamW the rest; the step size rises, stays, and falls linearly over
the last steps. The averaged weights are the result. State is written every few minutes by renaming
a complete file, so a stopped run goes on where it was.
"""

from __future__ import annotations

import copy
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

WEIGHTS = Path(__file__).parent / "weights"
"""Models that this repository measures with, and does not ship."""

IGNORE = -100
"""The label of what is not learnt."""
_SAVED_EVERY = 180  # seconds

Batch = tuple[Any, Any]  # what a model reads, and what it is to say: both have `.to(device)`


@dataclass(frozen=True)
class Plan:
    """How long and how fast; a stopped run may go on with other numbers.

    Attributes:
        fall: over how many last steps the step size falls to zero.
        average: decay of the averaged weights; 0 keeps the last ones.
        mixed: bfloat16 where the device computes it; a narrow model may be faster in float32
            (twice, measured on a processor with AVX-512 and widths of 128 to 192).
        workers: processes that make batches; 0 makes them in this one.
        keeps_best: the result is the average of the lowest loss on `Task.checks` so far: for data
            so few that they are soon learned by heart.
    """

    steps: int
    fall: int
    batch: int
    rate: float = 3e-3
    rate_rest: float = 2e-3
    warmup: int = 100
    average: float = 0.998
    mixed: bool = False
    workers: int = 0
    keeps_best: bool = False

    def share(self, step: int) -> float:
        """Step size at `step` as a share of its peak."""
        left = (self.steps - step) / max(self.fall, 1)
        return max(0.0, min(1.0, (step + 1) / self.warmup, left))


class Task:
    """A model to train.

    Attributes:
        checks: batches that training never draws, for `validate`.
        matrices: found in the names of the matrices that Muon moves.
    """

    checks: Sequence[Batch] = ()
    matrices: re.Pattern[str] = re.compile(r"\b(layers|blocks)\.\d+\.")

    def build(self, before: Path | None) -> Any:
        """A new model, float32; `before` is the folder of the stage before, if any."""
        raise NotImplementedError

    def batch(self, step: int, size: int) -> Batch:
        """Batch `step` of `size` items, the same whenever it is asked for."""
        raise NotImplementedError

    def loss(self, model: Any, ids: Any, labels: Any, step: int) -> Tensor:
        """Scalar to descend: of a causal LM, the mean cross-entropy of labels, in nats."""
        return cross_entropy(*label_logits(model, ids, labels))

    def validate(self, model: Any, device: str) -> dict[str, float]:
        """Figures on `checks`: the mean loss over what is learnt, and others."""
        total = count = 0.0
        for step, (ids, labels) in enumerate(self.checks):
            n = int((labels != IGNORE).sum())
            total += n * float(self.loss(model, ids.to(device), labels.to(device), step))
            count += n
        return {"validation": total / count}

    def save(self, model: Any, folder: Path) -> None:
        """Writes a model of transformers in float16 where `from_pretrained` finds it."""
        copy.deepcopy(model).half().save_pretrained(folder)


def train(
    work: Path, task: Task, plan: Plan, device: str = "cpu", before: Path | None = None
) -> None:
    """Trains, or goes on training, in a work folder, which receives `state.pt`, `log.jsonl`
    (losses, and the plan each time a run begins) and the model in `weights/`.
    """
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = task.build(before).to(device).train()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimisers = _make_optimisers(model, plan, task.matrices)
    parts: dict[str, Any] = {"model": model, "average": average}
    parts |= {f"optimiser {k}": each for k, each in enumerate(optimisers)}
    step, seconds, lowest = 0, 0.0, math.inf
    file = work / "state.pt"
    if file.exists():
        state = torch.load(file, map_location=device, weights_only=True)
        step, seconds, lowest = state["step"], state["seconds"], state.get("lowest", lowest)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    _note(work, {"step": step, "plan": asdict(plan)})
    recent: list[float] = []
    saved = began = time.time()
    for ids, labels in _batches(task, plan, step):
        for optimiser, peak in zip(optimisers, (plan.rate_rest, plan.rate), strict=False):
            optimiser.param_groups[0]["lr"] = peak * plan.share(step)
        with mixed_precision(device, plan.mixed):
            loss = task.loss(model, ids.to(device), labels.to(device), step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step += 1
        pace = min(plan.average, step / (step + 10)) if plan.average else 0.0
        torch._foreach_lerp_([*average.parameters()], [*model.parameters()], 1 - pace)
        for kept, buffer in zip(average.buffers(), model.buffers(), strict=True):
            kept.copy_(buffer)
        recent.append(loss.item())
        is_last = step == plan.steps
        if step % 50 == 0 or is_last:
            line = {"step": step, "loss": sum(recent) / len(recent)}
            line["seconds"] = seconds + time.time() - began
            recent.clear()
            if step % 250 == 0 or is_last:
                with torch.no_grad(), mixed_precision(device, plan.mixed):
                    line |= task.validate(average, device)
                if plan.keeps_best and line["validation"] < lowest:
                    lowest = line["validation"]
                    task.save(average, work / "weights")
            _note(work, {name: round(value, 4) for name, value in line.items()})
        if is_last or time.time() - saved > _SAVED_EVERY:
            saved = time.time()
            state = {name: part.state_dict() for name, part in parts.items()}
            state |= {"step": step, "seconds": seconds + saved - began, "lowest": lowest}
            torch.save(state, file.with_suffix(".partial"))
            file.with_suffix(".partial").replace(file)
            if not plan.keeps_best:
                task.save(average, work / "weights")


def _batches(task: Task, plan: Plan, first: int) -> Iterable[Batch]:
    """The batches from a step on, made by processes where the plan has some."""
    steps = range(first, plan.steps)
    if not plan.workers:
        return (task.batch(step, plan.batch) for step in steps)
    maker: Any = _Maker(task, plan.batch)
    return DataLoader(maker, batch_size=None, sampler=steps, num_workers=plan.workers)


@dataclass(frozen=True)
class _Maker:
    task: Task
    size: int

    def __getitem__(self, step: int) -> Batch:
        return self.task.batch(step, self.size)


def _note(work: Path, line: dict[str, Any]) -> None:
    with (work / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")


def _make_optimisers(
    model: nn.Module, plan: Plan, named: re.Pattern[str]
) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon where a model has matrices of these names."""
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {name: p for name, p in own.items() if p.ndim == 2 and named.search(name)}
    rest = [p for name, p in own.items() if name not in matrices]
    adam = torch.optim.AdamW(rest, plan.rate_rest, betas=(0.9, 0.98), weight_decay=0.01)
    if not matrices:
        return [adam]
    return [adam, Muon(matrices.values(), plan.rate, 0.05, adjust_lr_fn="match_rms_adamw")]


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` in float32, with Nesterov's momentum and all matrices of a shape at once:
    where a CPU has no instructions for bfloat16, its own is 40 times slower (measured on AVX2).

    It takes `adjust_lr_fn="match_rms_adamw"` only.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves every matrix that has a gradient by one step."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    shapes[matrix.shape].append(matrix)
            for shape, matrices in shapes.items():
                updates = []
                for matrix in matrices:
                    assert matrix.grad is not None
                    momentum = self.state[matrix].setdefault(
                        "momentum_buffer", torch.zeros_like(matrix)
                    )
                    momentum.lerp_(matrix.grad, 1 - group["momentum"])
                    updates.append(matrix.grad.lerp(momentum, group["momentum"]))
                moved = orthogonalise(torch.stack(updates), group["ns_coefficients"])
                rate = group["lr"] * 0.2 * max(shape) ** 0.5
                for matrix, update in zip(matrices, moved, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)


def orthogonalise(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int = 5
) -> Tensor:
    """Matrices [N, R, C] whose singular values are brought near 1 by the quintic Newton-Schulz
    iteration a x + b x^3 + c x^5.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide


def mixed_precision(device: str, wanted: bool = True) -> torch.autocast:
    """Autocast to bfloat16, where it is wanted and the device computes matrices in it."""
    kind = torch.device(device).type
    is_fast = kind != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.autocast(kind, torch.bfloat16, enabled=wanted and is_fast)


def build_llama(**sizes: Any) -> Any:
    """A new `LlamaForCausalLM` with random weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes))


def label_logits(
    model: Any, ids: Tensor, labels: Tensor, **inputs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logits [N, V] float32 and labels [N] of what is learnt, for ids and labels [B, T].

    Rows are padded on the right: causal attention never reaches the padding.
    """
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False, **inputs).last_hidden_state
    target = labels[:, 1:]
    chosen = target != IGNORE
    return model.lm_head(hidden[chosen]).float(), target[chosen]


def pack(rows: Iterable[Sequence[tuple[Sequence[int], bool]]], pad: int) -> Batch:
    """Rows of parts, each of ids and whether they are learnt, to ids and labels [B, T] int64."""
    ids, labels = [], []
    for parts in rows:
        ids.append(torch.tensor([k for part, _ in parts for k in part]))
        said = [k if is_learnt else IGNORE for part, is_learnt in parts for k in part]
        labels.append(torch.tensor(said))
    return pad_sequence(ids, True, pad), pad_sequence(labels, True, IGNORE)


def read_log(work: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work / "log.jsonl").read_text("utf-8").splitlines()]
