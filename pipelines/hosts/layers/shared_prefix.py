"""Prompts that several rows read, and that the layers store once.

J. Juravsky, B. Brown, R. Ehrlich, D. Y. Fu, C. Ré, A. Mirhoseini, "Hydragen: High-Throughput LLM
Inference with Shared Prefixes", arXiv:2402.05099, section 3: the queries of all rows of a group
attend to the prefix in one product, each row to what follows it apart; both are merged by
log-sum-exps.

Departure: each prefix is a product of its own. It is a prompt without its last token, which every
row processes itself, or what a prefix tree has found of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmaccel.kernels import dispatch
from mmaccel.kernels.window_attention import window_attention


@dataclass(frozen=True)
class _Prefix:
    """One that some rows read, and nobody writes."""

    rows: tuple[int, ...]  # which read it
    key: Hashable  # rows that join under the same one read it, too
    # keys and values [1, Hkv, P, D] of every layer that methods serve; others hold what they see
    layers: tuple[tuple[Tensor, Tensor], ...]


class SharedPrefix:
    """The prefixes of a run's rows; each row that reads one is in one of them."""

    def __init__(self, lengths: Tensor, prefixes: Sequence[_Prefix] = ()) -> None:
        self.lengths = lengths  # [R] int64, of each row's prefix; 0 where it reads none
        self._prefixes = [prefix for prefix in prefixes if prefix.rows]
        rows = [row for prefix in self._prefixes for row in prefix.rows]
        is_all = rows == [*range(len(lengths))]
        self._rows = None if is_all else lengths.new_tensor(rows)  # prefix by prefix

    @property
    def is_read(self) -> bool:
        return bool(self._prefixes)

    @property
    def n_bytes(self) -> int:
        layers = [pair for prefix in self._prefixes for pair in prefix.layers]
        return sum(keys.nbytes + values.nbytes for keys, values in layers)

    def join(
        self, row: int, key: Hashable, layers: Sequence[tuple[Tensor, Tensor]]
    ) -> SharedPrefix:
        """With a row that reads a prefix, its keys and values `[Hkv, P, D]` a layer, by its key."""
        without = self.leave(row)
        lengths = without.lengths
        lengths[row] = layers[0][0].shape[1]
        prefixes = list(without._prefixes)
        for number, prefix in enumerate(prefixes):
            if prefix.key == key:
                prefixes[number] = replace(prefix, rows=(*prefix.rows, row))
                return SharedPrefix(lengths, prefixes)
        states = tuple((keys[None], values[None]) for keys, values in layers)
        return SharedPrefix(lengths, [*prefixes, _Prefix((row,), key, states)])

    def leave(self, row: int) -> SharedPrefix:
        """With a row that reads nothing; a prefix that no row reads is freed."""
        lengths = self.lengths.clone()
        lengths[row] = 0
        prefixes = []
        for prefix in self._prefixes:
            readers = tuple(reader for reader in prefix.rows if reader != row)
            prefixes.append(replace(prefix, rows=readers))
        return SharedPrefix(lengths, prefixes)

    def select(self, rows: Tensor) -> SharedPrefix:
        numbers = rows.tolist()
        prefixes = []
        for prefix in self._prefixes:
            readers = tuple(new for new, old in enumerate(numbers) if old in prefix.rows)
            prefixes.append(replace(prefix, rows=readers))
        return SharedPrefix(self.lengths[rows.to(self.lengths.device)], prefixes)

    def read(self, row: int) -> Sequence[tuple[Tensor, Tensor]]:
        """Keys and values `[Hkv, P, D]` of each layer that a row reads; empty where it does not."""
        for prefix in self._prefixes:
            if row in prefix.rows:
                return [(keys[0], values[0]) for keys, values in prefix.layers]
        return ()

    def add(
        self, layer: int, query: Tensor, own: Tensor, lse: Tensor, *,
        scale: float, softcap: float | None, by_kernel: bool,
    ) -> Tensor:  # fmt: skip
        """Attention `[R, Hq, W, D]` over the prefixes and what follows, whose attention is `own`
        with log-sum-exps `lse` `[R, Hq, W]`.
        """
        if not self._prefixes:
            return own
        rows = None if self._rows is None else self._rows.to(query.device)  # None: all, in order
        queries = query if rows is None else query[rows]
        outputs = []
        first = 0
        for prefix in self._prefixes:
            keys, values = prefix.layers[layer]
            end = first + len(prefix.rows)
            of_prefix = queries if end - first == len(queries) else queries[first:end]
            first = end
            # the queries of all rows, and of all heads that share a key head, follow each other
            by_head = of_prefix.unflatten(1, (keys.shape[1], -1)).transpose(0, 1)
            packed = by_head.flatten(1, 3)[None]  # [1, Hkv, n G W, D] of [Hkv, n, G, W, D]
            if by_kernel:  # as heads of one position, the last of the prefix
                last = torch.full((1,), keys.shape[2] - 1, dtype=torch.int64, device=keys.device)
                out, out_lse = dispatch.run(
                    window_attention, packed.flatten(1, 2)[:, :, None], keys, values, last,
                    scale=scale, softcap=softcap,
                )  # fmt: skip
            else:
                out, out_lse = attend_with_lse(
                    packed, keys, values, None, scale=scale, softcap=softcap
                )
            out = out.view(*by_head.shape[:-1], -1).transpose(0, 1).flatten(1, 2)  # [n, Hq, W, D]
            out_lse = out_lse.view(by_head.shape[:-1]).transpose(0, 1).flatten(1, 2)
            outputs.append((out, out_lse))
        over_prefix, prefix_lse = outputs[0]
        if len(outputs) > 1:
            over_prefix, prefix_lse = (torch.cat(pieces) for pieces in zip(*outputs, strict=True))
        if rows is None:
            return merge(own, lse, over_prefix, prefix_lse)
        return own.index_copy(0, rows, merge(own[rows], lse[rows], over_prefix, prefix_lse))


def attend_with_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *,
    scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention `[R, Hq, W, D]`, and log-sum-exps `[R, Hq, W]` float32 of its scores, to which a
    mask `[R, 1 or Hkv, W, S]` is added; query heads that share keys are queries of one head.

    Source of the operation on a CPU: `F.scaled_dot_product_attention`, which drops the
    log-sum-exps; torch 2.6 to 2.13.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        packed = query.unflatten(1, (-1, groups)).flatten(2, 3)  # [R, Hkv, G W, D]
        if mask is not None:
            is_one = query.shape[2] == 1
            mask = mask.expand(-1, -1, groups, -1) if is_one else mask.repeat(1, 1, groups, 1)
        out, lse = attend_with_lse(packed, key, value, mask, scale=scale, softcap=softcap)
        out = out.unflatten(2, (groups, -1)).flatten(1, 2)
        return out, lse.unflatten(2, (groups, -1)).flatten(1, 2)
    if query.device.type == "cpu" and softcap is None and query.shape[-1] == value.shape[-1]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scale
        )
        return out, lse
    scores = (query @ key.mT).float() * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1).to(value.dtype) @ value, scores.logsumexp(-1)


def merge(own: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """One attention `[..., D]` of two over different keys, by the log-sum-exps of their scores."""
    share = torch.sigmoid(other_lse - lse)[..., None]  # of the other's weights
    return torch.lerp(own.float(), other.float(), share).to(own.dtype)
