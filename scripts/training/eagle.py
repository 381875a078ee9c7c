"""Makes an EAGLE 3 head for a causal LM.

    python -m scripts.training eagle MODEL OUT --texts texts.txt
    python -m scripts.training eagle stdlib OUT --modules

OUT receives `config.json` and `model.safetensors` in the layout of the authors, for
`Jacobi(drafts=mmaccel.Eagle("OUT"))`. The model reads the texts; the head learns to say what the
model says next, after true states and after one to `--ahead` states of its own (Y. Li et al.,
arXiv 2503.01840, section 3.2, "training-time test"): entry t of round j stands behind true states
of entries 0 … t - j and its own of j rounds. The command goes on where it was stopped.

Departures: the loss is the cross-entropy to the model's distribution alone, each round's weighted
0.8 times that before; texts are read as they are, and not written by the model.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.checks import check_int
from mmaccel.demo.loading import NAMES, load_demo
from mmaccel.demo.stdlib.modules import read_modules
from mmaccel.errors import OptionError
from mmaccel.samplers.drafting.heads.eagle_model import EagleConfig, EagleModel, Entries, save_eagle
from scripts.training.export import this_machine
from scripts.training.optim import mixed_precision

_ROUND_WEIGHT = 0.8
_SAVED_EVERY = 200  # steps
_CHECKED = 16  # pieces that are not learned from


@dataclass(frozen=True)
class HeadTraining:
    """How a head is trained.

    Args:
        steps: in all.
        batch: pieces a step.
        length: tokens of a piece.
        ahead: states of its own that a draft may stand behind.
        rate: of AdamW; it rises over 50 steps and falls to 0 along a cosine.
        seed: of the pieces.
    """

    steps: int = 2000
    batch: int = 8
    length: int = 256
    ahead: int = 5
    rate: float = 1e-3
    seed: int = 0


def main(arguments: Sequence[str]) -> None:
    """Run the command with its arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.training eagle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="an embedded model, a folder or a hub id")
    parser.add_argument("out", type=Path, help="folder for the head")
    parser.add_argument("--texts", type=Path, help="file of texts, one a line")
    parser.add_argument("--modules", action="store_true", help="the standard library's modules")
    parser.add_argument("--work", type=Path, help="of the state; OUT/work if missing")
    parser.add_argument("--layers", type=int, nargs=3, help="whose inputs the head reads")
    parser.add_argument("--inner", type=int, help="width of its MLP; the model's if missing")
    parser.add_argument("--draft-vocab", type=int, help="the most frequent tokens alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mixed", action="store_true", help="bfloat16 where the device has it")
    for name in ("steps", "batch", "length", "ahead"):
        parser.add_argument(f"--{name}", type=int, default=getattr(HeadTraining, name))
    parser.add_argument("--rate", type=float, default=HeadTraining.rate)
    args = parser.parse_args(arguments)
    for name in ("steps", "batch", "length"):
        check_int(name, getattr(args, name), 1, hint="leave it out")
    check_int("ahead", args.ahead, 0, hint="5 suits most models")
    make_head(args, shlex.join(["python", "-m", "scripts.training", "eagle", *arguments]))


