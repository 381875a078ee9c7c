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

from mmaccel.pipelines.causal_lm.compatibility import find_device
from mmaccel.pipelines.generate_call import count_to_end
from mmaccel.pipelines.original_methods import original
from mmaccel.results import Stats


def run_original(
    model: Any,
    name: str,
    args: tuple[Any, ...],
    options: dict[str, Any],
    seed: int | Sequence[int] | None = None,
) -> tuple[Any, Stats]:
    """Run a method that an injection replaced, and measure it.

    Args:
        model: the model.
        name: a decoding loop of `GenerationMixin`.
        args: of the loop: ids `[B, T]` first, the configuration fourth.
        options: the named arguments.
        seed: of torch's generators (the CPU's and the model's device's) during the run; their
            states are restored afterwards. Several seeds are hashed into one. None leaves the
            generators alone. The generators belong to the process, so seeded runs in several
            threads at once disturb each other.

    Returns:
        What the loop returned, and its statistics. The prompt's pass counts too, passes that a
        logits processor makes by itself do not; tokens of a beam search are those of the returned
        sequences. A loop that returns no tokens, but latents or sound, has none.
    """
    began = time.perf_counter()
    with PassCounter(model) as counter, _seeded(seed, find_device(model)):
        out = original(model, name)(*args, **options)
    seconds = time.perf_counter() - began
    ids, config = args[0], args[3]
    passes = counter.passes
    made = getattr(out, "sequences", out)
    if not isinstance(made, Tensor):
        row_passes = passes * ids.shape[0]
        return out, Stats(tokens=0, passes=passes, row_passes=row_passes, seconds=seconds)
    tokens = made[:, ids.shape[1] :]
    ends = getattr(config, "_eos_token_tensor", None)
    n_tokens = tokens.numel() if ends is None else int(count_to_end(tokens, ends).sum())
    row_passes = passes if tokens.shape[0] == 1 else n_tokens
    return out, Stats(tokens=n_tokens, passes=passes, row_passes=row_passes, seconds=seconds)


class PassCounter:
    """Counts the passes of transformers' loops over a model, in a `with` block.

    A loop calls `prepare_inputs_for_generation` once before every pass. The model itself is not
    touched: code that torch compiled for it sees neither a hook nor another class.

    Args:
        model: the model; during the block its method is an attribute that counts and calls it.

    Attributes:
        passes: counted so far.
    """

    method = "prepare_inputs_for_generation"

    def __init__(self, model: Any) -> None:
        self._model = model
        self.passes = 0

    def __enter__(self) -> PassCounter:
        own = getattr(self._model, self.method)

        @functools.wraps(own)
        def count(*args: Any, **options: Any) -> Any:
            self.passes += 1
            return own(*args, **options)

        before = vars(self._model).get(self.method)  # the caller's, or another thread's counter
        self._callers = before.counter._callers if hasattr(before, "counter") else before
        count.counter = self  # type: ignore[attr-defined]
        vars(self._model)[self.method] = count
        return self

    def __exit__(self, *_: object) -> None:
        present = vars(self._model).get(self.method)
        if getattr(present, "counter", None) is not self:
            return  # a later counter of another thread calls this one, and goes last
        del vars(self._model)[self.method]
        if self._callers is not None:
            vars(self._model)[self.method] = self._callers


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
        states = [one.get_rng_state() for one in backends]
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` seeds every device
        for one in backends[1:]:
            one.manual_seed(seed)
        try:
            yield
        finally:
            for one, state in zip(backends, states):
                one.set_rng_state(state)
