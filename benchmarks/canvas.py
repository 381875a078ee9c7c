"""What canvas policies cost and make on the embedded masked models, one row of figures a policy.

    python -m benchmarks.canvas grammar-masked --count 50 --json FILE
    python -m benchmarks.canvas scenes-masked --policies "stepwise halton,maskgit 12" --count 4

`--policies` takes labels of `SETUPS`, or any policy as the command line has it; without it all
setups that can run on the model are measured. Window policies, on `scenes-masked` alone, decode the
next-token model of the same images. `--count` is the number of prompts, of texts for each task.

*of oracle* is a policy's tokens a pass as a share of those of `Oracle`; `same` counts rows equal to
stepwise decoding's in the same order and blocks without a cache, if that was measured before, and
`differ` is the share of tokens that are others than there. `nats` bounds a row's divergence
from committing several tokens at once. The last table is accuracy under parallelism.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.rows import read_arguments, write_measured
from mmaccel.catalog import read_policy
from mmaccel.contracts import Prompt
from mmaccel.demo.scenes.checker import check_images
from mmaccel.demo.scenes.data import EVALUATION_SEED as CAPTION_SEED
from mmaccel.demo.scenes.data import make_captions
from mmaccel.evaluation.exactness.g_test import sampling_floor, total_variation
from mmaccel.loading import open_pipeline
from mmaccel.options import LoadOptions
from mmaccel.pipelines.hosts.diffusion_lm.masked_lm import MaskedLM
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, load_model
from mmaccel.pipelines.models.scenes_vocabulary import read_masked, read_words, tokenizer_folder
from mmaccel.pipelines.text_to_image.registry import find_source
from mmaccel.results import Exactness, Generation, Stats
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.policy import RunPolicy
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from scripts.training import grammar_tasks as grammar
from scripts.training.loop import WEIGHTS

_ENUMERABLE = ("replace", "shuffle", "tell")
_PROMPTS, _DRAWS = 8, 100  # for distributions
SETUPS = {  # label -> policy
    "stepwise": "stepwise:order=confidence",
    "stepwise halton": "stepwise:order=halton",
    "stepwise left": "stepwise:order=left",
    "lossless-unmask": "lossless-unmask:order=confidence:drafts=8",
    "lossless-unmask halton": "lossless-unmask:order=halton:drafts=8",
    "lossless-unmask left": "lossless-unmask:order=left:drafts=8",
    "lossless-unmask auto": "lossless-unmask",
    "lossless-unmask halton 16": "lossless-unmask:order=halton:drafts=16",
    "entropy-bounded auto": "entropy-bounded",
    "entropy-bounded 0.1": "entropy-bounded:gamma=0.1",
    "entropy-bounded 0.5": "entropy-bounded:gamma=0.5",
    "entropy-bounded 0.5 cut": "entropy-bounded:gamma=0.5:end_threshold=0.9:drop_suffix=True",
    "entropy-bounded 0.57": "entropy-bounded:gamma=0.57",
    "entropy-bounded 0.6": "entropy-bounded:gamma=0.6",
    "entropy-bounded 0.5 end": "entropy-bounded:gamma=0.5:end_threshold=0.9",
    "entropy-bounded 1.0": "entropy-bounded:gamma=1.0",
    "entropy-bounded 4": "entropy-bounded:gamma=4.0",
    "entropy-bounded 16": "entropy-bounded:gamma=16.0",
    "entropy-bounded budget 1": "entropy-bounded:budget_nats=1.0",
    "threshold 0.9": "confident-parallel:threshold=0.9",
    "threshold 0.7": "confident-parallel:threshold=0.7",
    "frechet 0.5": "confident-parallel:rule=frechet:factor=0.5",
    "kl-stable": "kl-stable",
    "local-leap": "local-leap",
    "revised-parallel": "revised-parallel",
    "maskgit 12": "masked-parallel:steps=12",
    "halton 12": "masked-parallel:order=halton:choose=first:choice=0.0",
    "autoregressive": "autoregressive",
    "jacobi": "jacobi",
    "mc-sjd": "mc-sjd",
}

Row = dict[str, Any]
Made = tuple[Tensor, Stats, float]
"""Tokens `[B, L]` int64, what they cost, and positions that the model processed, a row."""


@dataclass(frozen=True, eq=False)
class Oracle(RunPolicy):
    """The headroom of a model: how many tokens a pass any rule could commit that keeps stepwise
    decoding's tokens.

    At every pass it commits all open slots whose drawn token is the one that stepwise decoding put
    there, which it is told; a pass without one commits the most confident slot's all the same. From
    the same canvas no rule that keeps these tokens commits more in that pass. (Slots that wait may
    be right later, so that it is the best rule of one pass, and not proven to be the best of all.)
    Nemotron-Labs-Diffusion's authors compare confidence thresholds with such an oracle (2026).

    Args:
        wanted: `[B, L]` int64, the tokens of `Stepwise` with the same noise.
        block, cache: as in `Stepwise`.
    """

    wanted: Tensor
    block: int | None = None
    cache: CachePlan | str = "none"

    exactness: ClassVar[Exactness] = "bitwise"

    def __repr__(self) -> str:
        return f"Oracle(block={self.block}, cache={self.cache!r})"

    def decode(self, run: CanvasRun) -> Generation:
        wanted = self.wanted.to(run.canvas.tokens.device)
        with run.interruptible():
            while run.sync():
                predictions = run.forward()
                tokens = wanted.gather(1, predictions.slots)
                is_right = predictions.is_open & (predictions.drawn == tokens)
                chosen = predictions.at_least_one(is_right)
                run.commit(replace(predictions, drawn=tokens), chosen)
        return run.generation()


@dataclass(frozen=True)
class AnswerWords:
    """A layout of free slots in which no id may stand that is no word of an answer."""

    n_ids: int
    columns: int = 0
    frame: int = 0

    def forced(self, slots: Tensor) -> None: ...

    def allowed(self, slots: Tensor) -> Tensor:
        ids = torch.arange(self.n_ids, device=slots.device)
        return (ids != grammar.PAD) & (ids != grammar.BOS) & (ids != grammar.ASK)


class GrammarText:
    """`grammar-masked` as a denoiser with its prompts, from a folder of it."""

    length = grammar.CANVAS

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        model = load_model(AutoModelForCausalLM, folder, LoadConfig(device=device))
        shift = read_words(folder)["logit_shift"]
        self.model = MaskedLM(model, grammar.MASK, shift=shift, vocab_size=grammar.MASK)

    def prompt(self, prompts: Sequence[grammar.Words]) -> Prompt:
        """Prompts of B rows; a row ends after its first `end`."""
        rows = [torch.tensor(grammar.encode_prompt(words), dtype=torch.int64) for words in prompts]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=grammar.PAD)
        tokens = tokens.to(self.model.device)
        lengths = tokens.new_tensor([len(row) for row in rows])
        stop = tokens.new_tensor([grammar.END])
        return Prompt(tokens, lengths, stop_tokens=stop, layout=AnswerWords(grammar.MASK))

    def decode(
        self, policy: Any, prompts: Sequence[grammar.Words], seed: int
    ) -> tuple[Tensor, Stats]:
        """Canvases `[B, L]` at temperature 1, `end` after the rows' ends as the checker wants it;
        prompt k has item k of the noise of `seed`."""
        noise = Noise.from_seed(seed, len(prompts), self.model.device)
        prompt = self.prompt(prompts)
        made = policy.sample(self.model, prompt, self.length, params=SamplingParams(), noise=noise)
        slots = torch.arange(self.length, device=made.tokens.device)
        tokens = made.tokens.masked_fill(slots >= made.lengths[:, None], grammar.END)
        return tokens.cpu(), made.stats


def measure_text(folder: Path, policies: Mapping[str, Any], count: int, seed: int) -> Iterator[Row]:
    """Rows of `grammar-masked`. `quality` is the share of right answers, of all and by task, and
    `total_variation`, the mean distance of 100 draws from the true distribution over prompts whose
    right answers can be counted, with its `floor`, the distance that sampling noise alone gives.
    """
    text = GrammarText(folder)
    groups = [
        grammar.make_examples(grammar.EVALUATION_SEED, range(count), t) for t in grammar.TASKS
    ]
    prompts = [example.prompt for group in groups for example in group]
    few = [p for p in prompts if p[0] in _ENUMERABLE and len(grammar.right_answers(p)) <= 24]
    few = few[:: max(1, len(few) // _PROMPTS)][:_PROMPTS]

    def decode(policy: Any) -> Made:
        tokens, stats = text.decode(policy, prompts, seed)
        return tokens, stats, stats.positions / len(prompts)

    measured: dict[str, Row] = {}
    for policy, tokens, row in _measure("grammar-masked", policies, decode):
        answers = map(grammar.decode_answer, tokens.tolist())
        right = [a in grammar.right_answers(p) for p, a in zip(prompts, answers, strict=True)]
        quality = {"right": sum(right) / len(right)}
        for k, task in enumerate(grammar.TASKS):
            quality[task] = sum(right[k * count : (k + 1) * count]) / count
        is_stepwise = row["same"] == len(tokens) and row["exactness"] == "bitwise"
        key = _order(policy) if is_stepwise else row["policy"]
        if key not in measured:  # the same tokens have the same distribution
            measured[key] = _measure_distribution(text, policy, few, seed + 1)
        yield row | {"quality": quality | measured[key]}


def _measure_distribution(
    text: GrammarText, policy: Any, prompts: Sequence[grammar.Words], seed: int
) -> Row:
    canvases = text.decode(policy, [p for p in prompts for _ in range(_DRAWS)], seed)[0].tolist()
    distance = floor = 0.0
    for k, prompt in enumerate(prompts):
        answers = grammar.right_answers(prompt)
        drawn = Counter(map(grammar.decode_answer, canvases[k * _DRAWS : (k + 1) * _DRAWS]))
        counts = [drawn[answer] for answer in answers]
        found = torch.tensor([*counts, _DRAWS - sum(counts)]).double() / _DRAWS  # wrong ones last
        even = torch.tensor([1 / len(answers)] * len(answers) + [0.0], dtype=torch.float64)
        distance += total_variation(found, even) / len(prompts)
        floor += sampling_floor(even, _DRAWS) / len(prompts)
    return {"total_variation": distance, "floor": floor}


def measure_images(
    source: Path, name: str, policies: Mapping[str, Any], given: argparse.Namespace
) -> Iterator[Row]:
    """Rows of a model of images, with its own guidance and filters; image k has seed `seed + k`.
    `quality` holds the checker's scores, and `positions` counts what went into the model, guidance
    and prompts with it.
    """
    pipe: Any = open_pipeline(str(source), LoadOptions(device="cpu"))
    n, captions = given.count, make_captions(CAPTION_SEED, range(given.count))

    def decode(policy: Any) -> Made:
        entries: list[int] = []
        hook = pipe.model.model.get_input_embeddings().register_forward_pre_hook(
            lambda _, ids: entries.append(ids[0].numel())
        )
        size = n if isinstance(policy, Oracle) else given.batch_size
        seeds = range(given.seed, given.seed + n)
        try:
            made = pipe(captions, policy=policy, seed=seeds, batch_size=size)
        finally:
            hook.remove()
        return made.tokens, made.stats, sum(entries) / n

    for _, tokens, row in _measure(name, policies, decode):
        pixels = pipe.image_model.tokenizer.decode(tokens)
        verdicts = [{**vars(v), "whole": v.whole} for v in check_images(pixels, captions)]
        quality = {name: sum(v[name] for v in verdicts) / n for name in verdicts[0]}
        yield row | {"quality": quality}


def _measure(
    model: str, policies: Mapping[str, Any], decode: Callable[[Any], Made]
) -> Iterator[tuple[Any, Tensor, Row]]:
    plain: dict[tuple[str, int | None], tuple[Tensor, float]] = {}
    for label, policy in policies.items():
        tokens, stats, positions = decode(policy)
        block = getattr(policy, "block", None)
        order, n = (_order(policy), block), len(tokens)
        if isinstance(policy, Stepwise) and order not in plain:
            plain[order] = tokens, decode(Oracle(tokens, block))[1].tokens_per_pass
        same = oracle = share = differ = None
        if order in plain:
            reference, oracle = plain[order]
            same = int((reference == tokens).all(1).sum())
            differ = float((reference != tokens).float().mean())
            share = stats.tokens_per_pass / oracle
        row = {
            "model": model,
            "policy": label,
            "settings": stats.policy,
            "exactness": stats.exactness,
            "rows": n,
            "tokens": stats.tokens / n,
            "passes": stats.row_passes / n,
            "tokens_per_pass": stats.tokens_per_pass,
            "oracle": oracle,
            "oracle_share": share,
            "canvases": stats.canvases / n,
            "positions": positions,
            "nats": stats.nats / n,
            "same": same,
            "differ": differ,
            "seconds": stats.seconds,
        }
        yield policy, tokens, row


def _order(policy: Any) -> str:
    return str(getattr(policy, "order", "confidence"))


def sum_up(rows: Sequence[Row]) -> list[Row]:
    """Accuracy under parallelism of each policy's settings, by their points (tokens a pass,
    accuracy in percent).

    Y.-Y. Qian et al., "d3LLM: Ultra-Fast Diffusion LLM using Pseudo-Trajectory Distillation", ICML
    2026 (arXiv 2601.07568): the area under accuracy over tokens a pass, where an accuracy y counts
    with weight exp(-3 (1 - y / y_max)) and those 5 below the slowest setting's not at all. y_max is
    the best that was measured.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        accuracy = 100 * row["quality"].get("right", row["quality"].get("whole"))
        points.setdefault(row["settings"].partition("(")[0], []).append(
            (row["tokens_per_pass"], accuracy)
        )
    best = max(y for own in points.values() for _, y in own)
    found = []
    for policy, own in points.items() if best else ():
        ordered = sorted(own)
        kept = [point for point in ordered if point[1] >= ordered[0][1] - 5]
        area = ordered[0][0] * ordered[0][1]
        for left, right in zip(kept, kept[1:]):
            heights = sum(y * math.exp(-3 * (1 - y / best)) for _, y in (left, right))
            area += (right[0] - left[0]) * heights / 2
        row = {"model": rows[0]["model"], "policy": policy, "aup": area, "points": own}
        found.append(row)
    return found


