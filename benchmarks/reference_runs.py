"""Shows that a change of the code changes nothing that it makes: a fixed set of runs, recorded.

    python benchmarks/reference_runs.py --write benchmarks/results/reference_runs.json
    python benchmarks/reference_runs.py --check benchmarks/results/reference_runs.json
    python benchmarks/reference_runs.py --check FILE --only "llama"

`--write` makes all runs and records them. `--check` makes them again, prints a table of what
differs, and exits with 1 if anything does. `--only` takes the runs whose name contains a text;
together with `--write` it replaces these runs in a file that exists and leaves the others.

A run is recorded as the checksum and shape of its tokens, the tokens and passes of each row where
they are known, and figures of its statistics. Seconds are not recorded. The wording of a fallback
is recorded but not compared: only how many there were. Runs whose passes depend on the clock
(adaptive windows, measured drafts) are recorded by their tokens alone.
Nothing is compiled: when passes are, and with which last bits, depends on the clock.

Recorded and checked runs must come from the same machine and the same versions of the libraries:
random weights, rounding and hence tokens may differ on others. The file names both.

A policy stands in the tables as the command line takes it. Every family of models has one function
here, and that function alone imports how the family is built, from `tests` or from the library. A
name that moves is mended there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout's code and its tests, whatever is installed
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
os.environ |= {"TRANSFORMERS_VERBOSITY": "critical", "DIFFUSERS_VERBOSITY": "critical"}

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import mmaccel  # noqa: E402
from benchmarks.rows import write_report  # noqa: E402
from mmaccel.catalog import MODELS, read_policy  # noqa: E402

Row = dict[str, Any]
Options = dict[str, Any]
Policies = dict[str, Any]
"""Policies by their names in runs: texts, or policies."""
Runs = Iterator[tuple[str, Callable[[], Row]]]
"""Names of runs, and functions that make them."""

SEEDS = [11, 7, 2**40 + 3]
PROMPTS = [[5, 9, 7], [8], [11, 6, 4, 21, 30]]  # ids, for tiny models of 40 ids


# --- what is recorded of a run --------------------------------------------------------------------


def checksum(parts: list[Tensor]) -> str:
    """SHA-256 of the tensors' values; integers as int64."""
    digest = hashlib.sha256()
    for part in parts:
        values = part.detach().cpu().contiguous()
        values = values if values.dtype.is_floating_point else values.to(torch.int64)
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def describe(tokens: Tensor | list[Tensor], stats: Any = None, **others: Any) -> Row:
    """A run's row: tokens `[B, L]`, or a list of tensors; its statistics, if they are recorded."""
    parts = [tokens] if isinstance(tokens, Tensor) else list(tokens)
    shapes = [list(part.shape) for part in parts]
    row: Row = {
        "checksum": checksum(parts),
        "shape": shapes[0] if isinstance(tokens, Tensor) else shapes,
    }
    row |= {name: value.tolist() for name, value in others.items()}
    if stats is not None:
        for name in ("tokens", "passes", "tokens_per_pass", "exactness", "total_variation", "nats"):
            value = getattr(stats, name)
            row[name] = round(value, 9) if isinstance(value, float) else value
        row["fallbacks"] = list(stats.fallbacks)
    return row


# --- what the library is asked for ----------------------------------------------------------------


def decode(policy: Any, model: Any, prompt: Any, length: int, options: Options) -> Row:
    noise = mmaccel.Noise.from_seed(SEEDS[: prompt.batch], prompt.batch)
    sampling = mmaccel.SamplingParams(**options)
    policy = read_policy(policy)
    made = policy.sample(model, prompt, length, params=sampling, noise=noise)
    return describe(made.tokens, made.stats, lengths=made.lengths, passes_by_row=made.passes)


def draw(
    pipe: Any, prompts: list[str], policy: Any, length: int | None = None, **options: Any
) -> Row:
    """A run of a text-to-image pipeline; rows end after `length` tokens, None draws whole images.

    Pixels are in the checksum of whole images.
    """
    ends, tokens_only = [], options.pop("tokens_only", False)

    def end(progress: Any) -> Tensor | None:
        ends[:] = [progress.lengths]
        return None if length is None else torch.full_like(progress.lengths, length)

    seeds = [seed % 2**31 for seed in SEEDS[: len(prompts)]]
    made = pipe(prompts, policy=read_policy(policy), seed=seeds, on_step=end, **options)
    parts = [made.tokens]
    if length is None:
        parts += [pixels_of(image) for image in made.images]
    if tokens_only:
        return describe(parts)
    return describe(parts, made.stats, lengths=ends[0], passes_by_row=made.passes)


def attached(target: Any, policy: Any, call: Callable[[], Any], **options: Any) -> Row:
    """A call of a model, or a pipeline, that a policy is attached to."""
    torch.manual_seed(1)
    with mmaccel.attach(target, policy, **({"seed": 3, "compile": False} | options)) as handle:
        out = call()
    for name in ("sequences", "images"):
        out = getattr(out, name, out)
    return describe(out, handle.stats)


def pixels_of(image: Any) -> Tensor:
    import numpy

    return torch.from_numpy(numpy.asarray(image.convert("RGB")).copy())


# --- settings and conditions ----------------------------------------------------------------------

