"""Trees of coarse drafts: alternatives to the chain, continued by C for their own context.

An alternative of rank r at a slot is the r-th best of the slot's corrected scores. It is right if
all drafts before it are right and the chain's is not:

    P(path) = product over the slots before of P(rank 0) * P(rank r)

with P(rank r) by the gaps of scores, see `mmaccel.samplers.drafting.gap_model`. The likeliest
alternatives fork; what stands behind one is drafted as the chain was, with the alternative on its
left, all branches at once. The children of any entry of a tree are the ranks of the slot behind it,
with its path on their left. Own study; `GAPS` was fitted on 850 slots of images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.kernels.coarse_rounds import SweepSlots
from mmaccel.samplers.acceptance import one_hot
from mmaccel.samplers.drafting.contract import Children, Nodes, OpenRun, Paths
from mmaccel.samplers.drafting.gap_model import Prior, Ranks

if TYPE_CHECKING:
    from mmaccel.samplers.drafting.coarse_drafter import CoarseDrafter

_RANKS = 6  # of a slot that are looked at
GAPS: Prior = ((2.5, -2.5), (4.0, -3.5))  # beta and c that rows begin with


@torch.no_grad()
def grow_branches(
    drafter: CoarseDrafter, run: OpenRun, drafts: Tensor, noise: Tensor, *, n: int, length: int
) -> Nodes | None:
    """N branches of L drafts beside the chain; None before the first pass."""
    slots = drafter.sweep_slots(run, noise)
    if slots is None:
        return None
    work = drafter.pad_tokens(run)
    now = work.gather(1, slots.neighbours.flatten(1)).view_as(slots.neighbours)
    values, tokens = _rank(drafter, run, slots, now)
    index = torch.arange(drafts.shape[1], device=drafts.device).expand_as(drafts)
    chances = drafter.gaps.log_chances(values, index).exp()  # [B, K, r]
    chain = Paths(drafts[:, None].expand(-1, drafts.shape[1], -1), index)
    drafter.gaps.expect(Ranks(values, tokens, chain, slots.is_fixed))
    forks, firsts = _choose(slots, drafts, chances, tokens, n=n, length=length)

    # behind an alternative: the slots from the fork on, in copies of the row
    rows = torch.arange(len(drafts), device=drafts.device)[:, None]
    copies = work.repeat_interleave(n, 0)
    copies.scatter_(1, slots.columns[rows, forks].view(-1, 1), firsts.view(-1, 1))
    if length == 1:
        return Nodes.of_branches(forks, firsts[..., None], drafts.shape[1] + 1)
    at = forks[..., None] + torch.arange(1, length, device=forks.device)  # [B, N, L-1]
    of_branches = _take(slots, at)
    redrafted = drafter.make_drafts(run, of_branches, copies, of_branches.ids.shape[2])
    behind = redrafted.drafts.view(len(drafts), n, length - 1)
    branches = torch.cat([firsts[..., None], behind], 2)
    return Nodes.of_branches(forks, branches, drafts.shape[1] + 1)


@torch.no_grad()
def find_children(
    drafter: CoarseDrafter, run: OpenRun, paths: Paths, noise: Tensor, k: int
) -> Children | None:
    """The best ranks after entries of a tree; a slot whose draft is fixed has that one child."""
    behind = _slots_behind(drafter, run, paths, noise)
    if behind is None:
        return None
    at, now = behind
    values, tokens = _rank(drafter, run, at, now)

    chances = drafter.gaps.log_chances(values, paths.depths).exp()
    drafts = run.rows.tokens.gather(1, at.columns)
    drafter.gaps.expect(Ranks(values, tokens, paths, at.is_fixed))
    is_fixed = at.is_fixed[..., None]
    only = torch.zeros_like(chances)
    only[..., 0] = 1
    tokens = torch.where(is_fixed & (only > 0), drafts[..., None], tokens)
    log_probs = torch.where(is_fixed, only, chances).log()
    return Children(tokens[..., :k], log_probs[..., :k])


@torch.no_grad()
def find_distributions(drafter: CoarseDrafter, run: OpenRun, paths: Paths) -> Tensor:
    """What may follow entries of a tree, `[B, n, V]`; of a fixed slot its draft."""
    slots = run.rows.slots[:, :1] + paths.depths
    drafts = run.rows.tokens.gather(1, slots + run.rows.origin)
    fixed = one_hot(drafts, run.vocab_size)
    silent = fixed.new_zeros(1, 1, 1)
    behind = _slots_behind(drafter, run, paths, silent)
    if behind is None:
        return fixed
    at, now = behind
    p_draft = drafter.find_scores(run, at, now, paths.depths).softmax(-1)
    return torch.where(at.is_fixed[..., None], fixed, p_draft)


def _slots_behind(
    drafter: CoarseDrafter, run: OpenRun, paths: Paths, noise: Tensor
) -> tuple[SweepSlots, Tensor] | None:
    """The slots behind n entries, and their neighbours' tokens `[B, n, N]`; None before a pass."""
    slots = drafter.sweep_slots(run, noise)
    if slots is None:
        return None
    work = drafter.pad_tokens(run)
    rows = torch.arange(len(work), device=work.device)[:, None]
    fields = slots._asdict()
    last = fields.pop("last")
    taken = {name: value[rows, paths.depths] for name, value in fields.items()}
    at = SweepSlots(**taken, last=last)  # of n slots, which may be the same
    # an entry's neighbours in the window are those of its path
    place = at.neighbours - slots.columns[:, :1, None]  # [B, n, N], in the window
    is_inside = (place >= 0) & (place < paths.tokens.shape[2])
    inside = paths.tokens.gather(2, place.clamp(0, paths.tokens.shape[2] - 1))
    before = work.gather(1, at.neighbours.flatten(1)).view_as(place)
    return at, torch.where(is_inside, inside, before)


