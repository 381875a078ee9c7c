"""Whether captured steps make the tokens that passes one by one make, on the device at hand.

`scenes` and a tiny Llama in float32: token by token, Jacobi and maximal coupling, with guidance and
without, at several batch sizes and numbers of passes between two reads of the host, then through
`attach`. What ran without a graph counts as failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.parts import CheckError
from mmaccel.contracts import Policy, Prompt
from mmaccel.handle import attach
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.runner.engine import Engine
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.results import Generation
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.autoregressive import Autoregressive
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.speculative_jacobi import SpeculativeJacobi
from mmaccel.samplers.window.step_runner import StepRunner

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
LENGTH = 48
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


def tiny_llama(device: torch.device) -> Any:
    """A small model, float32, whose tokens depend on each other."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.25, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(7)
    model: Any = LlamaForCausalLM(config)
    return model.to(device).eval()


def make_cases(device: torch.device) -> list[Case]:
    """`scenes` and the tiny Llama."""
    pipe = TextToImage.from_pretrained("scenes", device=device, dtype="float32")
    examples = [pipe.image_model.encode(text) for text in pipe.image_model.examples]

    def prompts(rows: int, guided: bool) -> Prompt:
        return pipe.image_model.prompt([examples[r % len(examples)] for r in range(rows)], guided)

    def ragged(rows: int, guided: bool) -> Prompt:
        branches = 1 + guided
        lengths = torch.arange(rows * branches, device=device) % 4 + 1
        tokens = torch.arange(rows * branches * 4, device=device).view(-1, 4) * 7 % _VOCAB
        return Prompt(tokens, lengths, branches)

    return [
        Case("scenes", pipe.model, prompts),
        Case("tiny llama", CausalLMWindow(tiny_llama(device)), ragged),
    ]


def engine_runner(
    cuda_graphs: bool,
    sync_every: int,
    window: Any,
    prompt: Prompt,
    policy: Policy,
    params: SamplingParams,
) -> StepRunner:
    """A runner as the engine gives it."""
    return Engine(cuda_graphs, sync_every).runner(window, prompt, policy, params)


def decode(
    case: Case, policy: Policy, rows: int, scale: float, cuda_graphs: bool,
    sync_every: int, make_runner: MakeRunner = engine_runner, length: int = LENGTH,
) -> Generation:  # fmt: skip
    """One run."""
    window, prompt, params = case.window, case.prompt(rows, scale != 1), SamplingParams(scale)
    window.runner = make_runner(cuda_graphs, sync_every, window, prompt, policy, params)
    try:
        noise = Noise.from_seed(5, rows, window.device)
        return policy.sample(window, prompt, length, params=params, noise=noise)
    finally:
        window.runner = None


def compare(
    case: Case, make_runner: MakeRunner = engine_runner, policies: Sequence[Policy] = POLICIES,
    batches: Sequence[tuple[int, int]] = BATCHES, scales: Sequence[float] = SCALES,
    length: int = LENGTH,
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Every run by name, and what is wrong with it; an empty text where nothing is."""
    for policy, scale in product(policies, scales):
        plain: dict[int, Tensor] = {}
        for rows, sync_every in batches:
            if rows not in plain:
                made = decode(case, policy, rows, scale, False, 1, make_runner, length)
                plain[rows] = made.tokens
            made = decode(case, policy, rows, scale, True, sync_every, make_runner, length)
            name = f"{case.name}, {policy!r}, guidance {scale:g}, batch {rows}"
            name += f", sync every {sync_every}"
            yield name, find_mistake(plain[rows], made.tokens, made.stats.runner)


def compare_attached(
    model: Any, policies: Sequence[Policy] = POLICIES, length: int = LENGTH
) -> Iterator[tuple[str, str]]:
    """The same through `attach`, three rows padded on the left, and a second call with other
    prompts, shorter and fewer tokens, that goes on in the first one's buffers.
    """
    ids = torch.tensor([[0, 0, 5, 9], [0, 3, 3, 1], [7, 8, 9, 4]], device=model.device)
    calls = ((ids, length), (ids.flip(0)[:, 1:], length - 3))
    guided = {"guidance_scale": 2.0, "negative_prompt_ids": ids[:, -1:]}
    for policy, sync_every, extra in product(policies, (1, 4), ({}, guided)):
        made: list[Tensor] = []
        for kind in (False, True):
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
                        )  # fmt: skip
                    )
        name = f"attached, {policy!r}, sync every {sync_every}{', guided' if extra else ''}"
        wrong = [find_mistake(made[n], made[2 + n], run.history[n].runner) for n in (0, 1)]
        again = run.history[1].captures
        if again and getattr(policy, "window", 1) != "adaptive" and not any(wrong):
            wrong.append(f"expected the first call's graphs in the second, received {again} more")
        yield name, "; ".join(text for text in wrong if text)


def find_mistake(plain: Tensor, captured: Tensor, runner: str) -> str:
    """What is wrong with a captured run."""
    if runner != "cuda graphs":
        return f"expected captured passes, received {runner}"
    if plain.shape != captured.shape:
        return f"expected tokens {list(plain.shape)}, received {list(captured.shape)}"
    differ = int((plain != captured).sum())
    return f"{differ} of {plain.numel()} tokens differ" if differ else ""


def check_bitwise(
    device: torch.device, make_runner: MakeRunner = engine_runner, **options: Any
) -> dict[str, Any]:
    """All runs, as a part of the report keeps them.

    Raises:
        CheckError: some differ or ran without a graph; all of them are named.
    """
    runs = [run for case in make_cases(device) for run in compare(case, make_runner, **options)]
    chosen = {key: options[key] for key in ("policies", "length") if key in options}
    runs += compare_attached(tiny_llama(device), **chosen)
    failed = {name: wrong for name, wrong in runs if wrong}
    passed = len(runs) - len(failed)
    if failed:
        raise CheckError(
            f"{len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}",
            {"passed": passed, "failed": failed},
        )
    return {"passed": passed}
