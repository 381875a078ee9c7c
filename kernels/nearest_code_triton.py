"""Nearest codes in Triton: distances of a tile are compared in registers.

Idea: a program takes a tile of vectors through a part of the codebook and keeps the least score and
its index; no N x K matrix is written. A single lookup splits the codebook over programs when there
are too few vectors to fill a GPU; the split changes no score, so it changes no result. A residual
chain runs in one launch: between stages, the output holds what is left of every vector.

Departures: none; two codes whose distances float32 cannot distinguish may be confused, because the
sums of a product run in another order than torch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmaccel.kernels.build import Build
from mmaccel.kernels.nearest_code import check_codebook

NARROW, WIDE = 16, 32  # columns at a time, for codes of up to 16 and of more
SINGLES = {"ROWS": 32, "CODES": 32, "COLUMNS": NARROW, "HALVES": False}  # of a lookup's program
HALVES = {"ROWS": 32, "CODES": 64, "HALVES": True}
CHAIN_ROWS = 16
WARPS = 8
PROGRAMS = 264  # worth splitting the codebook for: two programs for each processor of an H200
_HALVES = (torch.float16, torch.bfloat16)


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    x_rows,
    codebook,
    inside,
    first,
    last,
    width,
    ROWS: tl.constexpr,
    CODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Least score and its index among codes `first` to `last` for rows at pointers `x_rows`."""
    best = tl.full([ROWS], float("inf"), tl.float32)
    index = tl.full([ROWS], 0, tl.int32) + first
    for start in range(first, last, CODES):
        codes = start + tl.arange(0, CODES)
        there = codes < last
        c_rows = codebook + codes.to(tl.int64) * width
        score = tl.zeros([ROWS, CODES], tl.float32)
        half = tl.zeros([CODES], tl.float32)
        for column in range(0, width, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            within = columns < width
            x = tl.load(
                x_rows[:, None] + columns[None, :], inside[:, None] & within[None, :], other=0.0
            )
            c = tl.load(
                c_rows[:, None] + columns[None, :], there[:, None] & within[None, :], other=0.0
            )
            norms = c.to(tl.float32)
            half += tl.sum(norms * norms, 1)
            if HALVES:  # products of halves are exact in float32
                score += tl.dot(x, tl.trans(c), input_precision="ieee")
            else:
                score += tl.dot(x.to(tl.float32), tl.trans(norms), input_precision="ieee")
        score = tl.where(there[None, :], half[None, :] * 0.5 - score, float("inf"))
        least = tl.min(score, 1)
        lowest = tl.min(tl.where(score == least[:, None], codes[None, :], last), 1)
        index = tl.where(least < best, lowest, index)
        best = tl.minimum(least, best)
    return best, index


@triton.jit
def _lookup_kernel(  # type: ignore[no-untyped-def]
    vectors,
    codebook,
    scores,
    indices,
    n_vectors,
    n_codes,
    width,
    part,
    ROWS: tl.constexpr,
    CODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALVES: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * part
    best, index = _search(
        vectors + rows.to(tl.int64) * width,
        codebook,
        rows < n_vectors,
        first,
        tl.minimum(first + part, n_codes),
        width,
        ROWS,
        CODES,
        COLUMNS,
        HALVES,
    )
    to = tl.program_id(1).to(tl.int64) * n_vectors + rows
    tl.store(scores + to, best, mask=rows < n_vectors)
    tl.store(indices + to, index.to(tl.int64), mask=rows < n_vectors)


@triton.jit
def _chain_kernel(  # type: ignore[no-untyped-def]
    left,
    codebooks,
    out,
    n_vectors,
    n_books,
    n_codes,
    width,
    ROWS: tl.constexpr,
    CODES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_vectors
    x_rows = left + rows.to(tl.int64) * width
    for book in range(0, n_books):
        codebook = codebooks + tl.cast(book, tl.int64) * n_codes * width
        _, index = _search(x_rows, codebook, inside, 0, n_codes, width, ROWS, CODES, COLUMNS, False)
        tl.store(out + rows.to(tl.int64) * n_books + book, index.to(tl.int64), mask=inside)
        c_rows = codebook + index.to(tl.int64) * width
        tl.debug_barrier()  # all threads have read what is now overwritten
        for column in range(0, width, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            mask = inside[:, None] & (columns < width)[None, :]
            x = tl.load(x_rows[:, None] + columns[None, :], mask, other=0.0)
            c = tl.load(c_rows[:, None] + columns[None, :], mask, other=0.0).to(tl.float32)
            tl.store(x_rows[:, None] + columns[None, :], x - c, mask)
        tl.debug_barrier()  # and what is written is read by others in the next stage


def refuse_nearest_code(vectors: Tensor, codebook: Tensor) -> str | None:
    """Why this version cannot take such arguments; None if it can."""
    check_codebook(vectors, codebook, 2)
    return _refuse(vectors, codebook)


def refuse_nearest_codes_residual(vectors: Tensor, codebooks: Tensor) -> str | None:
    """Why this version cannot take such arguments; None if it can."""
    check_codebook(vectors, codebooks, 3)
    return _refuse(vectors, codebooks)


def _refuse(vectors: Tensor, codebook: Tensor) -> str | None:
    for name, tensor in (("vectors", vectors), ("codebook", codebook)):
        if tensor.dtype not in (torch.float32, *_HALVES):
            return f"{name}: float32, float16 or bfloat16 wanted, {tensor.dtype} given"
    if vectors.device != codebook.device:
        return f"vectors are on {vectors.device}, the codebook is on {codebook.device}"
    return "vectors have no columns" if vectors.shape[1] == 0 else None


def nearest_code(vectors: Tensor, codebook: Tensor) -> Tensor:
    """See `mmaccel.kernels.nearest_code`. Cost: one launch and the least of a few parts; the
    codebook is read once by every 32 vectors.
    """
    n_vectors, width = vectors.shape
    n_codes = len(codebook)
    sizes = _lookup_sizes(vectors.dtype == codebook.dtype and vectors.dtype in _HALVES, width)
    tiles = max(1, triton.cdiv(n_vectors, sizes["ROWS"]))
    n_blocks = triton.cdiv(n_codes, sizes["CODES"])
    part = triton.cdiv(n_blocks, triton.cdiv(PROGRAMS, tiles)) * sizes["CODES"]
    n_parts = triton.cdiv(n_codes, part)
    scores = torch.empty(n_parts, n_vectors, dtype=torch.float32, device=vectors.device)
    indices = torch.empty(n_parts, n_vectors, dtype=torch.int64, device=vectors.device)
    if n_vectors:
        _lookup_kernel[(tiles, n_parts)](
            vectors.contiguous(),
            codebook.contiguous(),
            scores,
            indices,
            n_vectors,
            n_codes,
            width,
            part,
            **sizes,
            num_warps=WARPS,
        )
    if n_parts == 1:
        return indices[0]
    return indices.gather(0, scores.argmin(0, keepdim=True))[0]  # parts ascend: ties to the lowest


def nearest_codes_residual(vectors: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor]:
    """See `mmaccel.kernels.nearest_code`. Cost: one launch; every codebook is read once by every
    16 vectors.
    """
    n_vectors, width = vectors.shape
    n_books, n_codes, _ = codebooks.shape
    left = vectors.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    codes = torch.empty(n_vectors, n_books, dtype=torch.int64, device=vectors.device)
    if codes.numel():
        sizes = _chain_sizes(width)
        _chain_kernel[(triton.cdiv(n_vectors, sizes["ROWS"]),)](
            left,
            codebooks.contiguous(),
            codes,
            n_vectors,
            n_books,
            n_codes,
            width,
            **sizes,
            num_warps=WARPS,
        )
    return codes, left.to(vectors.dtype)


def _lookup_sizes(halves: bool, width: int) -> dict[str, int]:
    """Block sizes of a lookup; products of float32 take more registers."""
    return HALVES | {"COLUMNS": NARROW if width <= NARROW else WIDE} if halves else SINGLES


def _chain_sizes(width: int) -> dict[str, int]:
    """Block sizes of a chain; on sm_90 other pairs spill registers with Triton 3.6 or 3.7."""
    codes, columns = (32, NARROW) if width <= NARROW else (64, WIDE)
    return {"ROWS": CHAIN_ROWS, "CODES": codes, "COLUMNS": columns}


def builds() -> list[Build]:
    """Every configuration this file launches; float16 compiles as bfloat16 does."""
    found = []
    for dtype, width in (("fp32", NARROW), ("bf16", NARROW), ("bf16", WIDE)):
        signature = {"vectors": f"*{dtype}", "codebook": f"*{dtype}", "scores": "*fp32"}
        signature |= {"indices": "*i64"}
        names = (*signature, "part")
        signature |= dict.fromkeys(("n_vectors", "n_codes", "width", "part"), "i32")
        sizes = _lookup_sizes(dtype != "fp32", width)
        signature |= dict.fromkeys(sizes, "constexpr")
        found.append(Build(_lookup_kernel, signature, sizes, WARPS, 2, 128, names))
    for width in (NARROW, WIDE):
        signature = {"left": "*fp32", "codebooks": "*fp32", "out": "*i64"}
        names = tuple(signature)
        signature |= dict.fromkeys(("n_vectors", "n_books", "n_codes", "width"), "i32")
        sizes = _chain_sizes(width)
        signature |= dict.fromkeys(sizes, "constexpr")
        found.append(Build(_chain_kernel, signature, sizes, WARPS, 2, 128, names))
    return found
