"""Every method of the catalog on the device at hand, against the same call on a CPU.

Tiny models of real classes and the embedded image models, in float32, with the seeds of the call:
noise is a function of seed, row and slot on every device, so a method makes the same tokens where
sums round alike. Where two scores are next to equal a row goes another way from there on; so
`LEAST` of the tokens have to be the same, and a method that raises has failed. Random weights give
no nearly equal scores often: most methods have all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mmaccel
from benchmarks.gpu.parts import CheckError, raise_failed, reason_of
from mmaccel.errors import UnsupportedModelError

LEAST = 0.8  # share of equal tokens
KINDS = ("layers", "policies", "drafts", "trees", "books", "canvas", "visual-tokens")
_CPU = torch.device("cpu")
_LENGTHS = (40, 26, 33, 40)
_N_NEW = 32


class Call(NamedTuple):
    """A method's name in the report, and tokens `[B, L]` and statistics of a call on a device;
    whether a GPU has to capture its steps.
    """

    name: str
    make: Callable[[torch.device], tuple[Tensor, Any]]
    is_captured: bool = False


def check_methods(
    kind: str, device: torch.device, calls: Iterator[Call] | None = None
) -> dict[str, Any]:
    """All methods of a kind, as a part of the report keeps them; CheckError names those that raised
    or made other tokens than on a CPU, or says that all were refused, as an old transformers
    refuses fewer visual tokens.
    """
    rows = [_compare(call, device) for call in (calls or _CALLS[kind]())]
    n_refused = sum("refused" in row for row in rows)
    passed = sum(not row["wrong"] for row in rows) - n_refused
    found = {"passed": passed, "refused": n_refused, "methods": rows}
    if n_refused == len(rows):
        raise CheckError(f"all {n_refused} methods were refused: {rows[0]['refused']}", found)
    raise_failed(rows, "methods", found)
    return found


def _compare(call: Call, device: torch.device) -> dict[str, Any]:
    row: dict[str, Any] = {"name": call.name, "same": 0.0, "wrong": ""}
    try:
        plain, _ = call.make(_CPU)
        made, stats = call.make(device)
    except UnsupportedModelError as error:
        return row | {"refused": " ".join(str(error).split())[:200]}
    except Exception as error:
        error.add_note(f"in {call.name}")
        return row | {"wrong": reason_of(error)}
    made = made.cpu()
    row |= {"runner": stats.runner, "reason": stats.runner_reason, "passes": stats.passes}
    if plain.shape != made.shape:
        return row | {"wrong": f"expected {list(plain.shape)} tokens, received {list(made.shape)}"}
    row["same"] = float((plain == made).float().mean())
    if call.is_captured and device.type == "cuda" and stats.runner != "cuda graphs":
        return row | {"wrong": f"its steps are not captured: {stats.runner_reason}"}
    wrong = f"{row['same']:.2f} of the tokens are those of a CPU, expected {LEAST:g}"
    return row | {"wrong": wrong * (row["same"] < LEAST)}


def _layer_calls() -> Iterator[Call]:
    """Methods of caches and attention on a tiny Llama, ragged rows, under Jacobi, captured where
    they go with it and not; and rows that read one prompt together.
    """
    from mmaccel.catalog import METHODS, load
    from mmaccel.reduction.kv_cache.contract import CacheMethod
    from mmaccel.reduction.kv_cache.headwise import HeadwiseMethod
    from tests.fixtures.tiny_lms import build_lm
    from tests.matrix.examples import Target, make

    model = build_lm("llama")
    for slot in ("kv_cache", "attention"):
        for name, entry in METHODS[slot].items():
            kind = load(entry.target)
            has_rounds = issubclass(kind, CacheMethod) and not kind.merges
            has_rounds = has_rounds and not issubclass(kind, HeadwiseMethod)
            for fields in ({}, {"every": 5}) if has_rounds else ({},):
                method = make(slot, name, Target(model), **fields)
                run = partial(_generate, model, mmaccel.Jacobi(window=5), **{slot: method})
                is_captured = "captured steps" not in method.excludes
                yield Call(f"{name}{' in rounds' * bool(fields)}", run, is_captured)
                if is_captured:
                    yield Call(f"{name}, not captured", partial(run, cuda_graphs=False))
    run = partial(_generate, model, mmaccel.Jacobi(window=5), n_each=2, share_prefix=True)
    yield Call("share_prefix", run, True)
    yield Call("share_prefix, not captured", partial(run, cuda_graphs=False))


def _generate(
    model: Any, policy: Any, device: torch.device, *, n_each: int = 1, **methods: Any
) -> tuple[Tensor, Any]:
    """A sampled call with rows padded on the left, `n_each` of a prompt."""
    from tests.fixtures.tiny_lms import PAD, VOCAB, left_padded

    drawn = torch.Generator().manual_seed(3)
    rows = [torch.randint(4, VOCAB, (n,), generator=drawn).tolist() for n in _LENGTHS]
    rows = [row for row in rows for _ in range(n_each)][: len(_LENGTHS)]
    prompts = {key: value.to(device) for key, value in left_padded(rows).items()}
    own = deepcopy(model).to(device)
    options = {"do_sample": True, "eos_token_id": None, "pad_token_id": PAD}
    with mmaccel.attach(own, policy, seed=[4, 5, 6, 7], strict=True, **methods) as run:
        made = own.generate(**prompts, **options, max_new_tokens=_N_NEW)
    return made[:, prompts["input_ids"].shape[1] :], run.stats


def _policy_calls() -> Iterator[Call]:
    """Window policies with their default drafts, on `scenes` with guidance."""
    from tests.fixtures.tiny_lms import build_lm
    from tests.matrix.examples import Target, make, names, text_policies

    lm = build_lm("llama")
    target = Target(lm)
    for name in names("policies", "window"):
        if name != "speculative":
            policy = make("policies", name, target)
            yield Call(f"{name} on scenes", partial(_paint, "scenes", policy))
            if name in text_policies():
                yield Call(f"{name} on text", partial(_generate, lm, policy))
    for drafts in ("vegas", "triforce"):
        policy = mmaccel.Speculative(drafts=drafts)
        yield Call(f"speculative, {drafts}", partial(_generate, lm, policy))


def _draft_calls() -> Iterator[Call]:
    """Draft sources under Jacobi, on `scenes`."""
    from mmaccel.samplers.drafting.sources import SOURCES

    for name, source in SOURCES.items():
        if not source.needs_layers:
            policy = mmaccel.Jacobi(window=16, drafts=name)
            yield Call(name, partial(_paint, "scenes", policy))


def _tree_calls() -> Iterator[Call]:
    """Tree shapes over coarse drafts, on `scenes`."""
    from tests.matrix.examples import Target, make, names

    for name in names("tree"):
        tree = make("tree", name, Target(None))
        policy = mmaccel.Jacobi(window=32, drafts="coarse", tree=tree)
        yield Call(name, partial(_paint, "scenes", policy))


def _book_calls() -> Iterator[Call]:
    """Frames of depth decoders, and codes of models with a delay pattern, sampled."""
    from tests.delay.models import MASK, TEXT, delay_prompt, make_dia, make_higgs
    from tests.depth.models import MODELS

    policies = (mmaccel.Jacobi(window=8), mmaccel.Jacobi(window=8, drafts="previous-frame"))
    for name, build in MODELS.items():
        if name != "qwen3-tts talker":  # a copy of the class above
            speech = build()
            for policy in policies:
                run = partial(_speak, speech.decoder, policy, **speech.frame(3))
                yield Call(f"{policy!r} on a frame of {name}", run)
    ids = TEXT.flip(1)
    prompts = {"input_ids": ids, "attention_mask": MASK.flip(1), "max_length": 12}
    dia = prompts | delay_prompt(torch.zeros(3, 0, 3, dtype=torch.int64))
    spoken = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    for policy in policies:
        yield Call(f"{policy!r} on dia", partial(_speak, make_dia(), policy, **dia))
        yield Call(f"{policy!r} on higgs", partial(_speak, make_higgs(), policy, **spoken))
        yield Call(f"{policy!r} on musicgen", partial(_play, policy))


def _speak(model: Any, policy: Any, device: torch.device, **given: Any) -> tuple[Tensor, Any]:
    """What a model's own `generate` makes of the arguments."""
    own = deepcopy(model).to(device)
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    with mmaccel.attach(own, policy, seed=7, strict=True) as run:
        made = own.generate(**given, do_sample=True)
    return made, run.stats


