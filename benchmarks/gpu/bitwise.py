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

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.nodes import StaticEagerRunner
from benchmarks.gpu.parts import CheckError
from mmaccel.contracts import Pass, Policy, Prompt
from mmaccel.handle import attach
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.runner.engine import Engine
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.results import Generation, exactness_in
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.autoregressive import Autoregressive
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.speculative_jacobi import SpeculativeJacobi
from mmaccel.samplers.window.step_runner import StepRunner

Row = dict[str, Any]
MakeRunner = Callable[[bool, int, Any, Prompt, Policy, SamplingParams], StepRunner]
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
LENGTH = 48
GAPS = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # of scores without guidance; it multiplies them
LEAST = 0.9  # share of equal tokens, where there is no gap to read
_PLAIN = Autoregressive()
_VOCAB = 64


class Case:
    """A model to decode with, and prompts for it.

    Args:
        name: in messages.
        window: the model.
        prompt: number of rows and whether there is guidance to a prompt.
    """

    def __init__(self, name: str, window: Any, prompt: Callable[[int, bool], Prompt]) -> None:
        self.name, self.window, self.prompt = name, window, prompt


def tiny_llama(device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A small model whose tokens depend on each other."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(7)
    model: Any = LlamaForCausalLM(config)
    return model.to(device, dtype).eval()


def make_case(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Case:
    """`scenes` or the tiny Llama by one of its forwards; `name` is one of `CASES`."""
    fused = name.endswith("fused")
    if name.startswith("tiny llama"):
        llama = CausalLMWindow(tiny_llama(device, dtype), fused=fused)
        return Case(name, llama, partial(_ragged, device))
    number = str(dtype).removeprefix("torch.")
    pipe = TextToImage.from_pretrained("scenes", device=device, dtype=number)
    scenes: Any = pipe.model
    scenes.fused = fused
    return Case(name, scenes, partial(_caption, pipe.image_model))


def _caption(image_model: Any, rows: int, guided: bool) -> Prompt:
    examples = [image_model.encode(text) for text in image_model.examples]
    made: Prompt = image_model.prompt([examples[r % len(examples)] for r in range(rows)], guided)
    return made


def _ragged(device: torch.device, rows: int, guided: bool) -> Prompt:
    branches = 1 + guided
    lengths = torch.arange(rows * branches, device=device) % 4 + 1
    tokens = torch.arange(rows * branches * 4, device=device).view(-1, 4) * 7 % _VOCAB
    return Prompt(tokens, lengths, branches)


def engine_runner(
    cuda_graphs: bool,
    sync_every: int,
    window: Any,
    prompt: Prompt,
    policy: Policy,
    params: SamplingParams,
) -> StepRunner:
    """A runner as the engine gives it; on a CPU static buffers stand for graphs."""
    if cuda_graphs and window.device.type != "cuda":
        return StaticEagerRunner(sync_every)
    return Engine(cuda_graphs, sync_every).runner(window, prompt, policy, params)


def decode(
    case: Case,
    policy: Policy,
    rows: int,
    scale: float,
    cuda_graphs: bool,
    sync_every: int,
    make_runner: MakeRunner = engine_runner,
    length: int = LENGTH,
) -> Generation:
    """One run."""
    window, prompt, params = case.window, case.prompt(rows, scale != 1), SamplingParams(scale)
    window.runner = make_runner(cuda_graphs, sync_every, window, prompt, policy, params)
    try:
        noise = Noise.from_seed(5, rows, window.device)
        return policy.sample(window, prompt, length, params=params, noise=noise)
    finally:
        window.runner = None


def compare(
    case: Case,
    make_runner: MakeRunner = engine_runner,
    policies: Sequence[Policy] = POLICIES,
    batches: Sequence[tuple[int, int]] = BATCHES,
    scales: Sequence[float] = SCALES,
    length: int = LENGTH,
) -> Iterator[Row]:
    """Every run, captured and not, as a row of the report."""
    for policy, scale in product(policies, scales):
        plain: dict[int, Tensor] = {}
        for rows, sync_every in batches:
            if rows not in plain:
                made = decode(case, policy, rows, scale, False, 1, make_runner, length)
                plain[rows] = made.tokens
            made = decode(case, policy, rows, scale, True, sync_every, make_runner, length)
            name = f"{case.name}, {policy!r}, guidance {scale:g}, batch {rows}"
            name += f", sync every {sync_every}"
            gap = find_gap(case, policy, rows, scale, plain[rows], made.tokens)
            runner = _runner_of(case.window.device, made.stats.runner)
            most = GAPS[torch.float32] * max(scale, 1.0)
            wrong = find_mistake(plain[rows], made.tokens, runner, gap, most)
            yield describe(name, plain[rows], made.tokens, gap, wrong)


def check_promise(
    device: torch.device,
    make_runner: MakeRunner = engine_runner,
    *,
    names: Sequence[str] = CASES,
    cases: Sequence[Case] | None = None,
    dtypes: Sequence[torch.dtype] = tuple(GAPS),
    windows: Sequence[int] = (4, 16, 32),
    rows: int = 8,
    scales: Sequence[float] = SCALES,
    length: int = 160,
) -> dict[str, Any]:
    """Jacobi against Autoregressive, as a part of the report keeps it.

    Args:
        device: where they run.
        make_runner: see `compare`.
        names: of `CASES`.
        cases: instead of these, whatever the dtype.
        dtypes, windows, rows, scales, length: of the runs.

    Raises:
        CheckError: some run parted from the plain loop where the scores were not next to equal, was
            not captured, or claims another exactness than its number format allows.
    """
    found: list[Row] = []
    for dtype in dtypes:
        own = (make_case(name, device, dtype) for name in names) if cases is None else cases
        for case in own:
            for scale in scales:
                plain = decode(case, _PLAIN, rows, scale, True, 1, make_runner, length)
                for window in windows:
                    policy = Jacobi(window)
                    made = decode(case, policy, rows, scale, True, 4, make_runner, length)
                    gap = find_gap(case, policy, rows, scale, plain.tokens, made.tokens)
                    runner = _runner_of(case.window.device, made.stats.runner)
                    most = GAPS[dtype] * max(scale, 1.0)
                    wrong = find_mistake(plain.tokens, made.tokens, runner, gap, most)
                    claim = made.stats.exactness
                    if not wrong and claim != exactness_in("bitwise", made.stats.dtype):
                        wrong = f"claims {claim} in {made.stats.dtype}"
                    name = f"{case.name}, {dtype}, {policy!r}, guidance {scale:g}"
                    row = describe(name, plain.tokens, made.tokens, gap, wrong)
                    found.append(
                        row
                        | {
                            "dtype": made.stats.dtype,
                            "exactness": claim,
                            "tokens": made.stats.tokens,
                            "tokens_per_pass": made.stats.tokens / max(made.stats.row_passes, 1),
                            "runner": made.stats.runner,
                            "attention": made.stats.attention,
                            "route": made.stats.route,
                        }
                    )
    return _report(found, "promise")


def _runner_of(device: torch.device, name: str) -> str:
    """What carried passes out; static buffers on a CPU pass for graphs."""
    return "cuda graphs" if name == "eager" and device.type == "cpu" else name


def find_gap(
    case: Case, policy: Policy, rows: int, scale: float, plain: Tensor, other: Tensor
) -> float | None:
    """How far apart the two tokens' scores are where rows first part; the widest of all rows.

    The scores of the plain loop over the tokens that both made: guidance and the slot's frozen
    noise are in them. None where no row parts, or where tokens are not the arg-max of such scores.
    """
    if plain.shape != other.shape or not (plain != other).any():
        return None
    if not isinstance(policy, Autoregressive | Jacobi):
        return None
    window, prompt, params = case.window, case.prompt(rows, scale != 1), SamplingParams(scale)
    noise, branches = Noise.from_seed(5, rows, window.device), prompt.branches
    slots = (plain != other).int().argmax(1)  # [B], the first that differs
    lengths, n_columns = prompt.lengths, prompt.tokens.shape[1]
    tokens = prompt.tokens.new_zeros(len(lengths), n_columns + plain.shape[1])
    tokens[:, :n_columns] = prompt.tokens
    for row in range(len(lengths)):
        made = plain[row % rows].to(tokens.device)
        tokens[row, lengths[row] : int(lengths[row]) + len(made)] = made
    window.reserve(len(lengths), tokens.shape[1])
    start = torch.zeros_like(lengths)
    logits = window.forward(Pass(tokens.clamp(min=0), start))  # [R, T, V]
    at = lengths - 1 + slots.to(lengths.device).repeat(branches)
    logits = logits.gather(1, at[:, None, None].expand(-1, 1, logits.shape[-1]))
    own = slots[:, None].to(logits.device)
    scores = params.apply(logits, branches, tokens, own, own, prompt.layout)
    scores = (scores + noise.gumbel(own, scores.shape[-1]))[:, 0]  # [B, V]
    pair = torch.stack([plain, other], -1).to(scores.device)  # [B, L, 2]
    pair = pair.gather(1, own[..., None].expand(-1, 1, 2))[:, 0]
    gaps = scores.gather(1, pair).diff(dim=1).abs()[:, 0]
    parted = (plain != other).any(1).to(gaps.device)
    return float(gaps[parted].max())


def describe(name: str, plain: Tensor, other: Tensor, gap: float | None, wrong: str) -> Row:
    """A run as the report keeps it."""
    is_same = plain.shape == other.shape
    same = float((plain == other).float().mean()) if is_same else 0.0
    return {"name": name, "same": same, "gap": gap, "wrong": wrong}


def compare_attached(
    model: Any, policies: Sequence[Policy] = POLICIES, length: int = LENGTH
) -> Iterator[Row]:
    """The same through `attach`, three rows padded on the left, and later calls that go on in the
    first one's buffers: every second one has other prompts, shorter, and fewer tokens. The third
    captures its prompt and its first pass, which the others replay.
    """
    ids = torch.tensor([[0, 0, 5, 9], [0, 3, 3, 1], [7, 8, 9, 4]], device=model.device)
    calls = ((ids, length), (ids.flip(0)[:, 1:], length - 3)) * 3
    guided = {"guidance_scale": 2.0, "negative_prompt_ids": ids[:, -1:]}
    for policy, sync_every, extra in product(policies, (1, 4), ({}, guided)):
        made: list[Tensor] = []
        for kind in (False, True if model.device.type == "cuda" else "auto"):
            with attach(
                model, policy, seed=3, strict=True, cuda_graphs=kind, sync_every=sync_every
            ) as run:
                for rows, n_new in calls:
                    made.append(
                        model.generate(
                            rows,
                            attention_mask=(rows > 0).long(),
                            do_sample=True,
                            max_new_tokens=n_new,
                            top_k=20,
                            **extra,
                        )
                    )
        name = f"attached, {policy!r}, sync every {sync_every}{', guided' if extra else ''}"
        runners = [_runner_of(model.device, call.runner) for call in run.history]
        halves = made[: len(calls)], made[len(calls) :]
        wrong = list(map(find_mistake, *halves, runners))
        again = run.history[1].captures
        if again and getattr(policy, "window", 1) != "adaptive" and not any(wrong):
            wrong.append(f"expected the first call's graphs in the second, received {again} more")
        plain, captured = (torch.cat([one.flatten() for one in half]) for half in halves)
        yield describe(name, plain, captured, None, "; ".join(text for text in wrong if text))


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


def check_bitwise(
    device: torch.device,
    make_runner: MakeRunner = engine_runner,
    *,
    names: Sequence[str] = (*CASES, ATTACHED),
    **options: Any,
) -> dict[str, Any]:
    """Captured runs against runs pass by pass, as a part of the report keeps them.

    Args:
        device: where they run.
        make_runner: see `compare`.
        names: of `CASES`, and `ATTACHED`.
        options: of `compare`.

    Raises:
        CheckError: some differ or ran without a graph; all of them are named.
    """
    runs: list[Row] = []
    for name in names:
        if name != ATTACHED:
            runs += compare(make_case(name, device), make_runner, **options)
            continue
        chosen = {key: options[key] for key in ("policies", "length") if key in options}
        runs += compare_attached(tiny_llama(device), **chosen)
    return _report(runs, "bitwise")


def _report(runs: list[Row], key: str) -> dict[str, Any]:
    """What was found: the rows that are not the same to the last token, and the least share."""
    failed = {row["name"]: row["wrong"] for row in runs if row["wrong"]}
    rows = runs if key == "promise" else [row for row in runs if row["same"] < 1]
    found = {
        "passed": len(runs) - len(failed),
        "least_same": min(row["same"] for row in runs),
        key: rows,
    }
    if failed:
        named = "; ".join(f"{name}: {wrong}" for name, wrong in failed.items())
        raise CheckError(
            f"{len(failed)} of {len(runs)} runs failed: {named}", found | {"failed": failed}
        )
    return found
