"""Features of images, clips and sound: which extractor, and running it over a folder.

`scenes` (images of 64x64 captioned scenes alone), `moving-scenes` (clips) and `voices` (speech) are
small networks that ship, whose distances are no published ones (FVD-own, FAD-own);
`module:function` is the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.checks import show
from mmaccel.demo.features import hear, load_features
from mmaccel.errors import OptionError
from mmaccel.evaluation.quality.distances import Array, check_features
from mmaccel.own_code import import_named, reason

# Images `[B, 3, H, W]` or clips `[B, F, 3, H, W]`, uint8, to features `[B, D]`; or one sound
# `[samples]` float32 in -1..1 and its rate in Hz to features `[N, D]` of N windows.
Extract = Callable[..., Tensor]


def open_extractor(name: str, own: str = "scenes") -> Extract:
    """An extractor by name: `own`, a network that ships, or "module:function"."""
    if name == own:
        return hear if own == "voices" else load_features(own).extract
    return load_callable(name, "features", f"{own} or module:function")


def load_callable(
    name: str, option: str, wanted: str = "module:function", items: str = "items"
) -> Callable[..., Any]:
    """A user's function, OptionError where it raises; `items`, its first argument, in messages."""
    function = import_named(name, option, wanted)
    if not callable(function):
        raise OptionError(f"{option}: expected {wanted}, received {show(name)}; name a callable")

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except (Exception, SystemExit) as error:
            raise OptionError(
                f"{option}: expected {show(name)} to return for {len(args[0])} {items}, received "
                f"{reason(error)}; call it with such {items} to find out why"
            ) from error

    return call


@torch.no_grad()
def extract_all(batches: Iterable[Any], extract: Extract) -> Array:
    """Features `[N, D]` float64 of all images, clips or windows of sound."""
    parts = []
    for batch in batches:
        features = extract(*batch) if isinstance(batch, tuple) else extract(batch)
        parts.append(check_features(torch.as_tensor(features).detach().cpu().double(), least=1))
    return np.concatenate(parts)
