"""How an EAGLE 3 head for a causal LM is made; `mmaccel train-head` is the command.

The head learns to say what the model says next, after true states and after one to `ahead` states
of its own (Y. Li et al., arXiv 2503.01840, section 3.2, "training-time test"): entry t of round j
stands behind true states of entries 0 … t - j and its own of j rounds.

Departures: the loss is the cross-entropy to the model's distribution alone, each round's weighted
0.8 times that before; texts are read as they are, and not written by the model.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.checks import MANY, check_int
from mmaccel.errors import OptionError
from mmaccel.options import HeadTraining
from mmaccel.samplers.drafting.heads.eagle_model import EagleConfig, EagleModel, Entries, save_eagle

_ROUND_WEIGHT = 0.8
_SAVED_EVERY = 200  # steps
_CHECKED = 16  # pieces that are not learned from


def make_head(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    plan: HeadTraining,
    out: Path,
    *,
    work: Path | None = None,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Train a head for a causal LM on its device, write it into `out` and return its card of
    `facts`.

    Training goes on from the state in `work`, or else in `out/work`. OptionError: too few texts, a
    state of another head, or a layer, a number of tokens or a length that the model does not have.
    """
    model.requires_grad_(False)
    _check_sizes(model, plan)
    tokens = _read_tokens(texts, tokenizer)
    n_pieces = len(tokens) // (plan.length + 2)
    if n_pieces <= _CHECKED:
        raise OptionError(
            f"texts: expected more than {_CHECKED} pieces of {plan.length + 2} tokens, received "
            f"{n_pieces}; give more text, or a smaller --length"
        )
    head = _build(model, plan, tokens).to(model.device)
    seconds, curve = _train(model, head, tokens, plan, work=work or out / "work")
    card = facts | {
        "minutes": round(seconds / 60, 1),
        "parameters": sum(weight.numel() for weight in head.parameters()),
        "curve": curve,
    }
    save_eagle(head, out, card)
    return card


def _read_tokens(texts: Sequence[str], tokenizer: Any) -> Tensor:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = [[*tokenizer(text, verbose=False)["input_ids"], *end] for text in texts]
    return torch.tensor([id for each in ids for id in each], dtype=torch.int64)


def _check_sizes(model: Any, plan: HeadTraining) -> None:
    text = model.config.get_text_config()
    for layer in plan.layers or ():
        check_int("layers", layer, 0, text.num_hidden_layers - 1, hint="name layers of the model")
    n_ids = len(model.get_output_embeddings().weight)
    check_int("draft_vocab", plan.draft_vocab or 1, 1, n_ids, hint="the model has no more tokens")
    longest = getattr(text, "max_position_embeddings", None) or MANY
    check_int("length", plan.length, 1, longest - 1, hint="the model has no more positions")


def _build(model: Any, plan: HeadTraining, tokens: Tensor) -> EagleModel:
    """A head with random weights; its output begins as the model's."""
    embedding = model.get_input_embeddings().weight
    output = model.get_output_embeddings().weight
    text = model.config.get_text_config()
    n_layers = text.num_hidden_layers
    layers = tuple(plan.layers or (min(2, n_layers - 1), n_layers // 2, max(0, n_layers - 3)))
    heads = text.num_attention_heads
    n_ids = plan.draft_vocab or len(output)
    config = EagleConfig(
        vocab_size=len(embedding),
        draft_vocab_size=n_ids,
        hidden_size=embedding.shape[1],
        intermediate_size=plan.inner or text.intermediate_size,
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
) -> tuple[float, list[dict[str, Any]]]:
    state_file = work / "state.pt"
    optimizer = torch.optim.AdamW(head.parameters(), lr=plan.rate, betas=(0.9, 0.95))
    begin = 0
    seconds = 0.0
    curve: list[dict[str, Any]] = []
    if state_file.is_file():
        state = torch.load(state_file, weights_only=True)
        try:
            head.load_state_dict(state["head"])
        except RuntimeError as error:
            raise OptionError(
                f"{str(state_file)!r}: expected the state of a head of these sizes, received that "
                "of another; choose another folder, or the flags it was begun with"
            ) from error
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
        seconds = state["seconds"]
        curve = state["curve"]
    n_checked = _CHECKED * (plan.length + 2)  # of the last ones nothing is learned
    checks = tokens[-n_checked:].view(_CHECKED, -1)
    device = head.fc.weight.device
    for step in range(begin, plan.steps):
        began = time.perf_counter()
        rise = min(1.0, (step + 1) / 50)
        fall = 0.5 + 0.5 * math.cos(math.pi * step / plan.steps)
        optimizer.param_groups[0]["lr"] = plan.rate * rise * fall
        ids = _draw_pieces(tokens[:-n_checked], plan, step).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=plan.mixed):
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
                _, right = measure_rounds(model, head, checks.to(device), plan.ahead)
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


def _draw_pieces(tokens: Tensor, plan: HeadTraining, step: int) -> Tensor:
    """Pieces of a text `[B, T + 2]` int64, the same whenever a step asks for them."""
    import numpy as np

    width = plan.length + 2
    rng = np.random.default_rng((plan.seed, step))
    first = rng.integers(len(tokens) - width + 1, size=plan.batch)
    return tokens[torch.from_numpy(first)[:, None] + torch.arange(width)]


def measure_rounds(model: Any, head: EagleModel, ids: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
    """Losses in nats of all rounds of an EAGLE 3 head, and how often the likeliest token is the
    model's, `[1 + ahead]` each; `ids` are `[B, T + 2]`.
    """
    with torch.no_grad():
        output = model(ids[:, :-1], output_hidden_states=True, use_cache=False)
    layers = head.config.aux_layers
    features = torch.cat([output.hidden_states[layer] for layer in layers], -1)[:, :-1]
    tokens = ids[:, 1:-1]  # entry t has token t + 1 and predicts token t + 2
    scores = output.logits[:, 1:].float()  # the model's, of token t + 2
    target = scores.softmax(-1)[..., head.targets]
    likeliest = scores.argmax(-1)
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
        states = head.add_mlp(rounds[-1].residual, _attend(rounds))
        logits = head.lm_head(head.norm(states)).float()
        nats = -(target * logits.log_softmax(-1)).sum(-1)
        losses.append(nats[:, j:].mean())
        guess = head.targets[logits.argmax(-1)]
        right.append((guess == likeliest)[:, j:].float().mean())
    return torch.stack(losses), torch.stack(right)


def _attend(rounds: Sequence[Entries]) -> Tensor:
    """What the last round's entries attend to, `[B, T, H, d]`: entry t of round j sees entries 0 …
    t - j of round 0, and entry t - j + i of round i ≤ j.
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
        keys, moved = (_move(x.transpose(1, 2), last - i) for x in heads[i])
        scores.append((queries * keys).sum(-1, keepdim=True))
        values.append(moved)
    weights = torch.cat(scores, -1).float().softmax(-1).to(queries.dtype)
    attended = weights[..., :length] @ first_values
    for i, own in enumerate(values):
        attended = attended + weights[..., length + i : length + i + 1] * own
    return attended.transpose(1, 2)


def _move(x: Tensor, n: int) -> Tensor:
    """`[B, H, T, d]` moved by n entries to the right."""
    return x if n == 0 else F.pad(x, (0, 0, n, 0))[:, :, :-n]
