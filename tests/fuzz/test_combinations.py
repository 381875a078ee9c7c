"""Random legal calls: a seed makes a model, a policy, what goes with it, and arguments.

A refusal in words is right; nothing else may be raised. Made again, and in another thread, a call
has the same tokens. Where the run says `bitwise`, they are those of `Autoregressive`; a row of a
batch is what it is alone.
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.catalog import METHODS
from mmaccel.errors import MMAccelError
from tests.fixtures.canvas import masked
from tests.fixtures.tiny_lms import EOS, VOCAB, build_lm, left_padded
from tests.matrix.examples import Target, forms, has_field, make, names, text_policies

CALLS, PARTS = 36, 3
FULL = ("llama", "qwen2", "gemma2", "gpt2", "qwen3", "cohere")  # all layers attend to everything
TEXTS = (*FULL, "gemma3", "mistral", "olmo3")
LAYOUTS = {"above", "previous-frame", "moved-frame"}  # drafts of images and clips
CLOCK = {"bandit", "sibling-rows", "online"}  # read a clock, or rows learn of each other


@dataclass
class Call:
    """One combination.

    Attributes:
        kind: "text" or "canvas".
        model: its name.
        policy, fields: its short name, and fields of its example in `tests.matrix.examples`.
        prompts: rows of ids.
        parts, methods: short names of drafts and tree of the policy, and of methods beside it.
        options: of `generate`.
        attach: of `attach`.
    """

    kind: str
    model: str
    policy: str
    fields: dict[str, Any]
    prompts: list[Any]
    parts: dict[str, str] = field(default_factory=dict)
    methods: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    attach: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> Any:
        """The model, or the denoiser."""
        return model_of(self.kind, self.model, bool(self.methods) or "share_prefix" in self.attach)


@cache
def model_of(kind: str, name: str, is_single: bool) -> Any:
    """In float32 where `is_single`, as methods of layers want it; else in float64."""
    if kind == "canvas":
        return masked(name)
    model = build_lm(name)
    return model if is_single else model.double()


@cache
def drafter() -> Any:
    return mmaccel.CausalLMWindow(build_lm("qwen2").double())


def draw_call(seed: int) -> Call:
    """The combination of a seed: the first one that is drawn whose parts can be made."""
    rng = random.Random(seed)
    while True:
        call = draw_parts(rng)
        try:
            parts(call)
            return call
        except (AssertionError, MMAccelError):
            continue


def draw_parts(rng: random.Random) -> Call:
    """A combination, of which nobody knows whether it can be made."""
    (kind,) = rng.choices(("text", "canvas"), (4, 1))
    own = {"text": TEXTS, "canvas": ("llama", "qwen2")}[kind]
    policy = rng.choice(names("policies", "canvas") if kind == "canvas" else text_policies())
    rows = [[rng.randrange(4, VOCAB - 1) for _ in range(rng.randrange(1, 19))] for _ in range(4)]
    prompts: list[Any] = rows[: rng.randrange(1, 5)]
    call = Call(kind, rng.choice(own), policy, rng.choice(forms("policies", policy)), prompts)
    call.options = {"max_new_tokens": rng.randrange(1, 20), "do_sample": rng.random() < 0.6}

    def draw(given: dict[str, Any], share: float, **choices: tuple[Any, ...]) -> None:
        given |= {name: rng.choice(x) for name, x in choices.items() if rng.random() < share}

    draw(
        call.options, 0.25, temperature=(0.7, 1.3), top_k=(0, 5), top_p=(0.8,), min_p=(0.05,),
        eos_token_id=(EOS, [3, 9]), guidance_scale=(1.8,),
    )  # fmt: skip
    if kind == "canvas":
        return call
    draw(
        call.options, 0.1, repetition_penalty=(1.3,), no_repeat_ngram_size=(2,), typical_p=(0.7,),
        bad_words_ids=([[5], [8, 9]],), suppress_tokens=([7, 11],), min_new_tokens=(4,),
        num_return_sequences=(2,), use_cache=(False,), num_beams=(2,),
        stopping_criteria=([modulus],), cache_implementation=("static",),
    )  # fmt: skip
    draw(
        call.attach, 0.1, share_prefix=(True, "auto"), prefill_chunk_size=(3, 64),
        fused=(True, False), sync_every=(4,),
    )  # fmt: skip
    draw(call.methods, 0.12, **{slot: (*METHODS[slot],) for slot in ("kv_cache", "attention")})
    for slot, share in {"drafts": 0.6, "tree": 0.3}.items():
        if has_field(policy, slot):
            choices = [name for name in names(slot) if name not in LAYOUTS]
            draw(call.parts, share, **{slot: (*choices,)})
    if call.methods or "tree" in call.parts or "share_prefix" in call.attach:
        call.model = rng.choice(FULL)
    return call


def parts(call: Call) -> tuple[Any, dict[str, Any]]:
    """The policy of a call, and the methods beside it."""
    target = Target(call.target, None if call.kind == "canvas" else drafter())
    made = {slot: make(slot, name, target) for slot, name in call.parts.items()}
    methods = {slot: make(slot, name, target) for slot, name in call.methods.items()}
    return make("policies", call.policy, target, **call.fields, **made), methods


def modulus(ids: Tensor, scores: Any, **_: Any) -> Tensor:
    """A stopping criterion that ends a row at a token that is a multiple of five."""
    return ids[:, -1] % 5 == 0


def run(
    call: Call, policy: Any = None, rows: Sequence[int] | None = None, threads: int = 0
) -> tuple[list[Tensor], Any]:
    """New tokens `[B, T]` of a call, and of as many more in threads at once; statistics.

    Args:
        policy: in place of the call's own.
        rows: those that are decoded, all by default.
    """
    model = call.target
    own, methods = parts(call)
    rows = range(len(call.prompts)) if rows is None else rows
    inputs = inputs_of(call, rows)
    copies = call.options.get("num_return_sequences", 1)
    seeds = [11 + at for at in rows for _ in range(copies)]

    def generate() -> Tensor:
        tokens: Tensor = model.generate(**inputs, **call.options)
        return tokens[:, inputs["input_ids"].shape[1] :]

    with mmaccel.attach(model, policy or own, seed=seeds, **methods, **call.attach) as handle:
        made = [generate()]
        # one run of a denoiser at a time
        with ThreadPoolExecutor(1 if call.kind == "canvas" else threads or 1) as pool:
            made += [done.result() for done in [pool.submit(generate) for _ in range(threads)]]
    return made, handle.stats


def inputs_of(call: Call, rows: Sequence[int]) -> dict[str, Any]:
    """Prompts of some rows of a call, as `generate` takes them."""
    prompts = [call.prompts[at] for at in rows]
    inputs: dict[str, Any] = left_padded(prompts)
    if "guidance_scale" in call.options:
        others = left_padded([prompt[::-1][:9] for prompt in prompts])
        inputs["negative_prompt_ids"] = others["input_ids"]
        inputs["negative_prompt_attention_mask"] = others["attention_mask"]
    return inputs


def complain(call: Call) -> str:
    """What is wrong with a call; "" if nothing."""
    (made, *others), stats = run(call, threads=2)
    if stats.fallbacks:  # transformers' own loop draws from torch's generator
        return ""
    reads_clock = bool(CLOCK & {call.policy, *call.parts.values()})
    if not reads_clock and not all(torch.equal(made, each) for each in others):
        return "other tokens in a second call"
    is_plain = "bitwise" in stats.exactness
    if is_plain:
        reference = "stepwise" if call.kind == "canvas" else "autoregressive"
        fields = {name: value for name, value in call.fields.items() if has_field(reference, name)}
        (plain,), _ = run(call, make("policies", reference, Target(None), **fields))
        if not torch.equal(made, plain):
            return f"other tokens than {reference}: {made.tolist()} {plain.tolist()}"
    # what a window attends to depends on how wide it is, which others' ends may decide; n-grams of
    # padding are banned too, in transformers' own loop as well
    if reads_clock or "attention" in call.methods or "no_repeat_ngram_size" in call.options:
        return ""
    for row in range(len(call.prompts)) if len(call.prompts) > 1 else ():
        (alone,), _ = run(call, rows=[row])
        own, width = made[row * len(alone) : (row + 1) * len(alone)], alone.shape[1]
        if not torch.equal(own[:, :width], alone) or own[:, width:].ne(own[:, -1:]).any():
            return f"row {row} is not what it is alone: {own.tolist()} {alone.tolist()}"
    return ""


def is_refused_by_transformers(call: Call) -> bool:
    """Whether the model's own `generate` raises for a call, too."""
    rows = range(len(call.prompts))
    try:
        call.target.generate(**inputs_of(call, rows), **call.options)
    except Exception:
        return True
    return False


def check(seed: int) -> str:
    """What is wrong with the combination of a seed; "" if nothing, "refused" where it is none."""
    call = draw_call(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return complain(call)
        except Exception as error:
            if isinstance(error, MMAccelError) and "\n" not in str(error):
                return "refused"
            if call.kind != "canvas" and is_refused_by_transformers(call):
                return "refused"
            return "".join(traceback.format_exception(error)[-3:])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_legal_calls_are_right(part: int) -> None:
    found = {seed: check(seed) for seed in range(part, CALLS, PARTS)}
    said = list(found.values())
    assert said.count("") > len(said) // 2  # not refused
    wrong = {seed: each for seed, each in found.items() if each not in ("", "refused")}
    assert wrong == {}, [draw_call(seed) for seed in wrong]
