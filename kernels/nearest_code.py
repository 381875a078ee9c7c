"""Vector quantization: the entry of a codebook that lies nearest, and residual chains of lookups.

A. van den Oord, O. Vinyals, K. Kavukcuoglu, "Neural Discrete Representation Learning", 2017, arXiv
1711.00937, equation 1 (one lookup); N. Zeghidour et al., "SoundStream", 2021, arXiv 2107.03312,
algorithm 1 (residual vector quantization). The distance |x - c|^2 orders codes as |c|^2 / 2 - x.c
does, which needs one matrix product. This file is the specification.

Departures: none in the lookup; a residual stays float32 between its stages.

Shapes: **N** vectors, **D** their width, **K** codes, **Q** codebooks of a chain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.errors import ShapeError

ROWS = 4096  # vectors whose distances to all codes are held at once


def nearest_code(vectors: Tensor, codebook: Tensor) -> Tensor:
    """Index of the code with the least squared distance; the lowest of several.

    Scores are computed in float32 (on a GPU as `torch.backends.cuda.matmul` allows it; TF32, which
    is off by default, moves near ties). Codes whose distances differ by less than float32 resolves
    may be confused; equal codes whose scores come out equal give the lower index.

    Args:
        vectors: `[N, D]`, floating point and finite.
        codebook: `[K, D]`, floating point and finite, K at least 1.

    Returns:
        `[N]` int64.

    Raises:
        ShapeError: the two do not go together.

    Cost: one matrix product; `ROWS` x K float32 at a time.
    """
    check_codebook(vectors, codebook, 2)
    codes = codebook.float()
    half = codes.square().sum(1) / 2
    chunks = [(half - chunk.float() @ codes.t()).argmin(1) for chunk in vectors.split(ROWS)]
    return torch.cat(chunks)


def nearest_codes_residual(vectors: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor]:
    """Find each vector's nearest code, subtract it and go on with the rest, once per codebook.

    Args:
        vectors: `[N, D]`, floating point and finite.
        codebooks: `[Q, K, D]`, floating point and finite, K at least 1.

    Returns:
        Codes `[N, Q]` int64, and what is left after the last stage, `[N, D]` in the dtype of
        `vectors`.

    Raises:
        ShapeError: the two do not go together.
    """
    check_codebook(vectors, codebooks, 3)
    left = vectors.float()
    codes = torch.empty(len(vectors), len(codebooks), dtype=torch.int64, device=vectors.device)
    for stage, codebook in enumerate(codebooks.unbind()):
        codes[:, stage] = nearest_code(left, codebook)
        left = left - codebook[codes[:, stage]].float()
    return codes, left.to(vectors.dtype)


def check_codebook(vectors: Tensor, codebook: Tensor, axes: int) -> None:
    """Raises ShapeError unless vectors are `[N, D]` and the codebook has `axes` axes, `[..., K, D]`
    with K at least 1.
    """
    fits = vectors.ndim == 2 and codebook.ndim == axes and vectors.shape[-1] == codebook.shape[-1]
    if not fits or codebook.shape[-2] == 0:
        wanted = "[K, D]" if axes == 2 else "[Q, K, D]"
        raise ShapeError(
            f"codebook: expected vectors [N, D] and a codebook {wanted} with K >= 1, received "
            f"{list(vectors.shape)} and {list(codebook.shape)}; reshape them"
        )
