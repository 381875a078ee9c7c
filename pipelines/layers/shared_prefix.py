"""Prompts that several rows read, and that the layers store once.

J. Juravsky, B. Brown, R. Ehrlich, D. Y. Fu, C. Ré, A. Mirhoseini, "Hydragen: High-Throughput LLM
Inference with Shared Prefixes", arXiv:2402.05099, section 3: attention over the shared prefix and
over what follows it in each row are computed apart. The queries of all rows of a group attend to
the prefix in one product, and the two answers are merged by their log-sum-exps.

Departures: groups of equally many rows attend in one product, under a mask where their prefixes
have different lengths. The prefix is a prompt without its last token, which every row processes
itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmaccel.contracts import PrefixGroups
from mmaccel.kernels import dispatch
from mmaccel.kernels.window_attention import window_attention


@dataclass(frozen=True)
class PrefixPart:
    """N prefixes that are read by n rows each.

    Attributes:
        rows: `[N, n]` int64, which read each prefix.
        lengths: `[N]` int64, at most P.
        layers: of every layer that methods serve (`number_served`; others hold what they see), keys
            and values `[N, Hkv, P, D]`, zeros behind a prefix.
        hidden: `[N, 1, 1, P]` float, what is added to scores; None where all lengths are P.
        is_all: whether these are all rows of a run, in their order.
        key: of a prefix that further rows may join; None where none do.
    """

    rows: Tensor
    lengths: Tensor
    layers: tuple[tuple[Tensor, Tensor], ...]
    hidden: Tensor | None
    is_all: bool
    key: Hashable = None

    @property
    def n_bytes(self) -> int:
        """Of keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)

    def attend(
        self, layer: int, query: Tensor, *, scale: float, softcap: float | None, by_kernel: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention of a layer over the prefixes.

        Args:
            layer: its number.
            query: `[N n, Hq, W, D]` of the rows, prefix by prefix.
            scale, softcap: of the scores.
            by_kernel: whether `window_attention` is dispatched.

        Returns:
            `[N n, Hq, W, D]`, and the log-sum-exps `[N n, Hq, W]`.
        """
        keys, values = self.layers[layer]
        # the queries of all rows, and of all heads that share a key head, follow each other
        by_head = query.view(*self.rows.shape, keys.shape[1], -1, *query.shape[2:])
        packed = by_head.transpose(1, 2)  # [N, Hkv, n, G, W, D]
        if by_kernel:  # as heads of one position, the last of the prefix
            out, lse = dispatch.run(
                window_attention, packed.flatten(1, 4)[:, :, None], keys, values,
                self.lengths.to(keys.device) - 1, scale=scale, softcap=softcap,
            )  # fmt: skip
        else:
            hidden = None if self.hidden is None else self.hidden.to(keys.device)
            out, lse = attend_with_lse(
                packed.flatten(2, 4), keys, values, hidden, scale=scale, softcap=softcap
            )
        out = out.view(*packed.shape[:-1], -1).transpose(1, 2)
        lse = lse.view(packed.shape[:-1]).transpose(1, 2)
        return out.flatten(2, 3).flatten(0, 1), lse.flatten(2, 3).flatten(0, 1)

    def keep(self, rows: list[list[int]], n_rows: int) -> list[PrefixPart]:
        """What is left where other rows read the prefixes, and some are not read any more.

        Args:
            rows: of each prefix, those that read it.
        """
        by_size: dict[int, list[int]] = {}
        for number, own in enumerate(rows):
            by_size.setdefault(len(own), []).append(number)
        by_size.pop(0, None)
        found = []
        for numbers in by_size.values():
            left = self
            if len(numbers) < len(rows):
                left = replace(
                    self,
                    lengths=self.lengths[numbers],
                    layers=tuple((keys[numbers], values[numbers]) for keys, values in self.layers),
                    hidden=None if self.hidden is None else self.hidden[numbers],
                )
            own_rows = self.rows.new_tensor([rows[number] for number in numbers])
            found.append(left.give_to(own_rows, n_rows))
        return found

    def give_to(self, rows: Tensor, n_rows: int) -> PrefixPart:
        """The same prefixes, read by `rows` `[N, n]` of a run's `n_rows`."""
        is_all = rows.flatten().tolist() == [*range(n_rows)]
        return replace(self, rows=rows, is_all=is_all)


class SharedPrefix:
    """The prefixes of a run's rows.

    Args:
        lengths: `[R]` int64, of each row's prefix; 0 where it reads none.
        parts: the prefixes; each row that reads one is in one of them.

    Attributes:
        lengths: see above.
    """

    def __init__(self, lengths: Tensor, parts: Sequence[PrefixPart] = ()) -> None:
        self.lengths = lengths
        self._parts = list(parts)

    @classmethod
    def of_groups(
        cls, groups: PrefixGroups, lengths: Tensor, layers: Sequence[tuple[Tensor, Tensor]]
    ) -> SharedPrefix:
        """The prefixes of rows that begin together.

        Args:
            lengths: `[N]` int64, those of the groups.
            layers: see `PrefixPart`.
        """
        own = lengths.new_zeros(groups.n_rows)
        for group, length in zip(groups.rows, lengths, strict=True):
            own[list(group)] = length
        is_read = [number for number, length in enumerate(lengths.tolist()) if length]
        by_size: dict[int, list[int]] = {}
        for number in is_read:  # a prompt of one token has no prefix
            by_size.setdefault(len(groups.rows[number]), []).append(number)
        parts: list[PrefixPart] = []
        for numbers in by_size.values():
            rows = [list(groups.rows[number]) for number in numbers]
            whole = _make_part(lengths[numbers], numbers, layers)
            parts += whole.keep(rows, groups.n_rows)
        return cls(own, parts)

    @property
    def is_read(self) -> bool:
        """Whether any row reads a prefix."""
        return bool(self._parts)

    def join(self, row: int, key: Hashable, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Let a row that reads nothing read a prefix, together with the rows of the same key.

        Args:
            row: its number.
            key: not None.
            layers: of those of a `PrefixPart`, keys and values `[Hkv, P, D]`.
        """
        length = layers[0][0].shape[1]
        self.lengths = self.lengths.clone()  # stores may hold the other one
        self.lengths[row] = length
        own = self.lengths.new_tensor([[row]])
        for number, part in enumerate(self._parts):
            if part.key == key:
                rows = torch.cat([part.rows, own], 1)
                self._parts[number] = part.give_to(rows, len(self.lengths))
                return
        stored = tuple((keys[None], values[None]) for keys, values in layers)
        part = PrefixPart(own, self.lengths[[row]], stored, None, is_all=False, key=key)
        self._parts.append(part.give_to(own, len(self.lengths)))

    def leave(self, row: int) -> None:
        """Let a row read nothing any more; a prefix that no row reads is freed."""
        self.lengths = self.lengths.clone()
        self.lengths[row] = 0
        parts = []
        for part in self._parts:
            left = [[own for own in before if own != row] for before in part.rows.tolist()]
            parts += part.keep(left, len(self.lengths))
        self._parts = parts

    def select(self, rows: Tensor) -> SharedPrefix:
        """What these rows read, `[n]` int64, in their order."""
        chosen = SharedPrefix(self.lengths, self._parts)
        chosen.keep(rows)
        return chosen

    def read(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[Hkv, P, D]` that a row reads, of each of those layers; empty where it
        does not.
        """
        for part in self._parts:
            for number, rows in enumerate(part.rows.tolist()):
                if row in rows:
                    end = int(part.lengths[number])
                    return [
                        (keys[number, :, :end], values[number, :, :end])
                        for keys, values in part.layers
                    ]
        return []

    @property
    def n_bytes(self) -> int:
        """Of all keys and values."""
        return sum(part.n_bytes for part in self._parts)

    def add(
        self, layer: int, query: Tensor, own: Tensor, lse: Tensor, *,
        scale: float, softcap: float | None, by_kernel: bool,
    ) -> Tensor:  # fmt: skip
        """Attention `[R, Hq, W, D]` over the prefixes and what follows them.

        Args:
            layer: its number.
            query: `[R, Hq, W, D]`.
            own: `[R, Hq, W, D]`, the attention over what follows.
            lse: `[R, Hq, W]`, its log-sum-exps.
            scale, softcap, by_kernel: see `PrefixPart.attend`.
        """
        for part in self._parts:
            rows = None if part.is_all else part.rows.flatten().to(query.device)
            found, found_lse = part.attend(
                layer, query if rows is None else query[rows],
                scale=scale, softcap=softcap, by_kernel=by_kernel,
            )  # fmt: skip
            if rows is None:
                return merge(own, lse, found, found_lse)
            own = own.index_copy(0, rows, merge(own[rows], lse[rows], found, found_lse))
        return own

    def fill(self, layer: int, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write a layer's prefixes into what was read of what follows them.

        Args:
            layer: its number.
            index: `[B, N]` int64, cache indices of the first B rows.
            keys, values: `[B, Hkv, N, D]`, written where an index is in a row's prefix.
        """
        for part in self._parts:
            for number, rows in enumerate(part.rows.tolist()):
                own = [row for row in rows if row < len(index)]
                at = index[own]  # [n, N]
                is_inside = (at >= 0) & (at < part.lengths[number].to(at.device))
                for made, stored in zip((keys, values), part.layers[layer], strict=True):
                    entries = stored[number].transpose(0, 1)[at.clamp(0, stored.shape[2] - 1)]
                    seen = is_inside[:, None, :, None].to(made.device)
                    made[own] = torch.where(seen, entries.transpose(1, 2), made[own])

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone, `[n]` int64, in their order. Cost: a copy of prefixes that
        were read by equally many rows and are no longer.
        """
        self.lengths = self.lengths[rows.to(self.lengths.device)]
        kept = rows.tolist()
        parts = []
        for part in self._parts:
            left = [
                [new for new, old in enumerate(kept) if old in before]
                for before in part.rows.tolist()
            ]
            parts += part.keep(left, len(kept))
        self._parts = parts


def _make_part(
    lengths: Tensor, numbers: list[int], layers: Sequence[tuple[Tensor, Tensor]]
) -> PrefixPart:
    """The prefixes with these numbers, which no row reads yet."""
    longest = int(lengths.max())
    copies = tuple(
        (keys[numbers, :, :longest].contiguous(), values[numbers, :, :longest].contiguous())
        for keys, values in layers
    )
    hidden = None
    if int(lengths.min()) < longest:
        keys = copies[0][0]
        is_behind = torch.arange(longest, device=lengths.device) >= lengths[:, None]
        hidden = torch.zeros(is_behind.shape, dtype=keys.dtype, device=lengths.device)
        hidden.masked_fill_(is_behind, torch.finfo(keys.dtype).min)
        hidden = hidden[:, None, None].to(keys.device)
    rows = lengths.new_zeros(len(numbers), 0)
    return PrefixPart(rows, lengths, copies, hidden, is_all=False)


def attend_with_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *,
    scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention by torch, and the log-sum-exps of its scores.

    Source of the operation on a CPU: `F.scaled_dot_product_attention`, which runs it and drops the
    log-sum-exps; torch 2.6 to 2.13.

    Args:
        query: `[R, H, W, D]`.
        key, value: `[R, H, S, D]`.
        mask: `[R, 1, W or 1, S]`, added to scores; None: all is seen.
        scale, softcap: of the scores.

    Returns:
        `[R, H, W, D]` of query's dtype, and `[R, H, W]` float32.
    """
    if query.device.type == "cpu" and softcap is None and query.shape[-1] == value.shape[-1]:
        wide = None if mask is None else mask.expand(-1, -1, query.shape[2], -1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=wide, scale=scale
        )
        return out, lse
    scores = (query @ key.mT).float() * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1).to(value.dtype) @ value, scores.logsumexp(-1)


def merge(own: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """One attention `[..., D]` of two, each over some of the keys.

    Args:
        own, other: `[..., D]`.
        lse, other_lse: `[...]`, the log-sum-exps of their scores.
    """
    share = torch.sigmoid(other_lse - lse)[..., None]  # of the other's weights
    return torch.lerp(own.float(), other.float(), share).to(own.dtype)
