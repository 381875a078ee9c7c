"""Overlapping groups of tokens, a ball around each; see `acoustic_groups.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError

_ENTRIES = 2**24  # of distances that are held at a time
_MOST = 2**27  # members of all groups: 4 GB
_DIRECT = "donot_use_mm_for_euclid_dist"  # which rounds less


class TokenGroups(NamedTuple):
    """A group around each of V tokens; both lists have N entries, one for each pair."""

    members: Tensor  # [N] int64, those of group 0, then of group 1, …
    first_member: Tensor  # [V] int64, where those of each group begin
    owners: Tensor  # [N] int64, the groups of token 0, then of token 1, …
    first_owner: Tensor  # [V] int64, where those of each token begin
    n_owners: Tensor  # [V] float32

    def split(self, p: Tensor) -> Tensor:
        """Probabilities of tokens to those of groups; the same of weights. `[…, V]`."""
        return _sum(p / self.n_owners, self.members, self.first_member)

    def average(self, values: Tensor) -> Tensor:
        """Values of groups to the means over each token's owners, `[…, V]`."""
        return _sum(values, self.owners, self.first_owner) / self.n_owners


def _sum(values: Tensor, index: Tensor, first: Tensor) -> Tensor:
    """Sums of `values[..., index]` over runs that begin at `first`; of the shape of `values`."""
    columns = values.flatten(0, -2).T.contiguous()  # [V, n]
    return F.embedding_bag(index, columns, first, mode="sum").T.reshape(values.shape)


def find_codes(prompt: Prompt, size: int) -> Tensor:
    """`[V]` bool: tokens that the layout of a prompt allows somewhere and that end no row."""
    device = prompt.tokens.device
    layout = prompt.layout
    allowed = None
    if layout is not None:
        allowed = layout.allowed(torch.arange(max(1, layout.columns), device=device)[None])
    is_code = torch.ones(size, dtype=torch.bool, device=device)
    if allowed is not None:
        is_code = allowed.reshape(-1, size).any(0)
    if prompt.stop_tokens is not None:
        is_code[prompt.stop_tokens[prompt.stop_tokens < size]] = False
    return is_code


def group_tokens(vectors: Tensor, is_code: Tensor, radius: float, *, by_angle: bool) -> TokenGroups:
    """Groups around all tokens, of `vectors` `[V, D]`, closer than `radius`: `by_angle` 1 minus the
    cosine, else the Euclidean distance. A token that is no code, or whose vector is NaN, is a group
    of its own. Cost: the distances of all pairs of codes, and memory for all members.
    """
    ids = is_code.nonzero()[:, 0]
    codes = vectors.detach()[ids].float()  # [K, D]
    if by_angle:
        codes = F.normalize(codes, dim=-1)
    index = torch.arange(len(codes), device=codes.device)
    pairs = [(~is_code).nonzero().expand(-1, 2)]  # group, member
    n_pairs = 0
    for rows in index.split(max(1, _ENTRIES // max(1, len(codes)))):
        if by_angle:
            distance = 1 - codes[rows] @ codes.T
        else:
            distance = torch.cdist(codes[rows], codes, compute_mode=_DIRECT)
        is_near = (distance < radius) | (rows[:, None] == index)
        row, column = is_near.nonzero().unbind(1)
        n_pairs += len(row)
        if n_pairs > _MOST:
            raise OptionError(
                f"radius: expected groups of {len(codes)} codes with {_MOST} members together at "
                f"most, received {radius:g}, which gives more; make it smaller, or give attach a "
                "layout=mmaccel.Frames(…) that names the codes"
            )
        pairs.append(torch.stack([ids[rows[row]], ids[column]], 1))
    group, member = torch.cat(pairs).unbind(1)
    n_members = group.bincount(minlength=len(is_code))
    n_owners = member.bincount(minlength=len(is_code))
    return TokenGroups(
        members=member[group.argsort(stable=True)],
        first_member=n_members.cumsum(0) - n_members,
        owners=group[member.argsort(stable=True)],
        first_owner=n_owners.cumsum(0) - n_owners,
        n_owners=n_owners.float(),
    )
