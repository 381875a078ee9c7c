"""Makes a coarse model for coarse drafts: passes of the model's own runs, training, a card.

    python -m scripts.training coarse scenes runs/coarse-scenes --guidance 1 2
    python -m scripts.training coarse MODEL OUT --kind text --prompts prompts.txt
    python -m scripts.training coarse MODEL OUT --kind speech --prompts texts.txt
    python -m scripts.training coarse MODEL OUT --kind video --prompts image-files.txt
    python -m scripts.training coarse moving-scenes OUT --kind video --prompts captions.txt

OUT receives `coarse.json` and `coarse.safetensors`, for `Jacobi(drafts=mmaccel.Coarse("OUT"))`; in
the model's own folder they are found without a word. The command goes on where it was stopped;
more steps may be given later. `coarse.json` also holds the card: how the coarse model was made,
its cross-entropy, and tokens a pass without and with it.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mmaccel.errors import OptionError
from mmaccel.results import EXACT_DTYPE
from mmaccel.samplers.drafting.coarse import Coarse
from mmaccel.samplers.drafting.coarse_model import load_coarse, save_coarse
from mmaccel.samplers.drafting.states import StateModel
from mmaccel.samplers.window.jacobi import Jacobi
from scripts.training.card import this_machine
from scripts.training.coarse_fit import PLAN, CoarseFit
from scripts.training.coarse_passes import PassData, RecordedJacobi, collect_passes
from scripts.training.coarse_targets import KINDS, Target, count_bytes, open_target
from scripts.training.loop import read_log, train


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    target = open_target(args)
    work = args.work or args.out / "work"
    if not isinstance(target.window, StateModel):
        raise OptionError(
            f"model: expected one that hands out its hidden states, received a "
            f"{type(target.window).__name__}; a StateModel has coarse drafts"
        )
    config = target.config(args.width, args.embedding)
    guidance = args.guidance or [None]
    drafts = args.drafts if args.drafts == "neighbour" else Coarse(args.drafts)
    policy = RecordedJacobi(args.window, drafts, config=config)
    files = collect_passes(target, policy, work, range(args.samples), args.batch, guidance)
    plain = RecordedJacobi(1, "neighbour", config=config)
    rows = range(args.samples, args.samples + args.plain)
    files += collect_passes(target, plain, work / "plain", rows, 8 * args.batch, guidance)
    _, _, params = target.plan(target.prompts[:1], guidance[0])
    output = target.window.output_matrix().detach()
    data = PassData(files, config)
    task = CoarseFit(config, output, data, params.temperature)
    changes = {"steps": args.steps, "fall": args.steps // 2, "rate": args.rate}
    train(work, task, replace(PLAN, **changes), args.device)
    model = load_coarse(work / "weights", output)
    *_, last = (line for line in read_log(work) if "seconds" in line)
    card: dict[str, Any] = {
        "made_for": args.model,
        "command": shlex.join(["python", "-m", "scripts.training", "coarse", *arguments]),
        "data": {
            "rows": data.n_rows,
            "plain": args.plain,
            "slots": data.n_pairs,
            "window": args.window,
            "guidance": guidance,
            "temperature": params.temperature,
            "drafts": args.drafts,
            "minutes": round(data.seconds / 60, 2),
        },
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "bytes": count_bytes(config),
        "measured_with": this_machine(args.device),
        "steps": last["step"],
        "minutes": round(last["seconds"] / 60, 2),
        "cross_entropy": task.measure(model, args.device),
    }
    save_coarse(model, args.out, card)
    card["tokens_per_pass"] = [measure(target, args, scale) for scale in guidance]
    save_coarse(model, args.out, card)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.training coarse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="name, folder, file or hub id")
    parser.add_argument("out", type=Path, help="folder for the coarse model")
    parser.add_argument("--kind", choices=KINDS, default="image")
    parser.add_argument("--prompts", help="file with one prompt a line")
    parser.add_argument("--ids", action="store_true", help="text: prompts are ids with blanks")
    parser.add_argument("--samples", type=int, default=200, help="rows to learn from")
    parser.add_argument("--plain", type=int, default=0, help="more rows, of one token a pass")
    parser.add_argument("--steps", type=int, default=PLAN.steps, help="of training, in all")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8, help="rows decoded together")
    parser.add_argument("--guidance", type=float, nargs="+", help="one or several scales")
    parser.add_argument("--temperature", type=float, help="of the runs; the model's own if missing")
    parser.add_argument("--drafts", default="neighbour", help="of the runs; or a coarse folder")
    parser.add_argument("--width", type=int, help="H of the coarse model")
    parser.add_argument("--embedding", type=int, help="width of its token embeddings")
    parser.add_argument("--rate", type=float, default=PLAN.rate, help="peak of the step size")
    parser.add_argument("--measured", type=int, default=8, help="fresh rows for tokens a pass")
    parser.add_argument("--work", type=Path, help="of passes and state; OUT/work if missing")
    parser.add_argument("--length", type=int, default=256, help="text: tokens of a row")
    parser.add_argument("--max-seconds", type=float, help="speech: of an utterance")
    parser.add_argument("--codec", help="speech, video: folder of the codec")
    parser.add_argument("--size", help="images: pixels, such as 512 or 1024x768")
    parser.add_argument("--decoder", type=Path, help="images: file of the image decoder")
    parser.add_argument("--family", help="how the checkpoint is read")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default=EXACT_DTYPE)
    parser.add_argument("--trust-remote-code", action="store_true")
    return parser.parse_args(arguments)


def measure(target: Target, args: argparse.Namespace, scale: float | None) -> dict[str, Any]:
    """Tokens a pass on fresh rows without and with the coarse model in `args.out`; `is_equal` says
    whether both made the same tokens.
    """
    rows = target.fresh_rows(args.samples + args.plain, args.measured)
    plain = target.sample(Jacobi(args.window, "neighbour"), rows, scale)
    coarse = target.sample(Jacobi(args.window, Coarse(str(args.out))), rows, scale)
    return {
        "window": args.window,
        "guidance": scale,
        "rows": args.measured,
        "neighbour": round(plain.stats.tokens_per_pass, 3),
        "coarse": round(coarse.stats.tokens_per_pass, 3),
        "is_equal": bool(torch.equal(plain.tokens, coarse.tokens)),
    }
