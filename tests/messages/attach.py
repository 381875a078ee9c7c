"""`attach` and `decoder`: policies, seeds, switches, layouts, targets, and calls under strict."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import nn

import mmaccel
from mmaccel import Frames, Grid, UnsupportedModelError
from mmaccel.errors import AttachError
from tests.fixtures.tiny_lms import VOCAB, build_lm, left_padded, shared_lm
from tests.messages.case import Refused

Call = Callable[[], Any]
PROMPTS = left_padded([[5, 6], [4, 5, 6, 7], [9, 8, 7]])
ALONE = {name: value[1:2] for name, value in PROMPTS.items()}
SHORT: dict[str, Any] = dict(max_new_tokens=4, do_sample=False)
STATES: dict[str, Any] = dict(
    output_hidden_states=True, use_cache=False, return_dict_in_generate=True
)


def _attach(policy: Any = "jacobi", **options: Any) -> Call:
    """Attaching to a language model, which stays as it was."""

    def call() -> Any:
        model = shared_lm("llama")
        try:
            return mmaccel.attach(model, policy, **options)
        finally:
            assert type(model).__name__ == "LlamaForCausalLM" and "_sample" not in vars(model)

    return call


def _decoder(policy: Any = "jacobi", **options: Any) -> Call:
    return lambda: mmaccel.decoder(policy, **options)


def _generate(loop: Any = None, inputs: Any = PROMPTS, **options: Any) -> Call:
    """A call of a language model with a decoder of its own."""
    own = {"custom_generate": mmaccel.decoder("jacobi", **loop or {})}
    return lambda: shared_lm("llama").generate(**inputs, **SHORT, **options, **own)


def _attached(call: Callable[[Any], Any], **options: Any) -> Call:
    """A call of an attached language model."""

    def run() -> Any:
        model = build_lm("llama")
        with mmaccel.attach(model, "jacobi", **options):
            return call(model)

    return run


def _training(model: Any) -> Any:
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
    return model.train().generate(**PROMPTS, **SHORT)


def _other_loop(model: Any) -> Any:
    """A call with a loop of the caller's own."""
    return model.generate(**PROMPTS, **SHORT, custom_generate=lambda model, ids, *_, **__: ids)


def _batch(model: Any) -> Any:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=3, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=16)  # else most of the memory
    return model.generate_batch(
        [[5, 6]], generation_config=config, continuous_batching_config=small
    )


def _used_handle() -> Any:
    handle = mmaccel.attach(build_lm("llama"), "jacobi")
    with handle:
        pass
    with handle:
        pass


def _pipeline(**parts: Callable[[], Any]) -> Call:
    def call() -> Any:
        made = {name: make() for name, make in parts.items()}
        return mmaccel.attach(SimpleNamespace(components=made, **made), "jacobi")

    return call


_POLICIES = (
    *(
        Refused(f"the policy {policy!r}"[:40], _attach(policy), ("policy: expected",))
        for policy in ("warp", mmaccel.Jacobi)
    ),
    *(
        Refused(f"seed={seed!r}", _attach(seed=seed), ("seed: expected",))
        for seed in (1.5, 2**64)
    ),
    *(
        Refused(f"{make.__name__.strip('_')} with {name}={value!r}", make(**{name: value}),
                (f"{name}: expected one of True, False, received",))
        for make in (_attach, _decoder)
        for name in ("strict", "assume_stateless")
        for value in ("no",)  # it would silently count as true
    ),
)  # fmt: skip
_LAYOUTS = (
    *(
        Refused(f"{make.__name__.strip('_')}: {source} and {name}", make(policy, **options), says)
        for make in (_attach, _decoder)
        for source in ("above", "previous-frame")
        for policy in (mmaccel.Jacobi(window=4, drafts=source),)
        for name, options, says in (
            ("no layout", {}, ("or give a layout",)),
            ("numbers", {"layout": ((4, 12),)}, ("layout: expected one such as mmaccel.Frames",)),
        )
    ),
    *(
        Refused(f"{name}: {layout!r}"[:60], call, (said,))
        for size in (VOCAB + 1,)
        for layout in (Frames(((4, 12),), size), Grid(2, 2, size))
        for name, call, said in (
            ("attach", _attach(layout=layout),
             f"the model's {VOCAB} ids, received a layout of {size}"),
            ("a decoder's call", _generate({"layout": layout}), f"a layout of {size}"),
        )
    ),
)  # fmt: skip
_STRICT = tuple(
    Refused(name, call, says, AttachError)
    for name, call, says in (
        ("states without a cache", _generate({"strict": True}, **STATES), ("without a cache",)),
        *(
            (f"a decoder in a search, {options}", _generate(None, ALONE, **options),
             ("expected greedy search or sampling, received",))
            for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 2})
        ),
        ("dropout in training", _attached(_training, strict=True), ("training mode with dropout",)),
        ("a loop of the caller's", _attached(_other_loop, strict=True), ("custom_generate",)),
        ("a handle that was used", _used_handle, ("call mmaccel.attach again",)),
    )
)  # fmt: skip
_TARGETS = tuple(
    Refused(name, call, (said,), UnsupportedModelError)
    for name, call, said in (
        ("a model without its head", lambda: mmaccel.attach(shared_lm("llama").model, "jacobi"),
         "AutoModelForCausalLM"),
        ("a pipeline without a generator", _pipeline(vae=lambda: nn.Linear(1, 1)),
         "none of whose passes a policy can save"),
        ("a pipeline of two generators",
         _pipeline(one=lambda: build_lm("gpt2"), two=lambda: build_lm("llama")), "with one, two"),
    )
)  # fmt: skip

CASES = (*_POLICIES, *_LAYOUTS, *_STRICT, *_TARGETS)