def _play(policy: Any, device: torch.device) -> tuple[Tensor, Any]:
    """The codes that MusicGen's own `generate` hands to its codec."""
    from tests.delay.hosts import Music
    from tests.delay.models import MASK, TEXT, make_musicgen

    music = Music(make_musicgen().to(device))
    given = {"input_ids": TEXT.to(device), "attention_mask": MASK.to(device), "max_length": 12}
    with mmaccel.attach(music.model, policy, seed=7, strict=True) as run:
        made = music.call(**given)
    return made, run.stats


def _canvas_calls() -> Iterator[Call]:
    """Canvas policies on `scenes-masked`, those of scales on `scenes-var`."""
    from tests.matrix.examples import Target, make, names

    for name in names("policies", "canvas"):
        policy = make("policies", name, Target(None))
        model = "scenes-var" if "scales" in policy.needs else "scenes-masked"
        yield Call(name, partial(_paint, model, policy))


def _paint(model: str, policy: Any, device: torch.device) -> tuple[Tensor, Any]:
    """Two images of an embedded model."""
    pipe = mmaccel.TextToImage.from_pretrained(model, device=device, dtype="float32")
    examples = pipe.image_model.examples
    captions = [examples[n % len(examples)] for n in range(2)]
    made = pipe(captions, policy=policy, seed=[1, 2])
    return made.tokens, made.stats


def _visual_calls() -> Iterator[Call]:
    """Reducers on tiny models of three classes; those of videos on videos."""
    from mmaccel.catalog import REDUCERS
    from tests.vision_language.runs import METHODS

    for family in ("llava", "llava_onevision", "qwen2_5_vl"):
        for name in REDUCERS:
            yield Call(f"{name} on {family}", partial(_answer, family, METHODS[name](keep=0.5)))


def _answer(family: str, reducer: Any, device: torch.device) -> tuple[Tensor, Any]:
    from tests.fixtures.tiny_vlms import draw_prompts, draw_videos, shared_vlm
    from tests.vision_language.runs import answer

    model = shared_vlm(family)
    if type(reducer).__name__ in ("VidCom2", "EVS"):
        inputs = draw_videos(family, model, (3, 3))
    else:
        inputs = draw_prompts(family, model, (2, 0, 1))
    own = deepcopy(model).to(device)
    inputs = {key: value.to(device) for key, value in inputs.items()}
    policy = mmaccel.Autoregressive() if reducer.revives else mmaccel.Jacobi(5)
    made, stats = answer(own, reducer, inputs, policy)
    return made[:, inputs["input_ids"].shape[1] :], stats


_CALLS: dict[str, Callable[[], Iterator[Call]]] = {
    "layers": _layer_calls,
    "policies": _policy_calls,
    "drafts": _draft_calls,
    "trees": _tree_calls,
    "books": _book_calls,
    "canvas": _canvas_calls,
    "visual-tokens": _visual_calls,
}