WINDOW: Policies = {
    "autoregressive": "autoregressive",
    "jacobi": "jacobi",
    "jacobi, window 8": "jacobi:window=8",
    "jacobi, window 1": "jacobi:window=1",
    "jacobi, drafts random": "jacobi:window=16:drafts=random",
    "jacobi, drafts left": "jacobi:window=16:drafts=left",
    "jacobi, drafts above": "jacobi:window=16:drafts=above",
    "jacobi, drafts ngram": "jacobi:window=16:drafts=ngram",
    "sjd": "sjd",
    "sjd, window 8, drafts left": "sjd:window=8:drafts=left",
    "mc-sjd": "mc-sjd",
    "mc-sjd, window 8": "mc-sjd:window=8",
    "mc-sjd, drafts random": "mc-sjd:window=16:drafts=random",
    "mc-sjd, drafts ngram": "mc-sjd:window=16:drafts=ngram",
    "gumbel-sjd": "gumbel-sjd",
    "gumbel-sjd, window 8, drafts above": "gumbel-sjd:window=8:drafts=above",
    "speculative": "speculative",
    "prompt-lookup": "prompt-lookup",
    "prompt-lookup, window 16": "prompt-lookup:window=16",
    "gsd": "gsd",
    "gsd, group 3, gap 0.4, independent":
        "gsd:window=8:group=3:max_gap=0.4:coupling=independent",
    "gsd, group 12, gap 0.3, gumbel": "gsd:window=16:group=12:max_gap=0.3:coupling=gumbel",
}  # fmt: skip


def stepwise(kind: str, block: int, **fields: Any) -> Any:
    return mmaccel.Stepwise(block=block, cache=mmaccel.CachePlan(kind, **fields))  # type: ignore[arg-type]


HALTON = "order=halton:choose=first:choice=0.0"
CANVAS: Policies = {
    "stepwise": "stepwise",
    **{
        f"stepwise, order {order}": f"stepwise:order={order}"
        for order in ("entropy", "margin", "left", "random", "halton", "sampled")
    },
    "stepwise, block 8": "stepwise:block=8",
    "stepwise, cache prefix": "stepwise:block=8:cache=prefix",
    "stepwise, cache dual": "stepwise:block=8:cache=dual",
    "stepwise, cache dual, refresh 3, far 4": stepwise("dual", 8, refresh=3, far=4),
    "stepwise, cache vicinity": stepwise("vicinity", 8, margin=2, refresh=4),
    "lossless-unmask": "lossless-unmask:drafts=8",
    "lossless-unmask, 3 drafts, entropy": "lossless-unmask:drafts=3:order=entropy",
    **{
        f"lossless-unmask, order {order}": f"lossless-unmask:drafts=8:order={order}"
        for order in ("left", "random", "halton")
    },
    "lossless-unmask, cache prefix": "lossless-unmask:drafts=4:block=8:cache=prefix",
    "lossless-unmask, cache dual, as entries":
        "lossless-unmask:drafts=4:block=8:cache=dual:layout=entries",
    "lossless-unmask, as entries": "lossless-unmask:drafts=4:layout=entries",
    "entropy-bounded": "entropy-bounded",
    "entropy-bounded, gamma 0.5": "entropy-bounded:gamma=0.5",
    "entropy-bounded, gamma 4, cache prefix": "entropy-bounded:gamma=4.0:block=8:cache=prefix",
    "entropy-bounded, budget 2": "entropy-bounded:budget_nats=2.0",
    "entropy-bounded, unchanged block ends": "entropy-bounded:gamma=0.1:block=8:settled=0.05",
    "confident-parallel": "confident-parallel",
    "confident-parallel, threshold 0.5": "confident-parallel:threshold=0.5",
    "confident-parallel, profile 0.5, cache dual":
        "confident-parallel:rule=frechet:factor=0.5:block=8:cache=dual",
    "kl-stable": "kl-stable",
    "kl-stable, threshold 0.5, kl 0.5, 1 step": "kl-stable:threshold=0.5:kl=0.5:steps=1",
    "local-leap": "local-leap",
    "local-leap, anchor 0.6, radius 2, 0.3": "local-leap:anchor=0.6:radius=2:relaxed=0.3",
    "adaptive-block": "adaptive-block",
    "adaptive-block, delimiters, cache prefix":
        "adaptive-block:delimiters=(3, 5, 8, 12, 13):tau=0.1:threshold=0.6:block=8:cache=prefix",
    "revised-parallel": "revised-parallel",
    "revised-parallel, shadow 0.5, cache prefix":
        "revised-parallel:threshold=0.3:least=0.5:block=8:cache=prefix",
    "revised-parallel, edit": "revised-parallel:threshold=0.3:revise=edit:budget=4",
    "revised-parallel, redo": "revised-parallel:threshold=0.3:revise=redo",
    "masked-parallel": "masked-parallel",
    "masked-parallel, 6 steps, linear": "masked-parallel:steps=6:schedule=linear",
    "masked-parallel, 5 steps, first": "masked-parallel:steps=5:choose=first",
    "masked-parallel, halton": f"masked-parallel:steps=6:{HALTON}",
    "masked-parallel, random, arccos, cache dual":
        "masked-parallel:steps=3:order=random:schedule=arccos:block=8:cache=dual",
    "masked-parallel, one slot a pass": f"masked-parallel:steps=None:{HALTON}",
}  # fmt: skip
ENDING: Policies = {  # where a token ends an answer
    f"{name}, end at 0.5, {'drop' if drop else 'keep'} the rest":
        f"{name}:end_threshold=0.5:drop_suffix={drop}"
    for name in ("entropy-bounded", "confident-parallel", "masked-parallel", "revised-parallel")
    for drop in (False, True)
}  # fmt: skip


def conditions() -> list[tuple[str, int, Options]]:
    """Name, batch size and sampling options: 9 of all combinations, with every pair of values of
    batch size, guidance, temperature and truncation in at least one of them.
    """
    found = []
    for i, temperature in enumerate((1.0, 0.8, 0.0)):
        for j, cut in enumerate(({}, {"top_k": 20}, {"top_p": 0.9})):
            batch = (1, 3, 3)[(i + j) % 3]
            guidance = (2.0, 1.0, 1.0)[(i + 2 * j) % 3]
            name = f"batch {batch}, guidance {guidance:g}, temperature {temperature:g}"
            name += "".join(f", {key.replace('_', '-')} {value}" for key, value in cut.items())
            options = {"guidance_scale": guidance, "temperature": temperature, **cut}
            found.append((name, batch, options))
    return found


