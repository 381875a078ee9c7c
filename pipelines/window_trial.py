"""A trial before anything is promised: does a model's window pass give its own logits?

The checks of `mmaccel.pipelines.causal_lm_check` read configurations and signatures. Some models
build a causal mask of their own from the cache's length, and no signature says so; they would
decode other tokens without a word. So every model is tried once on a few made-up tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmaccel.errors import MissingBackendError, UnsupportedModelError
from mmaccel.kernels.device_errors import is_device_error

if TYPE_CHECKING:
    from mmaccel.pipelines.window_model import CausalLMWindow

LENGTH = 9
PASSES = (((0, 0), 5), ((2, 4), 3), ((5, 3), 4))  # where rows start and how wide; some roll back
_EXACT, _ROUNDED = 1e-3, 0.05  # largest mean difference, in standard deviations of the logits
_MASKED = 1e3  # below a position's largest logit: such entries say nothing about attention
_passed: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # model -> attention implementation


def check_by_trial(model: Any, window: CausalLMWindow) -> None:
    """Refuse a model whose windows do not give what the model itself gives.

    Where nothing can be compared (NaN, no spread, too few positions) the model passes this time.

    Args:
        model: one that `check_causal_lm` accepts, in evaluation mode.
        window: around it.

    Raises:
        UnsupportedModelError: with what was seen.
        MissingBackendError: kernels that MMACCEL_KERNELS=triton asks for cannot run.
        RuntimeError: the device failed.

    Cost: four short passes, until the model has passed once with its attention implementation.
    """
    implementation = model.config._attn_implementation
    if _passed.get(model) == implementation:
        return
    if model.device.type == "meta":
        _refuse(model, "no weights (the model is on the meta device)")
    try:
        worst = _largest_difference(model, window)
    except MissingBackendError:  # MMACCEL_KERNELS=triton means to be told
        raise
    except Exception as error:  # generate is left to the original, unless the device failed
        if is_device_error(error):
            raise
        _refuse(model, f"a {type(error).__name__} ({' '.join(str(error).split())[:80]})")
    if worst is None:
        return
    if worst > find_tolerance(model.dtype):
        _refuse(model, f"logits that are {worst:.2g} standard deviations off")
    if "local" in (getattr(model.config, "attention_layers", None) or ()):
        _refuse(model, "local attention, counted from the end of the cache,")  # wider than a trial
    _passed[model] = implementation


def _refuse(model: Any, received: str) -> NoReturn:
    raise UnsupportedModelError(
        f"model: expected windows to give the model's own logits, received {received} from a "
        f"{type(model).__name__}; its generate cannot be served"
    )


@torch.no_grad()
def _largest_difference(model: Any, window: CausalLMWindow) -> float | None:
    """Of any pass, in standard deviations of the model's own logits; None if there is no saying."""
    if window.max_positions is not None and window.max_positions < LENGTH:
        return None
    ids = make_ids(model, window.vocab_size)
    window.reserve(2, LENGTH)
    line = torch.arange(LENGTH, device=ids.device).expand_as(ids)
    own = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        position_ids=window.position_ids(line),
        use_cache=False,
        return_dict=True,
    ).logits.float()  # [2, L, V]
    if own.isnan().any() or not float(own[is_possible(own)].std()) > 0:
        return None
    return max(_differences(window, ids, own))


def _differences(window: CausalLMWindow, ids: Tensor, own: Tensor) -> list[float]:
    """Mean difference of every pass's logits from `own` `[2, L, V]`, in its standard deviations."""
    scale = own[is_possible(own)].std()
    found = []
    for places, width in PASSES:
        start = torch.tensor(places, device=ids.device)
        at = start[:, None] + torch.arange(width, device=ids.device)  # [2, W]
        logits = window.forward(ids.gather(1, at), start).float()
        wanted = own.gather(1, at[..., None].expand(-1, -1, own.shape[-1]))
        possible = is_possible(wanted)
        if not torch.equal(is_possible(logits), possible):
            return [math.inf]
        difference = float((logits - wanted)[possible].abs().mean() / scale)
        found.append(difference if math.isfinite(difference) else math.inf)
    return found


def make_ids(model: Any, vocab_size: int) -> Tensor:
    """The made-up tokens, `[2, LENGTH]` int64, the same for every model of a size."""
    table = getattr(model.get_input_embeddings(), "weight", None)
    n_ids = vocab_size if table is None else min(vocab_size, table.shape[0])
    spread = torch.Generator().manual_seed(0)
    return torch.randint(n_ids, (2, LENGTH), generator=spread, device="cpu").to(model.device)


def find_tolerance(dtype: torch.dtype) -> float:
    """The largest mean difference, in standard deviations of the logits, that is rounding."""
    return _EXACT if dtype in (torch.float32, torch.float64) else _ROUNDED


def is_possible(logits: Tensor) -> Tensor:
    """Which entries are not masked, by -inf or a number that is as good."""
    return logits > logits.amax(-1, keepdim=True) - _MASKED