def _rank(
    drafter: CoarseDrafter, run: OpenRun, slots: SweepSlots, now: Tensor
) -> tuple[Tensor, Tensor]:
    """The best perturbed scores of K slots and their tokens, `[B, K, r]`, falling."""
    moved, fresh = drafter.find_changes(run, slots, slots.ids, now)
    n_ranks = min(_RANKS, moved.shape[2])
    seen = (slots.values + moved).topk(n_ranks, -1)
    fresh = fresh + slots.noise
    new = fresh.topk(n_ranks, -1)
    is_seen = slots.is_seen[..., None]
    tokens = torch.where(is_seen, slots.ids.gather(2, seen.indices), new.indices)
    return torch.where(is_seen, seen.values, new.values), tokens


def _choose(
    slots: SweepSlots, drafts: Tensor, chances: Tensor, tokens: Tensor, *, n: int, length: int
) -> tuple[Tensor, Tensor]:
    _, n_slots, n_ranks = chances.shape
    index = torch.arange(n_slots, device=chances.device)

    # the chain has one of the ranks, or a token that nothing competes with
    is_chain = tokens == drafts[..., None]
    on_chain = torch.where(is_chain.any(-1), (chances * is_chain).sum(-1), chances[..., 0])
    on_chain = torch.where(slots.is_fixed, 1.0, on_chain)  # [B, K]
    before = torch.cat([torch.ones_like(on_chain[:, :1]), on_chain[:, :-1].cumprod(1)], 1)
    is_out = is_chain | slots.is_fixed[..., None] | (index > n_slots - length)[:, None]
    paths = (before[..., None] * chances).masked_fill(is_out, 0.0).flatten(1)  # [B, K r]
    best = paths.topk(min(n, paths.shape[1]), -1).indices
    if best.shape[1] < n:  # a narrow window: repeat the first
        best = torch.cat([best, best[:, :1].expand(-1, n - best.shape[1])], 1)
    forks = (best // n_ranks).clamp(max=n_slots - length)
    return forks, tokens.flatten(1).gather(1, best)


def _take(slots: SweepSlots, at: Tensor) -> SweepSlots:
    """The slots `at` `[B, N, L]` of each row, as L slots of B N rows."""
    rows = torch.arange(len(at), device=at.device)[:, None, None]
    n = at.shape[1]
    fields = slots._asdict()
    last = fields.pop("last").repeat_interleave(n, 0)
    taken = {name: value[rows, at].flatten(0, 1) for name, value in fields.items()}
    return SweepSlots(**taken, last=last)
