"""Runs every row of docs/compatibility.md and writes what happened.

    python -m tests.compatibility.measure --json benchmarks/results/compatibility.json
    python scripts/update_docs.py

Each column is a run of the row's tiny model, on a CPU. "yes", the policy's name or a list of
methods means that the policy made the tokens of the plain loop; other cells are the first line of
an error, or a reason. CUDA graphs are emulated (`tests/fixtures/graph_replay.py`), int8 weights are
torchao's, adapters are peft's.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import mmaccel
from benchmarks.rows import write_report
from mmaccel.catalog import REDUCERS, make
from mmaccel.pipelines.hosts.runner import engine
from mmaccel.pipelines.hosts.runner.engine import Engine
from mmaccel.samplers.window.step_runner import StepRunner
from tests.compatibility.models import READ_VIDEOS, Made, Row, rows
from tests.fixtures.graph_replay import Replay

COMMAND = "python -m tests.compatibility.measure --json benchmarks/results/compatibility.json"
UNTRIED = "-"


class OnCuda:
    """A window that says it is on a CUDA device."""

    device = torch.device("cuda")

    def __init__(self, window: Any) -> None:
        self._window = window

    def __getattr__(self, name: str) -> Any:
        return getattr(self._window, name)


def policies(target: Any) -> tuple[Any, Any]:
    """The plain loop and a bitwise policy that `target` can be decoded with."""
    support = mmaccel.supports(target) if not is_pipeline(target) else None
    kind = "window"
    if support is not None:
        assert support, support.reason
        kind = "window" if "jacobi" in support.policies else "canvas"
    elif getattr(target.model, "mask_token", None) is not None:
        kind = "canvas"
    if kind == "window":
        return mmaccel.Autoregressive(), mmaccel.Jacobi(window=6)
    if support is None and not target.model.lack("scales"):
        return mmaccel.Stepwise(), mmaccel.NextScale()
    if support is not None and "lossless-unmask" not in support.policies:
        return mmaccel.Stepwise(), mmaccel.Stepwise()
    return mmaccel.Stepwise(), mmaccel.LosslessUnmask(drafts=4)


def is_pipeline(target: Any) -> bool:
    return isinstance(target, mmaccel.TextToImage | mmaccel.TextToSpeech | mmaccel.ImageToVideo)


def same(first: Made, second: Made) -> bool:
    return all(a.equal(b) for a, b in zip(first[0], second[0], strict=True))


def check_policy(row: Row, target: Any, says: str = "") -> str:
    """Tokens of the plain loop. Passes are not compared: random weights say nothing of them."""
    plain, fast = policies(target)
    is_same = same(row.call(target, plain, 3), row.call(target, fast, 3))
    return (says or type(fast).__name__) if is_same else "other tokens"


def check_batch(row: Row, target: Any) -> str:
    """The first row of three has the tokens that it has alone."""
    _, fast = policies(target)
    together, alone = row.call(target, fast, 3)[0][0], row.call(target, fast, 1)[0][0]
    n = min(together.shape[-1], alone.shape[-1])  # a row that ends is filled up in company
    return "yes" if n and together[..., :n].equal(alone[..., :n]) else "other tokens"


def check_visual_tokens(row: Row, target: Any) -> str:
    """Two policies agree on half of the visual tokens; and which methods are refused.

    Methods for videos are tried on models that the fixtures have videos for.
    """
    if not row.has_images:
        return UNTRIED
    plain, fast = policies(target)
    refused = []
    for name in REDUCERS:
        method: Any = make("visual_tokens", name, keep=0.5)
        options = {"visual_tokens": method, "videos": "frames" in method.needs}
        if options["videos"] and row.name not in READ_VIDEOS:
            continue
        try:
            reduced = row.call(target, plain, 3, **options)
        except mmaccel.UnsupportedModelError:
            refused.append(type(method).__name__)
            continue
        assert reduced[1].reference, name
        if not method.revives and not same(reduced, row.call(target, fast, 3, **options)):
            return f"other tokens under {type(method).__name__}"
    return f"all but {', '.join(refused)}" if refused else "all"


def check_cuda_graphs(row: Row, target: Any) -> str:
    """Passes that are recorded and replayed make the tokens of eager ones; or why none are."""
    _, fast = policies(target)
    eager, reasons = row.call(target, fast, 3), []

    def runner(self: Engine, window: Any, prompt: Any, *others: Any) -> Any:
        reason = engine.find_obstacle(OnCuda(window), *others)  # type: ignore[arg-type]
        if reason is None:
            return Replay(self.sync_every, self.cache, refuses_lists=False)
        reasons.append(reason)
        return StepRunner(self.sync_every, reason)

    with mock.patch.object(Engine, "runner", runner):
        made = row.call(target, fast, 3)
    if reasons:
        return reasons[0]
    if not made[1].captures:
        return "canvas passes run eagerly" if fast.kind == "canvas" else "nothing captured"
    return "yes" if same(eager, made) else "other tokens"


def check_int8(row: Row, target: Any) -> str:
    """Tokens of the plain loop on weights that torchao made int8."""
    if row.module is None:
        return UNTRIED
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(row.module(target).float(), Int8WeightOnlyConfig())
    return check_policy(row, target, "yes")


def check_lora(row: Row, target: Any) -> str:
    """Tokens of the plain loop with an adapter on every linear layer."""
    if row.module is None or row.module(target) is not target:
        return UNTRIED
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return check_policy(row, get_peft_model(target, config).eval(), "yes")


CHECKS: dict[str, Callable[[Row, Any], str]] = {
    "policy": check_policy, "batch": check_batch, "visual_tokens": check_visual_tokens,
    "cuda_graphs": check_cuda_graphs, "int8": check_int8, "lora": check_lora,
}  # fmt: skip


def find_source(target: Any) -> str:
    """Whose class the network of a target is."""
    for path in ("", "transformer", "model", "model.model", "image_model.window.model"):
        network = target
        for name in path.split(".") if path else ():
            network = getattr(network, name, None)
        if isinstance(network, torch.nn.Module):
            owner = type(network).__module__.partition(".")[0]
            return "stand-in" if owner == "tests" else owner
    raise AssertionError(f"no network in a {type(target).__name__}")


def measure(row: Row, columns: Collection[str] = tuple(CHECKS)) -> dict[str, str]:
    """What happened in each column."""
    found = {"section": row.section, "name": row.name, "title": row.title}
    for column in columns:
        check = CHECKS[column]
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target = row.build(Path(folder))
            found.setdefault("source", find_source(target))
            try:
                found[column] = check(row, target)
            except (mmaccel.MMAccelError, ValueError, RuntimeError) as error:
                found[column] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="", help="names of rows")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    measured = []
    for row in rows():
        if not options.only or row.name in options.only.split(","):
            measured.append(measure(row))
            print(*measured[-1].values(), sep=" | ", flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for package in ("diffusers", "torchao", "peft"):
        versions[package] = __import__(package).__version__
    report = {"command": COMMAND, "machine": {"versions": versions}, "compatibility": measured}
    write_report(options.json, report)


if __name__ == "__main__":
    main()
