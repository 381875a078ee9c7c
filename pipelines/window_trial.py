"""A trial before anything is promised: does a model's window pass give its own logits?

The checks of `mmaccel.pipelines.causal_lm_check` read configurations and signatures. Some models
build a causal mask of their own from the cache's length, and no signature says so; they would
decode other tokens without a word. So every model is tried once on a few made-up tokens.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.window_model import CausalLMWindow

_LENGTH = 9
_PASSES = (((0, 0), 5), ((2, 4), 3), ((5, 3), 4))  # where rows start and how wide; some roll back
_EXACT, _ROUNDED = 1e-3, 0.05  # largest mean difference, in standard deviations of the logits
_passed: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # model -> attention implementation


def check_by_trial(model: Any) -> None:
    """Refuse a model whose windows do not give what the model itself gives.

    Args:
        model: one that `check_causal_lm` accepts, in evaluation mode.

    Raises:
        UnsupportedModelError: with what was seen.

    A model whose own logits are not finite passes: decoding finds that and says so.

    Cost: four short passes, until the model has passed once with its attention implementation.
    """
    implementation = model.config._attn_implementation
    if _passed.get(model) == implementation:
        return
    difference = _find_difference(model)
    if difference is not None:
        raise UnsupportedModelError(
            f"model: expected windows to give the model's own logits, received {difference} from a "
            f"{type(model).__name__}; its generate cannot be served"
        )
    _passed[model] = implementation


@torch.no_grad()
def _find_difference(model: Any) -> str | None:
    """What is wrong, or None."""
    if model.device.type == "meta":
        return "no weights (the model is on the meta device)"
    window = CausalLMWindow(model)
    n_ids = min(window.vocab_size, model.get_input_embeddings().weight.shape[0])
    spread = torch.Generator().manual_seed(0)
    ids = torch.randint(n_ids, (2, _LENGTH), generator=spread).to(model.device)
    try:
        own = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.arange(_LENGTH, device=ids.device).expand_as(ids),
            use_cache=False,
            return_dict=True,
        ).logits.float()
        if not own.isfinite().all():
            return None
        worst = max(_differences(window, ids, own))
    except Exception as error:  # whatever it is, generate is left to the original
        return f"a {type(error).__name__} ({' '.join(str(error).split())[:80]})"
    if worst <= (_EXACT if model.dtype in (torch.float32, torch.float64) else _ROUNDED):
        return None
    return f"logits that are {worst:.2g} standard deviations off"


def _differences(window: CausalLMWindow, ids: Tensor, own: Tensor) -> list[float]:
    """Mean difference of every pass's logits from `own` `[2, L, V]`, in its standard deviations."""
    scale = own.std().clamp(min=1e-12)
    window.reserve(*ids.shape)
    found = []
    for places, width in _PASSES:
        start = torch.tensor(places, device=ids.device)
        at = start[:, None] + torch.arange(width, device=ids.device)  # [2, W]
        logits = window.forward(ids.gather(1, at), start).float()
        wanted = own.gather(1, at[..., None].expand(-1, -1, own.shape[-1]))
        difference = float((logits - wanted).abs().mean() / scale)
        found.append(difference if math.isfinite(difference) else math.inf)
    return found
