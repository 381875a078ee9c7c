"""Whether captured steps make the tokens that passes one by one make, on the device at hand, and
whether Jacobi makes the tokens of the plain loop.

`scenes` and a tiny Llama in float32, by the fused decoder and by their own forward: token by token,
Jacobi and maximal coupling, with guidance and without, at several batch sizes and numbers of passes
between two reads of the host, then through `attach`. What ran without a graph counts as failed.

Two runs may sum in another order (a captured one has more room in its cache, a window is another
shape than a token), and where two tokens are as likely but for rounding, the runs go different
ways from there on. So the share of equal tokens is reported, and where rows part, how far apart the
two tokens' scores are at the first slot that differs: more than `GAPS` is a mistake. Policies that
draw more than an arg-max over frozen noise have no such gap; of them the share must be `LEAST`.
`check_promise` compares Jacobi with Autoregressive in the same way, in float32 and in bfloat16,
and records what the statistics claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.parts import raise_failed
from benchmarks.gpu.steps import make_runner
from mmaccel.contracts import Pass, Prompt
from mmaccel.handle import attach
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.runner.engine import Engine
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.policies import Policy
from mmaccel.results import Generation, exactness_in
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.autoregressive import Autoregressive
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.speculative_jacobi import SpeculativeJacobi

Row = dict[str, Any]
POLICIES: tuple[Policy, ...] = (
    Autoregressive(),
    Jacobi(16),
    Jacobi(32),
    Jacobi("adaptive"),
    SpeculativeJacobi(16),
)
BATCHES = ((1, 1), (1, 4), (3, 4), (8, 1))  # rows, passes between two reads of the host
SCALES = (1.0, 2.5)
CASES = (
    "scenes, fused",
    "tiny llama, fused",
    "scenes, own forward",
    "tiny llama, own forward",
)
ATTACHED = "attached"  # the tiny Llama through `attach`
GAPS = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # of scores without guidance; it multiplies them
LEAST = 0.9  # share of equal tokens, where there is no gap to read
_VOCAB = 64


@dataclass
class Case:
    """A model to decode with, and its prompts: of so many rows, with guidance or without."""

    name: str
    window: Any
    prompt: Callable[[int, bool], Prompt]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Run:
    """A decoding of a case; `sync_every` None: no graphs."""

    policy: Policy
    rows: int
    scale: float
    length: int
    sync_every: int | None


def tiny_llama(device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A small model whose tokens depend on each other."""
    from tests.fixtures.tiny_lms import build_lm

    sizes = {"vocab_size": _VOCAB, "hidden_size": 64, "num_key_value_heads": 2}
    model = build_lm("llama", **sizes, max_position_embeddings=256, eos_token_id=None)
    return model.to(device, dtype)


