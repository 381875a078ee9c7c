"""Whether a model can run on our window attention, found out by trying and not from a list.

The model runs a few made-up tokens twice, with its own attention and with the kernel's. Every layer
must have asked for the kernel once a pass, and the logits must agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmaccel.errors import MissingBackendError, UnsupportedModelError
from mmaccel.kernels import dispatch
from mmaccel.kernels.device_errors import is_device_error
from mmaccel.pipelines.window_attention_twin import Choices
from mmaccel.pipelines.window_trial import LENGTH, PASSES, find_tolerance, is_possible, make_ids

if TYPE_CHECKING:
    from mmaccel.pipelines.window_model import CausalLMWindow

_answers: WeakKeyDictionary[Any, dict[tuple[Any, ...], str]] = WeakKeyDictionary()


def find_reason(window: CausalLMWindow) -> str:
    """Why a window's passes keep the model's own attention; empty where they need not.

    Raises:
        MissingBackendError: `MMACCEL_KERNELS=triton`, and there is a reason besides `model`.

    Cost: at a model's first call, six short passes; none for `model`, nor for `auto` away from
    CUDA devices or under `MMACCEL_KERNELS=torch`. The answer is kept for as long as the model
    lives, and found again when its attention, dtype or device changes.
    """
    if window.attention == "model":
        return "attention='model'"
    reason = _find(window)
    refuse_own_attention(window.model, reason)
    return reason


def refuse_own_attention(model: Any, reason: str) -> None:
    """Raise MissingBackendError where there is a reason and `MMACCEL_KERNELS=triton`."""
    if reason and dispatch.mode() == "triton":
        raise MissingBackendError(
            f"{dispatch.VARIABLE}=triton: expected a model that attends by window_attention, "
            f"received {type(model).__name__}: {reason}; or set {dispatch.VARIABLE}=auto"
        )


def _find(window: CausalLMWindow) -> str:
    model, kind = window.model, window.attention
    if kind == "auto":
        on_gpu = window.device.type == "cuda" or dispatch.mode() == "triton"
        obstacle = None if on_gpu else f"the model is on {window.device}"
        if dispatch.mode() == "torch":
            obstacle = f"{dispatch.VARIABLE}=torch"
        obstacle = obstacle or dispatch.find_obstacle(window.device.type)
        if obstacle is not None:
            return obstacle
    key = (model.config._attn_implementation, model.dtype, window.device, kind, dispatch.mode())
    known = _answers.setdefault(model, {})
    if key in known:
        return known[key]
    reason, is_final = _try(window.plain(), wants_triton=kind == "auto")
    if is_final:
        known[key] = reason
    return reason


@torch.no_grad()
def _try(probe: CausalLMWindow, wants_triton: bool) -> tuple[str, bool]:
    """The reason, and whether another trial would find the same."""
    if getattr(probe.model.config, "output_attentions", False):
        return "the model gives out its attention weights", False
    if probe.max_positions is not None and probe.max_positions < LENGTH:
        return f"the model has {probe.max_positions} positions; a trial needs {LENGTH}", True
    if probe.device.type == "meta":
        return "the model has no weights (it is on the meta device)", False
    ids = make_ids(probe.model, probe.vocab_size)
    choices: Choices = []
    try:
        twin = _run(probe, ids, choices)
    except UnsupportedModelError as error:
        return str(error), True
    except MissingBackendError:  # MMACCEL_KERNELS=triton means to be told
        raise
    except Exception as error:  # the model's own attention is there, unless the device failed
        if is_device_error(error):
            raise
        said = " ".join(str(error).split())[:80]
        is_final = not isinstance(error, torch.OutOfMemoryError)
        return f"a {type(error).__name__} under the kernel ({said})", is_final
    expected = list(range(len(probe.windows))) * len(PASSES)
    if [layer for layer, _ in choices] != expected:
        return (
            f"{type(probe.model).__name__}: {len(choices)} of {len(expected)} calls of attention "
            "asked transformers for a function by name"
        ), True
    refused = [choice.reason for _, choice in choices if choice.twin != "triton"]
    if wants_triton and refused:
        return refused[0], True
    return _compare(probe.model, twin, _run(probe, ids, None))


def _run(probe: CausalLMWindow, ids: Tensor, choices: Choices | None) -> list[Tensor]:
    """Logits `[2, W, V]` of every pass of the trial, by the kernel if choices are asked for."""
    probe.reserve(2, LENGTH)
    if choices is not None:
        probe.attention_reason, probe.choices = "", choices
    made = []
    for places, width in PASSES:
        start = torch.tensor(places, device=ids.device)
        at = start[:, None] + torch.arange(width, device=ids.device)  # [2, W]
        made.append(probe.forward(ids.gather(1, at), start).float())
    return made


def _compare(model: Any, twin: list[Tensor], own: list[Tensor]) -> tuple[str, bool]:
    for ours, theirs in zip(twin, own):
        possible = is_possible(theirs)
        spread = float(theirs[possible].std())
        if theirs.isnan().any() or not spread > 0:
            return "the model's logits are NaN or all alike: nothing to compare", False
        if not torch.equal(is_possible(ours), possible):
            return "the kernel's logits are masked elsewhere", True
        worst = float((ours - theirs)[possible].abs().mean()) / spread
        if not worst <= find_tolerance(model.dtype):
            return f"logits {worst:.2g} standard deviations from the model's own", True
    return "", True