def measure_model(given: argparse.Namespace) -> Iterator[Row]:
    """Rows of a model, those of window policies last."""
    labels = given.policies.split(",") if given.policies else [*SETUPS]
    policies = {label: read_policy(SETUPS.get(label, label)) for label in labels}
    canvas = {label: own for label, own in policies.items() if getattr(own, "kind", "") == "canvas"}
    source = WEIGHTS / given.model
    if not source.is_dir():
        source = find_source(given.model)
    if read_masked(source) is None:
        yield from measure_text(source, canvas, given.count, given.seed)
        return
    window = {label: own for label, own in policies.items() if label not in canvas}
    unending = {  # no token ends an image
        label: own for label, own in canvas.items() if getattr(own, "end_threshold", None) is None
    }
    for folder, some in ((source, unending), (tokenizer_folder(source), window)):
        if some:
            yield from measure_images(folder, source.name, some, given)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="grammar-masked, scenes-masked or a folder of such a model")
    parser.add_argument("--policies", help="labels or policies, with commas; by default all")
    parser.add_argument("--count", type=int, default=16, help="prompts, of texts for each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=1, help="images made together")
    given = read_arguments(parser)
    rows: list[Row] = []
    for row in measure_model(given):
        rows.append(row)
        print(row, flush=True)
        facts = {"count": given.count, "seed": given.seed}
        write_measured(given.json, **facts, canvas=rows, parallelism=sum_up(rows))
    for row in sum_up(rows):
        print(f"accuracy under parallelism of {row['policy']}: {row['aup']:.0f}")


if __name__ == "__main__":
    main()