CONDITIONS = conditions()


def cross(policies: Policies, make: Callable[[Any, int, Options], Row], of_others: int = 2) -> Runs:
    """A policy's first setting under all conditions, its other ones under `of_others` of them."""
    seen: set[str] = set()
    for k, (label, policy) in enumerate(policies.items()):
        short_name = label.partition(",")[0]
        chosen = [(2 * k + 4 * n) % len(CONDITIONS) for n in range(of_others)]
        for at in chosen if short_name in seen else range(len(CONDITIONS)):
            name, batch, options = CONDITIONS[at]
            yield f"{label} | {name}", partial(make, policy, batch, dict(options))
        seen.add(short_name)


def cycle(
    policies: Policies, options: dict[str, Options], shift: int = 0
) -> Iterator[tuple[str, Any, Options]]:
    """Every policy with one of the options, in turn: (name of both, policy, options)."""
    for k, (label, policy) in enumerate(policies.items()):
        name = list(options)[(k + shift) % len(options)]
        yield f"{label} | {name}", policy, options[name]


def cycle_all(
    names: Iterable[str],
    policies: Policies,
    options: dict[str, Options],
    batches: Sequence[Any],
    make: Callable[[str, Any, Any, Options], Row],
) -> Runs:
    """The same for each model; batch sizes take turns, too."""
    for k, name in enumerate(names):
        for n, (label, policy, given) in enumerate(cycle(policies, options, k)):
            batch = batches[n % len(batches)]
            yield (
                f"{name} | {label}, batch {batch or 'of all'}",
                partial(make, name, policy, batch, given),
            )


# --- embedded models ------------------------------------------------------------------------------


@cache
def embedded(name: str) -> Any:
    return mmaccel.TextToImage.from_pretrained(name, device="cpu", compile=False)


def scenes() -> Runs:
    """Window policies on the embedded next-token model."""
    prompts = list(MODELS["scenes"].examples)

    def make(policy: Any, rows: slice, length: int | None, options: Options) -> Row:
        return draw(embedded("scenes"), prompts[rows], policy, length, **options)

    yield from cross(WINDOW, lambda policy, batch, given: make(policy, slice(batch), 40, given))
    for short_name in dict.fromkeys(label.partition(",")[0] for label in WINDOW):
        for guidance in (1.0, 2.0):
            given = {"guidance_scale": guidance}
            own = partial(make, short_name, slice(3, 5), None, given)
            yield f"{short_name} | whole images, guidance {guidance:g}", own
    adaptive = partial(make, "jacobi:window=adaptive", slice(3), None, {"tokens_only": True})
    yield "jacobi, adaptive window, tokens only", adaptive
    for short_name in ("autoregressive", "jacobi", "mc-sjd"):
        yield f"{short_name} | 5 requests, 2 at a time", partial(_requests, short_name)


def _requests(short_name: str) -> Row:
    """More prompts than are decoded at a time, with rows that are replaced when they finish."""
    pipe, made = embedded("scenes"), {}
    prompts = MODELS["scenes"].examples[:5]
    asked = [mmaccel.Request(prompt, 40 + k) for k, prompt in enumerate(prompts)]

    def keep(output: Any) -> None:
        made[output.request.seed] = output

    sampling = mmaccel.SamplingParams(guidance_scale=2.0, top_k=30)
    stats = pipe.serve(asked, sampling, policy=read_policy(short_name), rows=2, deliver=keep)
    outputs = [made[request.seed] for request in asked]
    passes = torch.tensor([output.passes for output in outputs])
    return describe([output.tokens for output in outputs], stats, passes_by_row=passes)


def scenes_masked() -> Runs:
    """Canvas policies on the embedded masked model of 256 slots; costly, and hence few."""
    prompts = list(MODELS["scenes-masked"].examples)
    settings = [  # label, policy, batch size, slots
        ("stepwise", "stepwise", 1, 12),
        ("stepwise, halton", "stepwise:order=halton", 1, 12),
        ("stepwise, cache dual", "stepwise:block=32:cache=dual", 3, 24),
        ("lossless-unmask, halton", "lossless-unmask:order=halton:drafts=4", 1, 12),
        ("lossless-unmask, cache prefix", "lossless-unmask:drafts=4:block=32:cache=prefix", 1, 24),
        ("entropy-bounded, gamma 4", "entropy-bounded:gamma=4.0", 1, 24),
        ("entropy-bounded, budget 8", "entropy-bounded:budget_nats=8.0", 1, 12),
        ("confident-parallel, profile",
         "confident-parallel:rule=frechet:block=32:cache=vicinity", 3, 24),
        ("kl-stable", "kl-stable:block=32:cache=dual", 1, 24),
        ("local-leap", "local-leap:block=32:cache=dual", 1, 24),
        ("revised-parallel", "revised-parallel:block=16:cache=prefix", 1, 24),
        ("masked-parallel, 6 steps", "masked-parallel:steps=6", 3, 256),
        ("masked-parallel, halton", f"masked-parallel:steps=6:{HALTON}", 1, 256),
    ]  # fmt: skip

    def make(policy: str, batch: int, slots: int, options: Options) -> Row:
        length = None if slots == 256 else slots
        return draw(embedded("scenes-masked"), prompts[:batch], policy, length, **options)

    for k, (label, policy, batch, slots) in enumerate(settings):
        options = [{}, {"guidance_scale": 1.0, "top_p": 0.9}, {"temperature": 0.0}][k % 3]
        said = ", ".join(f"{name.split('_')[0]} {value}" for name, value in options.items())
        name = f"{label} | batch {batch}, {slots} slots, {said or 'as recommended'}"
        yield name, partial(make, policy, batch, slots, options)


