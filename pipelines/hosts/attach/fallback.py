"""Calls that no policy serves, run by transformers' own loops and measured."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.causal_lm.compatibility import find_device
from mmaccel.pipelines.hosts.original_methods import original
from mmaccel.results import Stats

_BEFORE_PASS = "prepare_inputs_for_generation"


def run_original(
    model: Any,
    name: str,
    options: dict[str, Any],
    seed: int | Sequence[int] | None = None,
) -> tuple[Any, Stats]:
    """Run a method that an injection replaced, and measure it.

    Args:
        name: a decoding loop of `GenerationMixin`.
        seed: of torch's generators (the CPU's and the model's device's) during the run, restored
            afterwards; several are hashed into one, None leaves them alone. They belong to the
            process: seeded runs in several threads disturb each other.

    Returns:
        What the loop returned, and its statistics: passes with the prompt's, without those of
            logits processors; tokens of a beam search are those returned, of latents or sound none.
    """
    began = time.perf_counter()
    others = dict(options)
    ids = others.pop("input_ids")  # whose name in a model's own loop may be another
    with count_passes(model) as counter, _seeded(seed, find_device(model)):
        out = original(model, name)(ids, **others)
    seconds = time.perf_counter() - began
    passes = counter.passes
    sequences = getattr(out, "sequences", out)
    if not isinstance(sequences, Tensor):
        row_passes = passes * ids.shape[0]
        return out, Stats(tokens=0, passes=passes, row_passes=row_passes, seconds=seconds)
    tokens = sequences[:, ids.shape[1] :]
    ends = getattr(options["generation_config"], "_eos_token_tensor", None)
    n_tokens = tokens.numel()
    if ends is not None:  # of several codebooks `[B, L, K]`, each ends by itself
        is_end = torch.isin(tokens, ends.to(tokens.device)).long()
        n_tokens = int((is_end.cumsum(1) - is_end == 0).sum())
    row_passes = passes if tokens.shape[0] == 1 else n_tokens
    return out, Stats(tokens=n_tokens, passes=passes, row_passes=row_passes, seconds=seconds)


@contextmanager
def count_passes(model: Any) -> Iterator[Any]:
    """Inside the block an object's `passes` counts those of transformers' loops over a model: calls
    of `prepare_inputs_for_generation`, here an attribute. Compiled code sees no hook or other
    class.
    """
    prepare = getattr(model, _BEFORE_PASS)

    @functools.wraps(prepare)
    def count(*args: Any, **options: Any) -> Any:
        counter.passes += 1
        return prepare(*args, **options)

    counter: Any = count
    counter.passes = 0
    before = vars(model).get(_BEFORE_PASS)  # the caller's, or another thread's counter
    counter.callers = before.callers if hasattr(before, "callers") else before
    vars(model)[_BEFORE_PASS] = counter
    try:
        yield counter
    finally:
        if vars(model).get(_BEFORE_PASS) is counter:
            del vars(model)[_BEFORE_PASS]
            if counter.callers is not None:
                vars(model)[_BEFORE_PASS] = counter.callers
        # else a later counter of another thread calls this one, and goes last


@contextmanager
def _seeded(seed: int | Sequence[int] | None, device: torch.device) -> Iterator[None]:
    if seed is None:
        yield
        return
    if isinstance(seed, Sequence):
        text = ",".join(map(str, seed))
        seed = int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:8], "big")
    backends: list[Any] = [torch]
    current: Any = nullcontext()
    if device.type != "cpu":
        backend: Any = torch.get_device_module(device.type)
        backends.append(backend)
        if hasattr(backend, "device"):  # of which there are several
            current = backend.device(device)
    with current:
        states = [each.get_rng_state() for each in backends]
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` seeds every device
        for each in backends[1:]:
            each.manual_seed(seed)
        try:
            yield
        finally:
            for each, state in zip(backends, states):
                each.set_rng_state(state)
