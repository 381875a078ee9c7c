"""Drafts over a part of the target's vocabulary: which ids these are, and logits over all of them.

VocabTrim: R. Goel et al., "VOCABTRIM: Vocabulary Pruning for Efficient Speculative Decoding in
LLMs", arXiv 2506.22694. FR-Spec: W. Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language
Models via Frequency-Ranked Speculative Sampling", ACL 2025 (arXiv 2502.14856). A drafter scores the
ids that texts contain most often; the rest of its output matrix is not read. An id that is left out
has probability 0, and is drawn from the residual, the target's own probability there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import check_int, check_path, show
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.limits import parse_json, read_whole
from mmaccel.weight_folders import open_weights

_UNKNOWN = -1e4  # a logit of no probability, but not none: such ids may be all that a slot can have


def spread_logits(known: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Logits `[..., V]` of `known` `[..., K]`, those of `ids` `[K]`; very small ones elsewhere."""
    shape = (*known.shape[:-1], vocab_size)
    return known.new_full(shape, _UNKNOWN).index_copy(-1, ids, known)


def frequent_ids(
    texts: Iterable[Sequence[int]], n: int, always: Sequence[int] = ()
) -> tuple[int, ...]:
    """The n ids that texts contain most often, in ascending order; texts that the target has
    written suit best. `always` names ids that are among them in any case, such as that of the end.

    Raises:
        OptionError: n below 1, or fewer different ids than n.
    """
    check_int("n", n, 1, hint="a quarter of the vocabulary is a start")
    kept = set(always)
    if len(kept) > n:
        raise OptionError(
            f"always: expected at most {n} ids, as many as n, received {len(kept)}; give a larger n"
        )
    counts: dict[int, int] = dict.fromkeys(always, 0)
    for text in texts:
        for token in text:
            counts[int(token)] = counts.get(int(token), 0) + 1
    if len(counts) < n:
        raise OptionError(
            f"n: expected at most {len(counts)}, the different ids of the texts, received {n}; "
            "give more texts"
        )
    others = [token for token in counts if token not in kept]
    others.sort(key=lambda token: (-counts[token], token))
    return tuple(sorted([*dict.fromkeys(always), *others][:n]))


def read_ids(ids: object, vocab_size: int, option: str = "ids") -> Tensor:
    """`[K]` int64, different ids of a vocabulary of V.

    Args:
        ids: a tensor `[K]`, a sequence of integers, or a file: a JSON list, or safetensors with
            `d2t`, how far the target's id of each stands from its own, as EAGLE 3 heads have it.
        option: name in messages.
    """
    if isinstance(ids, str | Path):
        return read_ids(_read_file(Path(ids), option), vocab_size, option)
    values: Any = ids.tolist() if isinstance(ids, Tensor) else ids
    is_list = (
        isinstance(values, Sequence) and not isinstance(values, str | bytes) and len(values) > 0
    )
    if not is_list or not all(type(each) is int for each in values):
        raise OptionError(
            f"{option}: expected a list of ids, a tensor [K] or a file, received {show(ids)}; "
            "mmaccel.frequent_ids(texts, n) makes one"
        )
    outside = [each for each in values if not 0 <= each < vocab_size]
    if outside:
        raise OptionError(
            f"{option}: expected ids in 0..{vocab_size - 1}, received {outside[0]}; take the ids "
            "of this vocabulary"
        )
    if len(set(values)) < len(values):
        raise OptionError(
            f"{option}: expected different ids, received {len(values)} of which "
            f"{len(set(values))} differ; name each once"
        )
    return torch.tensor(values, dtype=torch.int64)


def _read_file(file: Path, option: str) -> Any:
    check_path(option, file, "file", hint="JSON with a list, or safetensors with d2t")
    if file.suffix == ".safetensors":
        weights = open_weights(file, option, lambda name: name if name == "d2t" else "")
        n_ids = weights.shapes.get("d2t", (0,))[0]
        offsets = weights.read({"d2t": (n_ids,)})["d2t"].long()
        return torch.arange(n_ids) + offsets
    try:
        return parse_json(read_whole(file, option))
    except ValueError as error:
        raise UnsupportedModelError(
            f"{option}: expected a JSON list of ids in {file}, received what cannot be read "
            f"({error}); save the list as JSON, or give safetensors with d2t"
        ) from error