def make_case(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Case:
    """`scenes` or the tiny Llama by one of its forwards; `name` is one of `CASES`."""
    fused = name.endswith("fused")
    if name.startswith("tiny llama"):
        llama = CausalLMWindow(tiny_llama(device, dtype), fused=fused)
        return Case(name, llama, partial(_ragged, device), dtype)
    number = str(dtype).removeprefix("torch.")
    pipe = TextToImage.from_pretrained("scenes", device=device, dtype=number)
    scenes: Any = pipe.model
    scenes.fused = fused
    return Case(name, scenes, partial(_caption, pipe.image_model), dtype)


def _caption(image_model: Any, rows: int, guided: bool) -> Prompt:
    examples = [image_model.encode(text) for text in image_model.examples]
    made: Prompt = image_model.prompt([examples[r % len(examples)] for r in range(rows)], guided)
    return made


def _ragged(device: torch.device, rows: int, guided: bool) -> Prompt:
    branches = 1 + guided
    lengths = torch.arange(rows * branches, device=device) % 4 + 1
    tokens = torch.arange(rows * branches * 4, device=device).view(-1, 4) * 7 % _VOCAB
    return Prompt(tokens, lengths, branches)


def decode(case: Case, run: Run) -> Generation:
    window, prompt = case.window, case.prompt(run.rows, run.scale != 1)
    params = SamplingParams(run.scale)
    if run.sync_every is None:
        window.setup.runner = Engine(False, 1).runner(window, prompt, run.policy, params)
    else:
        window.setup.runner = make_runner(window, prompt, run.policy, params, run.sync_every)
    try:
        noise = Noise.from_seed(5, run.rows, window.device)
        return run.policy.sample(window, prompt, run.length, params=params, noise=noise)
    finally:
        window.setup.runner = None


def compare(case: Case, pairs: Iterable[tuple[Run, Run]]) -> Iterator[Row]:
    """Runs beside the run whose tokens they are to have, as rows of the report."""
    plain: dict[Run, Tensor] = {}
    for reference, run in pairs:
        if reference not in plain:
            plain[reference] = decode(case, reference).tokens
        made = decode(case, run)
        stats, tokens = made.stats, plain[reference]
        gap = find_gap(case, run, tokens, made.tokens)
        runner = _runner_of(case.window.device, stats.runner)
        wrong = find_mistake(tokens, made.tokens, runner, gap, GAPS[case.dtype] * max(run.scale, 1))
        if not wrong and stats.exactness != exactness_in(run.policy.exactness, stats.dtype):
            wrong = f"claims {stats.exactness} in {stats.dtype}"
        yield {
            "name": f"{case.name}, {case.dtype}, {run.policy!r}, guidance {run.scale:g}, batch "
            f"{run.rows}, sync every {run.sync_every}",
            "same": _same(tokens, made.tokens),
            "gap": gap,
            "wrong": wrong,
            "dtype": stats.dtype,
            "exactness": stats.exactness,
            "tokens": stats.tokens,
            "tokens_per_pass": stats.tokens / max(stats.row_passes, 1),
            "runner": stats.runner,
            "attention": stats.attention,
            "route": stats.route,
        }


def _runner_of(device: torch.device, name: str) -> str:
    """What carried passes out; static buffers on a CPU pass for graphs."""
    return "cuda graphs" if name == "eager" and device.type == "cpu" else name


def _same(plain: Tensor, other: Tensor) -> float:
    return float((plain == other).float().mean()) if plain.shape == other.shape else 0.0


def find_gap(case: Case, run: Run, plain: Tensor, other: Tensor) -> float | None:
    """How far apart the two tokens' scores are where rows first part; the widest of all rows.

    The scores of the plain loop over the tokens that both made: guidance and the slot's frozen
    noise are in them. None where no row parts, or where tokens are not the arg-max of such scores.
    """
    if plain.shape != other.shape or not (plain != other).any():
        return None
    if not isinstance(run.policy, Autoregressive | Jacobi):
        return None
    window, prompt = case.window, case.prompt(run.rows, run.scale != 1)
    noise, branches = Noise.from_seed(5, run.rows, window.device), prompt.branches
    slots = (plain != other).int().argmax(1)  # [B], the first that differs
    lengths, n_columns = prompt.lengths, prompt.tokens.shape[1]
    tokens = prompt.tokens.new_zeros(len(lengths), n_columns + plain.shape[1])
    tokens[:, :n_columns] = prompt.tokens
    for row in range(len(lengths)):
        made = plain[row % run.rows].to(tokens.device)
        tokens[row, lengths[row] : int(lengths[row]) + len(made)] = made
    window.reserve(len(lengths), tokens.shape[1])
    start = torch.zeros_like(lengths)
    logits = window.forward(Pass(tokens.clamp(min=0), start))  # [R, T, V]
    at = lengths - 1 + slots.to(lengths.device).repeat(branches)
    logits = logits.gather(1, at[:, None, None].expand(-1, 1, logits.shape[-1]))
    own = slots[:, None].to(logits.device)
    params = SamplingParams(run.scale)
    scores = params.apply(logits, branches, tokens, own, own, prompt.layout)
    scores = (scores + noise.gumbel(own, scores.shape[-1]))[:, 0]  # [B, V]
    pair = torch.stack([plain, other], -1).to(scores.device)  # [B, L, 2]
    pair = pair.gather(1, own[..., None].expand(-1, 1, 2))[:, 0]
    gaps = scores.gather(1, pair).diff(dim=1).abs()[:, 0]
    parted = (plain != other).any(1).to(gaps.device)
    return float(gaps[parted].max())


def find_mistake(
    plain: Tensor,
    captured: Tensor,
    runner: str,
    gap: float | None = None,
    most: float = GAPS[torch.float32],
) -> str:
    """What is wrong with a captured run."""
    if runner != "cuda graphs":
        return f"expected captured passes, received {runner}"
    if plain.shape != captured.shape:
        return f"expected tokens {list(plain.shape)}, received {list(captured.shape)}"
    differ = int((plain != captured).sum())
    text = f"{differ} of {plain.numel()} tokens differ"
    if gap is not None:
        return f"{text}, the first with scores {gap:.3g} apart, {most:g} at most" * (gap > most)
    return text * (differ > (1 - LEAST) * plain.numel())


def compare_attached(
    model: Any, policies: Sequence[Policy] = POLICIES, length: int = 48
) -> Iterator[Row]:
    """The same through `attach`, three rows padded on the left, and later calls that go on in the
    first one's buffers: every second one has other prompts, shorter, and fewer tokens. The third
    captures its prompt and its first pass, which the others replay.
    """
    ids = torch.tensor([[0, 0, 5, 9], [0, 3, 3, 1], [7, 8, 9, 4]], device=model.device)
    calls = ((ids, length), (ids.flip(0)[:, 1:], length - 3)) * 3
    guided = {"guidance_scale": 2.0, "negative_prompt_ids": ids[:, -1:]}
    options: dict[str, Any] = {"do_sample": True, "top_k": 20}
    captured = True if model.device.type == "cuda" else "auto"
    for policy, sync_every, extra in product(policies, (1, 4), ({}, guided)):
        halves: list[list[Tensor]] = []
        for kind in (False, captured):
            given: Any = {"cuda_graphs": kind, "sync_every": sync_every}
            with attach(model, policy, seed=3, strict=True, **given) as run:
                made = [
                    model.generate(
                        rows,
                        attention_mask=(rows > 0).long(),
                        max_new_tokens=n_new,
                        **options,
                        **extra,
                    )
                    for rows, n_new in calls
                ]
            halves.append(made)
        runners = [_runner_of(model.device, call.runner) for call in run.history]
        wrong = list(map(find_mistake, *halves, runners))
        again = run.history[1].captures
        if again and getattr(policy, "window", 1) != "adaptive" and not any(wrong):
            wrong.append(f"expected the first call's graphs in the second, received {again} more")
        plain, other = (torch.cat([one.flatten() for one in half]) for half in halves)
        yield {
            "name": f"attached, {policy!r}, sync every {sync_every}{', guided' if extra else ''}",
            "same": _same(plain, other),
            "gap": None,
            "wrong": "; ".join(filter(None, wrong)),
        }


def check_bitwise(name: str, device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """Captured runs against runs pass by pass, as a part of the report keeps them; CheckError names
    all that differ or ran without a graph. Tiny: one short run of two rows.
    """
    policies = (Jacobi(4),) if tiny else POLICIES
    length = 6 if tiny else 48
    if name == ATTACHED:
        runs = list(compare_attached(tiny_llama(device), policies, length))
    else:
        batches, scales = (((2, 4),), (1.0,)) if tiny else (BATCHES, SCALES)
        pairs = [
            (Run(policy, rows, scale, length, None), Run(policy, rows, scale, length, sync_every))
            for policy, scale, (rows, sync_every) in product(policies, scales, batches)
        ]
        runs = list(compare(make_case(name, device), pairs))
    return _report(runs, {"bitwise": [row for row in runs if row["same"] < 1]})


def check_promise(name: str, device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """Jacobi against Autoregressive, both captured, as a part of the report keeps it; CheckError
    where a run parted from the plain loop where the scores were not next to equal, was not
    captured, or claims another exactness than its number format allows.
    """
    length, rows = (6, 1) if tiny else (160, 8)
    pairs = [
        (Run(Autoregressive(), rows, scale, length, 1), Run(Jacobi(window), rows, scale, length, 4))
        for scale, window in product((1.0,) if tiny else SCALES, (4,) if tiny else (4, 16, 32))
    ]
    runs = [row for dtype in GAPS for row in compare(make_case(name, device, dtype), pairs)]
    return _report(runs, {"promise": runs})


def _report(runs: list[Row], kept: dict[str, list[Row]]) -> dict[str, Any]:
    found: dict[str, Any] = {"passed": sum(not row["wrong"] for row in runs)}
    found |= {"least_same": min(row["same"] for row in runs), **kept}
    raise_failed(runs, "runs", found)
    return found