def next_scale() -> Runs:
    """Tiny models that draw scale by scale: of classes and texts, and images of a folder."""
    options: dict[str, Options] = {
        "guidance 3": {"guidance_scale": 3.0},
        "no guidance, top-k 5": {"top_k": 5},
        "guidance 2, greedy": {"guidance_scale": 2.0, "temperature": 0.0},
    }
    policies: Policies = {
        "next-scale": "next-scale",
        "stepwise": "stepwise",
        "lossless-unmask": "lossless-unmask:drafts=4",
        "masked-parallel": "masked-parallel:steps=2",
    }

    def make(kind: str, policy: Any, batch: int, given: Options) -> Row:
        from tests.fixtures import next_scale as tiny

        branches = 2 if "guidance_scale" in given else 1
        prompt = tiny.prompt(kind, range(batch), branches=branches)
        return decode(policy, tiny.build(kind), prompt, tiny.N_SLOTS, given)

    def images() -> Row:
        from tests.fixtures.next_scale import build_folder
        from tests.fixtures.tiny_model import CAPTIONS

        pipe = mmaccel.TextToImage.from_pretrained(build_folder(_folder() / "scales"))
        return draw(pipe, CAPTIONS, "next-scale", guidance_scale=2.0)

    yield from cycle_all(("class", "shared", "text"), policies, options, (3, 1, 3), make)
    yield "images", images


@cache
def _grammar() -> Any:
    from benchmarks.canvas import WEIGHTS, GrammarText

    return GrammarText(WEIGHTS / "grammar-masked")


def grammar_masked() -> Runs:
    """Canvas policies on the embedded masked text model of 24 slots."""

    def make(policy: Any, batch: int, options: Options) -> Row:
        from dataclasses import replace

        from scripts.training.grammar_tasks import make_examples

        text = _grammar()
        guided = options["guidance_scale"] != 1.0
        examples = [example.prompt for example in make_examples(5, range(2 * batch))]
        prompt = text.prompt(examples if guided else examples[:batch])
        prompt = replace(prompt, branches=2) if guided else prompt
        return decode(policy, text.model, prompt, text.length, options)

    yield from cross(CANVAS, make)
    for label, policy in ENDING.items():  # not the first settings of their policies
        for name, batch, options in (CONDITIONS[at] for at in (0, 3, 8)):
            yield f"{label} | {name}", partial(make, policy, batch, options)


