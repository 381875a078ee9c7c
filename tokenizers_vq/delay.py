"""Codebook patterns: at which step of a decoder each code of a frame stands.

A codec of K codebooks gives K codes a frame, and a decoder that predicts several codes at a step
need not predict those of one frame together. A *pattern* is a table `[T, K]` of the step of each
code (J. Copet et al., "Simple and Controllable Music Generation", NeurIPS 2023 (arXiv 2306.05284),
section 2.2). With the codes of book k in column k of a grid `[S, K]` of steps, no two codes of a
book share a step; cells without a code hold a padding id.

All functions here are pure. Published layouts as delays (see `delay`):

- MusicGen, Parler-TTS: ``1, 2, … K`` (step 0 holds no code),
- Dia: ``0, 8, 9, … 15`` behind a first frame of begin ids,
- Higgs Audio v2: ``0, 1, … K - 1`` over a begin frame, the codes, and an end frame.

Shapes: **B** batch, **T** frames, **K** codebooks, **S** steps, **L** cells of a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.checks import check_int, show
from mmaccel.errors import OptionError, ShapeError


class Cells(NamedTuple):
    """Cells of a grid, in the order in which a decoder fills them.

    Attributes:
        step: `[L]` int64, ascending.
        book: `[L]` int64, ascending within a step.
    """

    step: Tensor
    book: Tensor


def flat(n_frames: int, n_books: int) -> Tensor:
    """The interleaved pattern: one code a step, frame by frame.

    Returns:
        The table `[T, K]` int64.
    """
    _check_counts(n_frames, n_books)
    return torch.arange(n_frames * n_books).view(n_frames, n_books)


def delay(n_frames: int, delays: Sequence[int]) -> Tensor:
    """The delay pattern: book k of frame t stands at step ``t + delays[k]``.

    Delays of 0 are the parallel pattern.

    Args:
        n_frames: T.
        delays: of each book, at least 0.

    Returns:
        The table `[T, K]` int64.
    """
    _check_counts(n_frames, len(delays))
    if min(delays) < 0:
        raise OptionError(
            f"delays: expected numbers of steps >= 0, received {show(list(delays))}; count all "
            "from the earliest book"
        )
    return torch.arange(n_frames)[:, None] + torch.tensor(list(delays), dtype=torch.int64)


def stack_and_delay(n_books: int, order: Sequence[int], gap: int) -> Tensor:
    """The stack-and-delay pattern: books of different frames share a step, in an order of the
    frames in which neighbours need not follow each other.

    Source: G. Le Lan et al., "Stack-and-Delay: A New Codebook Pattern for Music Generation", 2023
    (arXiv 2309.08804). The order is the caller's.

    Args:
        n_books: K.
        order: the T frames, each once, as their first books are decoded.
        gap: steps between two books of a frame, at least 1.

    Returns:
        The table `[T, K]` int64.

    Raises:
        OptionError: an order that is no permutation, or a gap below 1.
    """
    n_frames = len(order)
    _check_counts(n_frames, n_books)
    check_int("gap", gap, 1, hint="1 decodes a book a step after the one before")
    if sorted(order) != list(range(n_frames)):
        raise OptionError(
            f"order: expected each of {n_frames} frames once, received {show(list(order))}; give a "
            "permutation"
        )
    turn = torch.tensor(list(order), dtype=torch.int64).argsort()  # [T], when each frame is begun
    return turn[:, None] + gap * torch.arange(n_books)


def coarse_then_fine(n_frames: int, delays: Sequence[int]) -> Tensor:
    """The coarse-first pattern: book 0 of all frames, then all other books in a delay pattern.

    Args:
        n_frames: T.
        delays: of each book but the first, counted from step T on.

    Returns:
        The table `[T, K]` int64.
    """
    fine = delay(n_frames, delays) + n_frames
    return torch.cat([torch.arange(n_frames)[:, None], fine], 1)


def check_table(table: Tensor) -> None:
    """Raise ShapeError unless a table is `[T, K]` int64 of steps, each once in a book."""
    is_table = table.ndim == 2 and table.dtype == torch.int64 and table.numel() > 0
    if not is_table or int(table.min()) < 0:
        raise ShapeError(
            f"pattern: expected steps [T, K] int64 >= 0, received {table.dtype} "
            f"{list(table.shape)}; give one step for each code"
        )
    ordered = table.sort(0).values
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ShapeError(
            "pattern: expected the codes of a book at steps of their own, received two at one "
            "step; a cell of the grid holds one code"
        )


def find_frames(table: Tensor) -> Tensor:
    """The inverse of a table: `[S, K]` int64, the frame whose code a cell holds; -1 for none."""
    check_table(table)
    n_frames, n_books = table.shape
    frames = table.new_full((int(table.max()) + 1, n_books), -1)
    index = torch.arange(n_frames, device=table.device)[:, None].expand(-1, n_books)
    return frames.scatter_(0, table, index)


def apply(codes: Tensor, table: Tensor, pad: int, end: int | None = None) -> Tensor:
    """Arrange codes by a pattern.

    Args:
        codes: `[B, T, K]` int64.
        table: `[T, K]` int64.
        pad: id of cells without a code.
        end: id of those behind the last code of a book; None: `pad`.

    Returns:
        The grid `[B, S, K]` int64.

    Raises:
        ShapeError: a table of another number of frames or books, or no table.
    """
    _check_codes(codes, table)
    frames = find_frames(table)
    found = codes.gather(1, frames.clamp(min=0).expand(len(codes), -1, -1))
    step = torch.arange(len(frames), device=table.device)[:, None]
    is_behind = step > table.max(0).values
    filler = torch.where(is_behind, pad if end is None else end, pad)
    return torch.where(frames >= 0, found, filler)


def invert(grid: Tensor, table: Tensor) -> Tensor:
    """The codes `[B, T, K]` of a grid `[B, S, K]`, which may have more steps than the pattern.

    Raises:
        ShapeError: a grid that does not hold the pattern, or no table.
    """
    check_table(table)
    n_steps = int(table.max()) + 1
    if grid.ndim != 3 or grid.shape[2] != table.shape[1] or grid.shape[1] < n_steps:
        raise ShapeError(
            f"grid: expected [B, S, {table.shape[1]}] with at least {n_steps} steps, received "
            f"{list(grid.shape)}; decode all steps of the pattern first"
        )
    return grid.gather(1, table.expand(len(grid), -1, -1))


def has_code(table: Tensor) -> Tensor:
    """`[S, K]` bool, the cells that hold a code."""
    return find_frames(table) >= 0


def list_cells(chosen: Tensor) -> Cells:
    """The cells of a mask `[S, K]` bool, step by step."""
    step, book = chosen.nonzero(as_tuple=True)
    return Cells(step, book)


def _check_counts(n_frames: int, n_books: int) -> None:
    check_int("n_frames", n_frames, 1, hint="give the frames of the sound")
    check_int("n_books", n_books, 1, hint="give the codebooks of the codec")


def _check_codes(codes: Tensor, table: Tensor) -> None:
    if codes.ndim != 3 or codes.shape[1:] != table.shape:
        raise ShapeError(
            f"codes: expected [B, {', '.join(map(str, table.shape))}] as the pattern, received "
            f"{list(codes.shape)}; make the pattern for this number of frames"
        )