def make_head(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Train a head and write it; returns its card.

    Raises:
        OptionError: no texts, or too few of them.
    """
    plan = HeadTraining(
        steps=args.steps,
        batch=args.batch,
        length=args.length,
        ahead=args.ahead,
        rate=args.rate,
    )
    model, tokenizer = _open(args.model)
    model.to(args.device).requires_grad_(False)
    tokens = _read_tokens(args, tokenizer)
    n_pieces = len(tokens) // (plan.length + 2)
    if n_pieces <= _CHECKED:
        raise OptionError(
            f"texts: expected more than {_CHECKED} pieces of {plan.length + 2} tokens, received "
            f"{n_pieces}; give more text, or a smaller --length"
        )
    head = _build(model, args, tokens).to(args.device)
    work = args.work or args.out / "work"
    seconds, curve = _train(model, head, tokens, plan, work=work, mixed=args.mixed)
    card = {
        "made_for": args.model,
        "command": command,
        "minutes": round(seconds / 60, 1),
        "parameters": sum(weight.numel() for weight in head.parameters()),
        "curve": curve,
        "measured_with": this_machine(args.device),
    }
    save_eagle(head, args.out, card)
    return card


def _open(name: str) -> tuple[Any, Any]:
    if name in NAMES:
        return load_demo(name)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(name)
    return model.eval(), AutoTokenizer.from_pretrained(name)


def _read_tokens(args: argparse.Namespace, tokenizer: Any) -> Tensor:
    """All texts, one behind the other, `[N]` int64."""
    if args.modules == (args.texts is not None):
        raise OptionError("texts: expected --texts or --modules, received both or none; give one")
    if args.modules:
        texts = [module.text for module in read_modules() if not module.is_held_out]
    else:
        texts = args.texts.read_text(encoding="utf-8").splitlines()
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = [[*tokenizer(text, verbose=False)["input_ids"], *end] for text in texts]
    return torch.from_numpy(np.concatenate([np.array(each, dtype=np.int64) for each in ids]))


def _build(model: Any, args: argparse.Namespace, tokens: Tensor) -> EagleModel:
    """A head with random weights; its output begins as the model's."""
    embedding = model.get_input_embeddings().weight
    output = model.get_output_embeddings().weight
    text = model.config.get_text_config()
    n_layers = text.num_hidden_layers
    layers = tuple(args.layers or (2, n_layers // 2, n_layers - 3))
    heads = text.num_attention_heads
    n_ids = args.draft_vocab or len(output)
    config = EagleConfig(
        vocab_size=len(embedding),
        draft_vocab_size=n_ids,
        hidden_size=embedding.shape[1],
        intermediate_size=args.inner or text.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", heads),
        head_dim=getattr(text, "head_dim", None) or embedding.shape[1] // heads,
        features=embedding.shape[1] * len(layers),
        aux_layers=layers,
    )
    torch.manual_seed(0)
    head = EagleModel(config, embedding, output)
    counts = torch.bincount(tokens, minlength=len(output))
    chosen = counts.argsort(descending=True, stable=True)[:n_ids].sort().values
    head.targets = chosen
    with torch.no_grad():
        head.lm_head.weight.copy_(output[chosen])
        for name, weight in head.named_parameters():
            if weight.ndim == 2 and not name.startswith("lm_head"):
                torch.nn.init.normal_(weight, std=0.02)
    return head


def _train(
    model: Any,
    head: EagleModel,
    tokens: Tensor,
    plan: HeadTraining,
    *,
    work: Path,
    mixed: bool,
) -> tuple[float, list[dict[str, Any]]]:
    """Train to the end of the plan; returns seconds and the validation by step."""
    state_file = work / "state.pt"
    optimizer = torch.optim.AdamW(head.parameters(), lr=plan.rate, betas=(0.9, 0.95))
    begin = 0
    seconds = 0.0
    curve: list[dict[str, Any]] = []
    if state_file.is_file():
        state = torch.load(state_file, weights_only=True)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
        seconds = state["seconds"]
        curve = state["curve"]
    pieces = _Pieces(tokens, plan)
    device = head.fc.weight.device
    for step in range(begin, plan.steps):
        began = time.perf_counter()
        rise = min(1.0, (step + 1) / 50)
        fall = 0.5 + 0.5 * float(np.cos(np.pi * step / plan.steps))
        optimizer.param_groups[0]["lr"] = plan.rate * rise * fall
        ids = pieces.batch(step).to(device)
        with mixed_precision(device) if mixed else torch.autocast(device.type, enabled=False):
            losses, _ = measure_rounds(model, head, ids, plan.ahead)
        weights = _ROUND_WEIGHT ** torch.arange(len(losses), device=device)
        loss = (losses * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        seconds += time.perf_counter() - began
        if (step + 1) % _SAVED_EVERY == 0 or step + 1 == plan.steps:
            with torch.no_grad():
                _, right = measure_rounds(model, head, pieces.checks.to(device), plan.ahead)
            line = {
                "step": step + 1,
                "loss": round(float(loss.detach()), 4),
                "right": [round(share, 4) for share in right.tolist()],
            }
            curve.append(line)
            print(json.dumps(line | {"seconds": round(seconds)}), flush=True)
            work.mkdir(parents=True, exist_ok=True)
            state = {
                "head": head.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
                "seconds": seconds,
                "curve": curve,
            }
            torch.save(state, state_file.with_suffix(".tmp"))
            state_file.with_suffix(".tmp").replace(state_file)
    return seconds, curve


class _Pieces:
    """Pieces of a text; the last ones are not learned from."""

    def __init__(self, tokens: Tensor, plan: HeadTraining) -> None:
        self._plan = plan
        width = plan.length + 2
        n_checked = _CHECKED * width
        self._tokens = tokens[:-n_checked]
        self.checks = tokens[-n_checked:].view(_CHECKED, width)

    def batch(self, step: int) -> Tensor:
        """`[B, T + 2]` int64, the same whenever it is asked for."""
        plan = self._plan
        rng = np.random.default_rng((plan.seed, step))
        width = plan.length + 2
        first = rng.integers(len(self._tokens) - width + 1, size=plan.batch)
        return self._tokens[torch.from_numpy(first)[:, None] + torch.arange(width)]


def measure_rounds(model: Any, head: EagleModel, ids: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
    """Losses of all rounds, and how often the likeliest token is the model's.

    Args:
        model: the large model.
        head: an EAGLE 3 head of it.
        ids: `[B, T + 2]` int64.
        ahead: rounds after the first.

    Returns:
        `[1 + ahead]` nats, and `[1 + ahead]` in 0..1.
    """
    with torch.no_grad():
        output = model(ids[:, :-1], output_hidden_states=True, use_cache=False)
    layers = head.config.aux_layers
    features = torch.cat([output.hidden_states[layer] for layer in layers], -1)[:, :-1]
    tokens = ids[:, 1:-1]  # entry t has token t + 1 and predicts token t + 2
    wanted = output.logits[:, 1:].float()  # the model's scores of that
    target = wanted.softmax(-1)[..., head.targets]
    likeliest = wanted.argmax(-1)
    length = tokens.shape[1]
    columns = torch.arange(length, device=ids.device).expand_as(tokens)
    states = head.enter(features)
    rounds: list[Entries] = []
    losses = []
    right = []
    for j in range(1 + ahead):
        if j:  # entry t goes on from what round j - 1 has made of entry t - 1
            states = F.pad(states, (0, 0, 1, 0))[:, :-1]
        rounds.append(head.project(tokens, states, columns))
        states = head.finish(rounds[-1], _attend(rounds))
        found = head.lm_head(head.norm(states)).float()
        nats = -(target * found.log_softmax(-1)).sum(-1)
        losses.append(nats[:, j:].mean())
        guess = head.targets[found.argmax(-1)]
        right.append((guess == likeliest)[:, j:].float().mean())
    return torch.stack(losses), torch.stack(right)


def _attend(rounds: Sequence[Entries]) -> Tensor:
    """What the entries of the last round attend to, `[B, T, H, d]`.

    Entry t of round j sees entries 0 … t - j of round 0, and entry t - j + i of round i ≤ j.
    """
    now = rounds[-1]
    last = len(rounds) - 1
    d = now.queries.shape[-1]
    groups = now.queries.shape[2] // now.keys.shape[2]
    queries = now.queries.transpose(1, 2) * d**-0.5  # [B, H, T, d]
    heads = [
        (each.keys.repeat_interleave(groups, 2), each.values.repeat_interleave(groups, 2))
        for each in rounds
    ]
    first_keys, first_values = (x.transpose(1, 2) for x in heads[0])
    length = queries.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool, device=queries.device).tril(-last)
    scores = [(queries @ first_keys.mT).masked_fill(~seen, float("-inf"))]
    values = []
    for i in range(1, last + 1):
        keys, own = (_move(x.transpose(1, 2), last - i) for x in heads[i])
        scores.append((queries * keys).sum(-1, keepdim=True))
        values.append(own)
    weights = torch.cat(scores, -1).float().softmax(-1).to(queries.dtype)
    attended = weights[..., :length] @ first_values
    for i, own in enumerate(values):
        attended = attended + weights[..., length + i : length + i + 1] * own
    return attended.transpose(1, 2)


def _move(x: Tensor, n: int) -> Tensor:
    """`[B, H, T, d]` moved by n entries to the right."""
    return x if n == 0 else F.pad(x, (0, 0, n, 0))[:, :, :-n]
