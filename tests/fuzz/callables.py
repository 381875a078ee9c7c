"""Callables for `--features` and `--clip`, all but one of them wrong."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import Tensor

number = 3


class Unprintable(Exception):
    """An exception without a message that can be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raises(*_: Any) -> NoReturn:
    raise KeyError("\x1b[31m[red]x[/nope]")


def leaves(*_: Any) -> NoReturn:
    sys.exit(0)


def unprintable(*_: Any) -> NoReturn:
    raise Unprintable


def recursive(*_: Any) -> Any:
    return recursive(*_)


def nothing(*_: Any) -> None:
    return None


def text(*_: Any) -> str:
    return "x"


def narrow(pixels: Tensor, *_: Any) -> Tensor:
    return torch.zeros(len(pixels), 0)


def wide(pixels: Tensor, *_: Any) -> Tensor:
    return torch.zeros(len(pixels), 100_000)


def wrong_rows(pixels: Tensor, *_: Any) -> Tensor:
    return torch.zeros(len(pixels) + 1, 4)


def not_finite(pixels: Tensor, *_: Any) -> Tensor:
    return torch.full((len(pixels), 4), float("nan"))


def complex_numbers(pixels: Tensor, *_: Any) -> Any:
    made = torch.ones(len(pixels), 4, dtype=torch.complex64)
    return (made, made) if _ else made


def embed(pixels: Tensor, texts: list[str]) -> tuple[Tensor, Tensor]:
    """The right one, for `--clip`."""
    return torch.ones(len(pixels), 4), torch.ones(len(texts), 4)
