"""The sides of a measurement of visual tokens: all tokens, and each method at each fraction.

The controls are always among them: a method is worth what it has over a random choice, an even one,
and plain downsampling, of tokens and, where the library has it, of pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mmaccel.catalog import REDUCERS, find_own, load
from mmaccel.checks import check_number, show, suggest
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.handle import attach
from mmaccel.reduction.visual_tokens.contract import TokenReducer

ALL_TOKENS = "all tokens"
_KNOWN = {entry.target.split(":")[1]: short for short, entry in REDUCERS.items()}
DOWNSAMPLING = ("DownsamplePixels", "Downsample")  # the first that is measured tells what is easy
CONTROLS = tuple(n for n in (*DOWNSAMPLING, "RandomTokens", "UniformTokens") if n in _KNOWN)
METHODS = (*CONTROLS, *(n for n in _KNOWN if n not in CONTROLS))


@dataclass(frozen=True)
class Side:
    """A way to answer the questions.

    Attributes:
        name: of the method, or `ALL_TOKENS`.
        keep: the fraction that stays; 1 where a rule of the method alone says how much.
        method: None for all tokens.
    """

    name: str = ALL_TOKENS
    keep: float = 1.0
    method: TokenReducer | None = None

    @property
    def key(self) -> str:
        """What it is called in a report: the method with its settings."""
        return ALL_TOKENS if self.method is None else repr(self.method)


def parse_methods(texts: Iterable[str]) -> list[str]:
    """Names of methods, the controls first; none given: all.

    Args:
        texts: of the catalog or of the classes, in any case, with or without `-` and `_`; of an
            entry point, or a typed `module:Name`.

    Raises:
        OptionError: an unknown name.
    """
    spelled = {_plain(text): name for name in METHODS for text in (name, _KNOWN[name])}
    found = []
    for text in texts:
        name = spelled.get(_plain(text))
        if name is None and find_own("visual_tokens", text) is not None:
            name = text
        if name is None:
            raise OptionError(
                f"--methods: expected some of {', '.join(REDUCERS)}, received {show(text)}; "
                f"{suggest(text, REDUCERS, 'controls are always measured')}"
            )
        found.append(name)
    return list(dict.fromkeys([*CONTROLS, *found])) if found else list(METHODS)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def parse_keeps(texts: Sequence[str]) -> list[float]:
    """Fractions in (0, 1), each once.

    Raises:
        OptionError: anything else, or none.
    """
    keeps = []
    for text in texts or [""]:
        try:
            keep = float(text)
        except ValueError:
            keep = -1.0
        hint = "write for example --keep 0.5,0.22; all tokens are always measured"
        check_number(
            "--keep", keep if keep not in (-1.0, 1.0) else text, 0, 1, hint, above_low=True
        )
        keeps.append(keep)
    return list(dict.fromkeys(keeps))


def list_sides(
    model: Any, names: Sequence[str], keeps: Sequence[float]
) -> tuple[list[Side], dict[str, str]]:
    """What a model can be measured with.

    Args:
        model: a vision-language model of transformers.
        names: out of `METHODS`, or as `mmaccel.catalog.find_own` takes them.
        keeps: the fractions.

    Returns:
        All tokens, then the methods; and the reason why each of the others is left out.

    Raises:
        UnsupportedModelError: `attach` does not serve the model, or none of the methods.
    """
    with attach(model, "autoregressive", strict=True):
        pass
    sides, left_out = [Side()], {}
    for name in names:
        target = None if name in METHODS else find_own("visual_tokens", name)
        method = load(REDUCERS[_KNOWN[name]].target if target is None else target)
        try:
            with attach(model, "autoregressive", visual_tokens=method(keep=keeps[0])):
                if not method.needs_budget:  # what its own rule leaves
                    sides.append(Side(name, method=method()))
                sides += [Side(name, keep, method(keep=keep)) for keep in keeps]
        except (UnsupportedModelError, OptionError) as error:
            left_out[name] = " ".join(str(error).split())
    if len(sides) == 1:
        raise UnsupportedModelError(
            f"model: expected one that takes a method, received a {type(model).__name__}: "
            f"{next(iter(left_out.values()))}"
        )
    return sides, left_out