def _folder() -> Path:
    folder = Path(os.environ["REFERENCE_RUNS_FOLDER"]) / str(os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def _tiny_images() -> tuple[Path, Path, list[str]]:
    """Folders of a masked and a next-token model of 16 tokens an image, and three prompts."""
    from tests.fixtures.tiny_model import CAPTIONS, masked_beside_plain

    return *masked_beside_plain(_folder() / "tiny"), list(CAPTIONS)


def tiny_masked() -> Runs:
    """Canvas policies on a grid, with guidance."""

    @cache
    def pipe() -> Any:
        return mmaccel.TextToImage.from_pretrained(_tiny_images()[0], device="cpu", compile=False)

    def make(policy: Any, batch: int, options: Options) -> Row:
        return draw(pipe(), _tiny_images()[2][:batch], policy, **options)

    yield from cross(CANVAS, make, of_others=1)
    measured = partial(make, "lossless-unmask", 3, {"tokens_only": True})
    yield "lossless-unmask by measured cost, tokens only", measured


# --- models of transformers -----------------------------------------------------------------------

TEXT_OPTIONS: dict[str, Options] = {
    "greedy": dict(do_sample=False),
    "temperature 0.8, top-k 9": dict(do_sample=True, temperature=0.8, top_k=9),
    "top-p 0.7, temperature 1.4": dict(do_sample=True, top_k=0, top_p=0.7, temperature=1.4),
    "guidance 1.6": dict(do_sample=True, guidance_scale=1.6, top_k=12),
    "repetition penalty 1.5": dict(do_sample=True, repetition_penalty=1.5, top_k=20),
    "greedy, no repeated pair": dict(do_sample=False, no_repeat_ngram_size=2),
    "min-p 0.1, at least 6": dict(do_sample=True, min_p=0.1, min_new_tokens=6),
}
TEXT_POLICIES: Policies = {
    "autoregressive": "autoregressive",
    "jacobi, window 5": "jacobi:window=5",
    "jacobi, drafts ngram": "jacobi:window=9:drafts=ngram",
    "sjd": "sjd:window=6",
    "mc-sjd": "mc-sjd:window=6",
    "gumbel-sjd": "gumbel-sjd:window=6",
    "prompt-lookup": "prompt-lookup",
    "gsd": "gsd:window=6:max_gap=0.3",
}


@cache
def _text_model(name: str) -> Any:
    """Tiny language models with random weights."""
    import transformers

    from tests.fixtures.tiny_lms import build_lm

    foreign: dict[str, tuple[str, Options]] = {
        "opt": ("OPT", dict(ffn_dim=64, word_embed_proj_dim=32)),
        "falcon": ("Falcon", dict(intermediate_size=64)),
    }
    if name not in foreign:
        return build_lm(name)
    kind, own = foreign[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.25,
        init_std=0.25,
        max_position_embeddings=96,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
        hidden_size=32,
        **own,
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def _padded(batch: int = 3) -> dict[str, Tensor]:
    """Prompts, padded on the left."""
    from tests.fixtures.tiny_lms import left_padded

    return left_padded(PROMPTS[:batch])


def text_models() -> Runs:
    """`generate` of language models under window policies."""
    names = ("llama", "qwen2", "gemma", "cohere", "mistral", "gemma3", "olmo3", "qwen3", "gpt2")

    def make(name: str, policy: Any, options: Options, batch: int = 3, **how: Any) -> Row:
        model = _text_model(name)
        given = {"max_new_tokens": 24} | options
        call = partial(model.generate, **_padded(batch), **given)
        return attached(model, policy, call, **how)

    for k, name in enumerate((*names, "opt", "falcon", "lfm2")):
        batch = (3, 1)[k % 2]
        for label, policy, options in cycle(TEXT_POLICIES, TEXT_OPTIONS, k):
            yield f"{name} | {label}, batch {batch}", partial(make, name, policy, options, batch)
    jacobi = "jacobi:window=6"
    for label, options in TEXT_OPTIONS.items():
        yield f"llama | jacobi, window 6 | {label}", partial(make, "llama", jacobi, options)

    def with_draft_model(options: Options) -> Row:
        small = mmaccel.CausalLMWindow(_text_model("qwen2"))
        return make("llama", mmaccel.Speculative(window=4, draft_model=small), options)

    for label in ("greedy", "temperature 0.8, top-k 9", "guidance 1.6"):
        yield f"llama | draft model | {label}", partial(with_draft_model, TEXT_OPTIONS[label])

    def with_rule(rule: Callable[[], Any]) -> Row:
        from transformers import LogitsProcessorList

        options = dict(do_sample=True, logits_processor=LogitsProcessorList([rule()]))
        return make("llama", jacobi, options)

    rules: dict[str, Callable[[], Any]] = {
        "repetition-aware": partial(mmaccel.RepetitionAwareSampling, top_k=6),
        "penalty of the last 3": partial(mmaccel.WindowedRepetitionPenalty, 1.8, 3),
    }
    for kind, rule in rules.items():
        yield f"llama | jacobi, {kind}", partial(with_rule, rule)
    grid = mmaccel.Grid(rows=2, width=3, vocab_size=40, tokens=(10, 30), row_end=31)
    for label in ("greedy", "temperature 0.8, top-k 9"):
        for policy in ("autoregressive", "mc-sjd"):
            options = TEXT_OPTIONS[label]
            own = partial(make, "llama", policy, options, layout=grid)
            yield f"llama | {policy}, on a grid | {label}", own
    beams = {"num_beams": 2, "do_sample": False}
    yield "llama | jacobi, beams fall back", partial(make, "llama", jacobi, beams)
    sampled = TEXT_OPTIONS["top-p 0.7, temperature 1.4"]
    seeded = partial(make, "llama", jacobi, sampled, seed=[4, 5, 6])
    yield "llama | jacobi, a seed for each row", seeded

    def one_call() -> Row:
        way = mmaccel.decoder("jacobi", seed=3)
        options = {"max_new_tokens": 24, "do_sample": True, "custom_generate": way}
        return describe(_text_model("qwen2").generate(**_padded(), **options))

    yield "qwen2 | decoder of one call", one_call


def image_models() -> Runs:
    """`generate` of transformers' image families under window policies."""
    options: dict[str, Options] = {
        "greedy": dict(do_sample=False),
        "temperature 0.9, top-k 12": dict(do_sample=True, top_k=12, temperature=0.9),
        "top-p 0.8": dict(do_sample=True, top_k=0, top_p=0.8),
    }
    rows = [[26, 27, 28, 29], [30, 31], [33, 32, 31, 30, 29, 28]]

    @cache
    def build(name: str) -> Any:
        from tests.fixtures.windows import build_janus, build_model

        return build_janus() if name == "janus" else build_model(name)

    def make(name: str, policy: Any, batch: int, given: Options) -> Row:
        from tests.fixtures.windows import LENGTHS, janus_prompts, prompts

        model = build(name)
        if name == "janus":
            inputs = janus_prompts(rows[:batch])
            given = given | dict(generation_mode="image", guidance_scale=3.0)
        else:
            inputs = prompts(name, rows[:batch])
            given = given | {"max_new_tokens": LENGTHS.get(name, 24)}
        return attached(model, policy, partial(model.generate, **inputs, **given))

    names = ("imagegpt", "chameleon", "lumina", "emu3", "glm_image", "janus")
    yield from cycle_all(names, TEXT_POLICIES, options, (3, 1, 3), make)


def glm_image_pipeline() -> Runs:
    """`GlmImagePipeline` of diffusers."""

    def make(policy: str) -> Row:
        from tests.fixtures.glm_pipeline import build_pipeline

        pipe = build_pipeline()
        call = partial(
            pipe,
            ["a cat", "two dogs on a hill"],
            height=128,
            width=128,
            num_inference_steps=1,
            guidance_scale=1.0,
            generator=torch.Generator().manual_seed(5),
            output_type="pt",
        )
        return attached(pipe, policy, call, seed=[4, 5])

    for policy in ("autoregressive", "jacobi", "gumbel-sjd"):
        yield policy, partial(make, policy)


# --- denoisers and diffusion pipelines ------------------------------------------------------------

SOME_CANVAS: Policies = {
    "stepwise": "stepwise",
    "stepwise, order halton": "stepwise:order=halton",
    "lossless-unmask": "lossless-unmask:drafts=4",
    "entropy-bounded": "entropy-bounded:gamma=0.4",
    "entropy-bounded, budget 2": "entropy-bounded:budget_nats=2.0",
    "confident-parallel": "confident-parallel:threshold=0.4",
    "kl-stable": "kl-stable:threshold=0.3:kl=0.5",
    "local-leap": "local-leap:anchor=0.5:relaxed=0.3",
    "adaptive-block": "adaptive-block:delimiters=(3, 5):tau=0.05",
    "masked-parallel": "masked-parallel:steps=4",
}


@cache
def _denoiser(name: str) -> Any:
    """Tiny modules with the forward signatures of published denoisers."""
    from mmaccel.pipelines.hosts.diffusion_lm.masked_lm import MaskedLM
    from mmaccel.pipelines.hosts.diffusion_lm.models import LuminaDenoiser
    from tests.fixtures.denoisers import TinyDream, TinyFastDLLM, TinyLLaDA, TinyLumina
    from tests.fixtures.sdar import TinySDAR
    from tests.fixtures.tiny_lms import build_lm

    mask, fast = {"mask_token_id": 39}, "Fast_dLLM_Qwen"
    endless = {"eos_token_id": None, "pad_token_id": None}
    build: dict[str, Callable[[], Any]] = {
        "llada": lambda: TinyLLaDA(40, model_type="llada", **mask),
        "mmada": lambda: TinyLLaDA(40, model_type="mmada", **mask),
        "dream": lambda: TinyDream(40, model_type="Dream", **mask),
        "sdar": lambda: TinySDAR(40, model_type="sdar", block_size=4, **mask),
        "fast-dllm": lambda: TinyFastDLLM(40, model_type=fast, bd_size=4, **mask),
        "lumina": lambda: LuminaDenoiser(TinyLumina(40), 39, images=(26, 8)),
        "masked qwen3": lambda: MaskedLM(build_lm("qwen3", **endless).double(), 39, shift=1),
        "block-causal llama": lambda: MaskedLM(build_lm("llama", **endless).double(), 39, block=4),
    }
    return build[name]()


def denoisers() -> Runs:
    """`generate` of denoisers under canvas policies."""
    options: dict[str, Options] = {
        "temperature 1": {"temperature": 1.0},
        "temperature 0": {"temperature": 0.0},
        "temperature 0.8, an end": {"temperature": 0.8, "eos_token_id": 5, "pad_token_id": 2},
    }

    def make(name: str, policy: Any, batch: int, given: Options) -> Row:
        """`generate` is there only while a policy is attached."""
        target = _denoiser(name)
        inputs = _padded(batch)

        def call() -> Any:
            return target.generate(**inputs, max_new_tokens=12, **given)

        return attached(target, policy, call)

    names = ("llada", "mmada", "dream", "sdar", "fast-dllm", "lumina", "masked qwen3")
    by_blocks = ("sdar", "fast-dllm", "block-causal llama")
    every = cycle_all((*names, by_blocks[-1]), SOME_CANVAS, options, (3, 3, 1), make)
    for name, run in every:
        if "| adaptive-block |" not in name or not name.startswith(by_blocks):
            yield name, run  # that policy is for models of full attention
    whole = options["temperature 1"]
    for name in ("sdar", "block-causal llama"):
        for label in ("stepwise", "lossless-unmask", "entropy-bounded"):
            policy = f"{SOME_CANVAS[label]}:cache=block"
            yield f"{name} | {label}, cache block", partial(make, name, policy, 3, whole)
    for kind in ("prefix", "dual", "vicinity"):
        for name in ("masked qwen3", "sdar"):
            planned = stepwise(kind, 4, margin=1, refresh=3)
            yield f"{name} | stepwise, cache {kind}", partial(make, name, planned, 3, whole)


def llada2() -> Runs:
    """`LLaDA2Pipeline` of diffusers, over a stand-in of the model."""
    texts = ["hello there", "abc", "a longer prompt than the others"]
    policies: Policies = {
        "cached-blocks": "cached-blocks",
        "stepwise, cache block": "stepwise:cache=block",
        "stepwise": "stepwise",
        "lossless-unmask, cache block": "lossless-unmask:drafts=4:cache=block",
        "entropy-bounded, cache block": "entropy-bounded:gamma=0.5:cache=block",
        "confident-parallel": "confident-parallel:threshold=0.4",
        "masked-parallel, cache block": "masked-parallel:steps=3:cache=block",
    }

    def make(policy: str, reading: str, batch: int, given: Options) -> Row:
        from tests.fixtures.llada2 import build_pipe

        pipe = build_pipe(reading)
        prompt = texts[0] if batch == 1 else texts[:batch]
        given = given | {"gen_length": 20, "generator": torch.Generator().manual_seed(2)}
        seed: int | None = 3
        if policy == "cached-blocks":  # which has steps and draws from the generator
            given["num_inference_steps"] = 4
            seed = None
        return attached(pipe, policy, partial(pipe, prompt=prompt, **given), seed=seed)

    options = {"temperature 1": {"temperature": 1.0}, "temperature 0": {"temperature": 0.0}}
    for n, (label, policy) in enumerate(policies.items()):
        for k, reading in enumerate(("full", "refused", "blocks")):
            if (policy, reading) == ("cached-blocks", "refused"):
                continue  # refuses the pipeline's own mask, too
            name = list(options)[(n + k) % 2]
            batch = (1, 3)[(n + k // 2) % 2]
            own = partial(make, policy, reading, batch, options[name])
            yield f"{label}, mask {reading}, batch {batch} | {name}", own


def diffusion_gemma() -> Runs:
    """DiffusionGemma in transformers and in diffusers' pipeline."""

    def generate(policy: Any, batch: int) -> Row:
        from tests.fixtures.diffusion_gemma import build_model

        model = build_model()
        ids = torch.arange(3, 24).view(3, 7)[:batch]
        return attached(model, policy, partial(model.generate, ids, max_new_tokens=13))

    def pipeline(policy: Any) -> Row:
        from tests.fixtures.diffusion_gemma import build_pipe

        pipe = build_pipe()
        return attached(pipe, policy, partial(pipe, prompt=["hello", "abc"], gen_length=12))

    # this model takes one canvas a row
    labels = [label for label in SOME_CANVAS if label != "lossless-unmask"]
    for n, label in enumerate(labels):
        batch = (1, 3)[n % 2]
        yield f"{label}, batch {batch}", partial(generate, SOME_CANVAS[label], batch)
    for label in ("stepwise", "entropy-bounded"):
        yield f"pipeline | {label}", partial(pipeline, SOME_CANVAS[label])


def amused() -> Runs:
    """`AmusedPipeline` of diffusers."""

    def make(policy: Any, guidance: float, batch: int) -> Row:
        from tests.fixtures.amused import build_pipe

        pipe = build_pipe()
        call = partial(
            pipe,
            ["abc", "x", "yz"][:batch],
            negative_prompt=["no"] * batch,
            guidance_scale=guidance,
            output_type="latent",
        )
        return attached(pipe, policy, call)

    for n, (label, policy) in enumerate(SOME_CANVAS.items()):
        guidance, batch = (3.0, 1.0)[n % 2], (1, 3)[n // 2 % 2]
        own = partial(make, policy, guidance, batch)
        yield f"{label}, batch {batch}, guidance {guidance:g}", own


# --- pipelines over checkpoints -------------------------------------------------------------------


def checkpoints() -> Runs:
    """`TextToImage` over tiny checkpoints of every family it opens."""
    from tests.fixtures.checkpoints import FAMILIES, SIZES, build_checkpoint, captions

    @cache
    def opened(family: str) -> Any:
        path = build_checkpoint(family, _folder() / family)
        pipe = mmaccel.TextToImage.from_pretrained(
            path, size=SIZES.get(family), device="cpu", compile=False
        )
        if family == "glm-image":
            pipe.image_model.diffusion_options = {"num_inference_steps": 1}
        return pipe

    def make(family: str, policy: Any, batch: int, given: Options) -> Row:
        return draw(opened(family), captions(family)[:batch], policy, **given)

    options: dict[str, Options] = {
        "as recommended": {},
        "temperature 0": {"temperature": 0.0},
        "guidance 1, top-k 8, top-p 0.9": {"guidance_scale": 1.0, "top_k": 8, "top_p": 0.9},
    }
    for k, family in enumerate(FAMILIES):
        policies = TEXT_POLICIES
        if family == "glm-image":  # 246 tokens an image, and a costly decoder
            policies = {name: policies[name] for name in ("jacobi, window 5", "mc-sjd")}
        for n, (label, policy, given) in enumerate(cycle(policies, options, k)):
            batch = (3, 1)[n % 2]
            yield f"{family} | {label}, batch {batch}", partial(make, family, policy, batch, given)


def speech() -> Runs:
    """`TextToSpeech`; two utterances are in the making at a time, and the third one follows."""

    @cache
    def opened(family: str) -> Any:
        from tests.fixtures.speech import build_speech

        model, codec = build_speech(family, _folder() / f"{family}-speech")
        return mmaccel.TextToSpeech.from_pretrained(model, codec=codec, device="cpu", compile=False)

    def make(family: str, policy: Any, batch_size: int | None, given: Options) -> Row:
        from tests.fixtures.speech import SECONDS, TEXTS

        made = opened(family)(
            TEXTS,
            policy=read_policy(policy),
            seed=[3, 4, 5],
            max_seconds=SECONDS[family],
            batch_size=batch_size,
            **given,
        )
        spoken = made.utterances
        passes = torch.tensor([utterance.passes for utterance in spoken])
        parts = [utterance.tokens for utterance in spoken]
        if family == "llasa":  # the other codec adds noise of torch's own
            parts += [utterance.waveform for utterance in spoken]
        return describe(parts, made.stats, passes_by_row=passes)

    options: dict[str, Options] = {
        "as recommended": {},
        "temperature 0": {"temperature": 0.0},
        "penalty 1.3, top-k 8": {"repetition_penalty": 1.3, "top_k": 8},
    }
    yield from cycle_all(("llasa", "orpheus"), TEXT_POLICIES, options, (2, None, 1), make)


def video() -> Runs:
    """`ImageToVideo`, over a tiny Cosmos."""

    @cache
    def opened() -> Any:
        from tests.fixtures.video import build_video

        model, codec = build_video(_folder() / "cosmos")
        return mmaccel.ImageToVideo.from_pretrained(model, codec=codec, device="cpu", compile=False)

    def make(policy: Any, given: Options) -> Row:
        made = opened()(_start_frame(), policy=read_policy(policy), seed=[7, 8, 9], **given)
        parts = [part for clip in made.clips for part in (clip.tokens, clip.frames)]
        passes = torch.tensor([clip.passes for clip in made.clips])
        return describe(parts, made.stats, passes_by_row=passes)

    options: dict[str, Options] = {
        "as recommended": {},
        "batch 2, top-p 1": {"batch_size": 2, "top_p": 1.0},
        "temperature 0": {"temperature": 0.0},
    }
    policies = TEXT_POLICIES | {
        "jacobi, drafts previous frame": "jacobi:window=8:drafts=previous-frame",
        "mc-sjd, drafts previous frame": "mc-sjd:window=8:drafts=previous-frame",
    }
    for label, policy, given in cycle(policies, options):
        yield label, partial(make, policy, given)


def _start_frame() -> Any:
    import numpy
    from PIL import Image

    values = numpy.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=numpy.uint8)
    return Image.fromarray(values)


def _read_pixels(file: Path) -> Tensor:
    from mmaccel.pipelines.hosts.loading.pictures import open_picture

    with open_picture(file) as opened:
        return pixels_of(opened)


# --- the command line -----------------------------------------------------------------------------


def command_line() -> Runs:
    """What commands write: pixels, samples and frames; names and metadata are left aside."""
    prompts = list(MODELS["scenes"].examples[:2])

    def run(*arguments: Any) -> None:
        start = "import sys; from mmaccel.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", start, *map(str, arguments)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            command,
            cwd=_folder(),
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(
                f"mmaccel {arguments[0]} exited with {done.returncode}: {done.stderr}"
            )

    def images(*arguments: Any) -> Row:
        out = Path(tempfile.mkdtemp(dir=_folder()))
        run("generate", *arguments, "--out", out)
        files = sorted(out.glob("[0-9]*.png"))  # without sheets: these show seconds
        return describe([_read_pixels(file) for file in files])

    yield (
        "generate, 2 prompts, mc-sjd",
        partial(images, *prompts, "--policy", "mc-sjd", "--seed", 4),
    )
    yield (
        "generate, compared",
        partial(images, prompts[0], "--compare", "--count", 1, "--top-k", 40, "--seed", 0),
    )

    def canvas() -> Row:
        folder, _, texts = _tiny_images()
        fixed = ["--model", folder, "--count", 2, "--seed", 0]
        return images(texts[0], *fixed, "--policy", "entropy-bounded")

    yield "generate, a canvas policy", canvas

    def speak() -> Row:
        import wave

        from tests.fixtures.speech import TEXTS, build_speech

        model, codec = build_speech("llasa", Path(tempfile.mkdtemp(dir=_folder())))
        out = Path(tempfile.mkdtemp(dir=_folder()))
        fixed = ["--model", model, "--codec", codec, "--out", out, "--max-seconds", 0.05]
        run("speak", *TEXTS[:2], "--seed", 3, *fixed)
        sounds = []
        for file in sorted(out.glob("*.wav")):
            with wave.open(str(file)) as sound:
                data = bytearray(sound.readframes(sound.getnframes()))
            sounds.append(torch.frombuffer(data, dtype=torch.int16))
        return describe(sounds)

    yield "speak", speak

    def animate() -> Row:
        from PIL import ImageSequence

        from mmaccel.pipelines.hosts.loading.pictures import open_picture
        from tests.fixtures.video import build_video

        model, codec = build_video(Path(tempfile.mkdtemp(dir=_folder())))
        start, out = _folder() / "start.png", Path(tempfile.mkdtemp(dir=_folder()))
        _start_frame().save(start)
        fixed = ["--model", model, "--codec", codec, "--out", out, "--format", "webp"]
        run("animate", start, "--count", 2, "--seed", 7, *fixed)
        frames = []
        for file in sorted(out.glob("*.webp")):
            with open_picture(file) as opened:
                frames += [pixels_of(frame) for frame in ImageSequence.Iterator(opened)]
        return describe(frames)

    yield "animate", animate


# --- writing and checking -------------------------------------------------------------------------

FAMILIES: dict[str, Callable[[], Runs]] = {
    "scenes": scenes,
    "scenes-masked": scenes_masked,
    "next-scale models": next_scale,
    "grammar-masked": grammar_masked,
    "tiny masked images": tiny_masked,
    "text models": text_models,
    "image models": image_models,
    "GlmImagePipeline": glm_image_pipeline,
    "denoisers": denoisers,
    "LLaDA2Pipeline": llada2,
    "DiffusionGemma": diffusion_gemma,
    "AmusedPipeline": amused,
    "TextToImage": checkpoints,
    "TextToSpeech": speech,
    "ImageToVideo": video,
    "command line": command_line,
}


def make_family(family: str, only: str) -> dict[str, Row]:
    """A family's runs whose name contains `only`; one that raises is recorded as its error."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    made: dict[str, Row] = {}
    began = time.perf_counter()
    for name, make in FAMILIES[family]():
        name = f"{family} | {name}"
        if only not in name:
            continue
        if name in made:
            raise RuntimeError(f"two runs are called {name!r}; rename one")
        try:
            with torch.no_grad():
                made[name] = make()
        except Exception as error:  # the other runs are of interest, too
            made[name] = {"error": type(error).__name__}
            print(f"{name}:\n{traceback.format_exc(limit=-3)}", file=sys.stderr)
    if made:
        seconds = time.perf_counter() - began
        print(f"{family}: {len(made)} runs, {seconds:.0f} s", file=sys.stderr, flush=True)
    return made


def make_runs(only: str, processes: int) -> dict[str, Row]:
    """The runs of all families, a family at a time in each process."""
    made: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="reference-runs-") as folder:
        os.environ["REFERENCE_RUNS_FOLDER"] = folder
        way = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=way) as pool:
            for rows in pool.map(partial(make_family, only=only), FAMILIES):
                made |= rows
    return made


def compare(recorded: dict[str, Row], made: dict[str, Row]) -> dict[str, list[str]]:
    """What differs by run: a line for each field, as recorded and as made now."""
    found: dict[str, list[str]] = {}
    for name in sorted(recorded.keys() | made.keys()):
        old, new = recorded.get(name, {}), made.get(name, {})
        for field in sorted(old.keys() | new.keys()):
            a, b = old.get(field), new.get(field)
            if field == "fallbacks" and old and new:
                a, b = (row and len(row) for row in (a, b))
            if a != b:
                line = f"    {field:16} {_short(a):42} -> {_short(b)}"
                found.setdefault(name, []).append(line)
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def environment() -> dict[str, str]:
    """What tokens may depend on, besides the code."""
    from importlib.metadata import version

    libraries = ("torch", "transformers", "diffusers", "numpy", "snac")
    return {"machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"} | {
        name: version(name) for name in libraries
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE", help="make the runs, record them")
    action.add_argument("--check", type=Path, metavar="FILE", help="make the runs, compare them")
    parser.add_argument("--only", default="", help="only the runs whose name contains this")
    parser.add_argument("--processes", type=int, default=2, help="at a time; each has one thread")
    asked = parser.parse_args()
    file: Path = asked.write or asked.check
    began = time.perf_counter()
    recorded: dict[str, Any] = {"environment": {}, "runs": {}}
    if asked.check or (asked.only and file.is_file()):
        recorded = json.loads(file.read_text(encoding="utf-8"))
    made = make_runs(asked.only, asked.processes)
    print(f"{len(made)} runs, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    if asked.write:
        others = {name: row for name, row in recorded["runs"].items() if asked.only not in name}
        runs = dict(sorted((others | made).items()))
        command = f"python benchmarks/reference_runs.py --write {file}"
        write_report(file, {"command": command, "environment": environment(), "runs": runs})
        failed = sum("error" in row for row in made.values())
        if failed:
            print(f"{failed} runs raised; what they raised is recorded", file=sys.stderr)
        return 0
    if recorded["environment"] != environment():
        print(f"recorded with {recorded['environment']}\nchecked with  {environment()}")
    wanted = {name: row for name, row in recorded["runs"].items() if asked.only in name}
    differences = compare(wanted, made)
    for name, lines in differences.items():
        print(name, *lines, sep="\n")
    print(f"\n{len(differences)} of {len(made)} runs differ")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
