"""What a reducer decided: which visual tokens stay, and where each of the others goes.

Slots are in the order of their tokens in the image, so that positions of kept tokens ascend; a slot
is represented by one token of the full set (`keep`), whose position it has.

Shapes: **B** rows, **N** visual tokens, **K** slots, **C** channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.checks import check_answer, check_kind
from mmaccel.errors import ShapeError


@dataclass(frozen=True, eq=False)
class Plan:
    """Slots of every row and the tokens that go into them."""

    # [B, K] int64, the token that represents each slot: ascending and unique, -1 in the slots after
    # a row's last
    keep: Tensor
    assign: Tensor  # [B, N] int64, the slot of every token; -1: dropped
    # [B, N] float32, how much a token contributes to its slot; those of a slot sum to 1, those of
    # dropped tokens are 0
    weight: Tensor
    # [B, K] float32, how many tokens a slot stands for (its logarithm is the bias of proportional
    # attention); 0 after a row's last slot
    size: Tensor
    merges: bool = False  # some slot may have more than one token; if not, `reduce` copies bits

    @property
    def valid(self) -> Tensor:
        """`[B, K]` bool, the slots that a row uses."""
        return self.keep >= 0

    @property
    def counts(self) -> Tensor:
        """`[B]` int64."""
        return self.valid.sum(1)


def keep_tokens(chosen: Tensor, valid: Tensor, size: Tensor | None = None) -> Plan:
    """The plan that keeps tokens and drops the others; a host synchronisation, of indices two.

    Args:
        chosen: `[B, N]` bool, or `[B, k]` int64 indices in any order, -1 for none.
        valid, size: as in `merge_tokens`; tokens that do not exist are never kept.
    """
    mask = _to_mask(chosen, valid) & valid
    counts = mask.sum(1)
    width = int(counts.max()) if len(counts) else 0
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]  # kept ones first
    used = torch.arange(width, device=mask.device) < counts[:, None]
    keep = order.where(used, -1)
    assign = (mask.cumsum(1) - 1).where(mask, -1)
    sizes = used.float() if size is None else size.float().gather(1, order).where(used, 0.0)
    return Plan(keep, assign, mask.float(), sizes)


def _to_mask(chosen: Tensor, valid: Tensor) -> Tensor:
    if chosen.dtype == torch.bool and chosen.shape == valid.shape:
        return chosen
    rows, n = valid.shape
    if chosen.dtype != torch.int64 or chosen.ndim != 2 or len(chosen) != rows:
        raise ShapeError(
            f"plan: expected a mask {[rows, n]} of torch.bool or indices [{rows}, k] of "
            f"torch.int64, received {list(chosen.shape)} of {chosen.dtype}; choose among the "
            "tokens of the context"
        )
    if chosen.numel() and int(chosen.max()) >= n:
        raise ShapeError(
            f"plan: expected indices below {n}, the number of tokens, received "
            f"{int(chosen.max())}; choose among the tokens of the context"
        )
    mask = valid.new_zeros(rows, n + 1)  # the last column takes the -1
    mask.scatter_(1, chosen.where(chosen >= 0, n), True)
    return mask[:, :-1]


def check_plan(plan: Plan, valid: Tensor) -> None:
    """Check what a method of somebody else may get wrong, of valid tokens `[B, N]` bool; of the
    rest see `find_violations`. Cost: one host synchronisation.
    """
    check_kind("plan", plan, Plan, "return keep_tokens(...) or merge_tokens(...)")
    rows, n = valid.shape
    slots = plan.keep.shape[-1]
    expected = {
        "keep": ([rows, slots], "int64"),
        "assign": ([rows, n], "int64"),
        "weight": ([rows, n], "float32"),
        "size": ([rows, slots], "float32"),
    }
    for name, (shape, dtype) in expected.items():
        hint = "keep_tokens and merge_tokens make all four"
        check_answer(f"plan.{name}", getattr(plan, name), shape, dtype, hint)
    if bool((plan.keep >= n).any() | (plan.assign >= slots).any()):
        raise ShapeError(
            f"plan: expected keep below {n} tokens and assign below {slots} slots, received "
            f"{int(plan.keep.max())} and {int(plan.assign.max())}; choose among the tokens of the "
            "context"
        )


def merge_tokens(
    target: Tensor, valid: Tensor, mass: Tensor | None = None, size: Tensor | None = None
) -> Plan:
    """The plan that merges tokens into others by weighted mean. Cost: a host synchronisation, for
    K.

    Args:
        target: `[B, N]` int64, the token that each goes into: its own index if it represents a
            slot, -1 if it is dropped. The target of a target is itself.
        valid: `[B, N]` bool, the tokens that exist.
        mass: `[B, N]` float32 > 0, how much a token counts in its slot's mean; None: its size.
        size: `[B, N]` float32, how many tokens each stands for already; None: 1.
    """
    n = target.shape[1]
    pruned = keep_tokens(target == torch.arange(n, device=target.device), valid)
    moved = valid & (target >= 0)
    assign = pruned.assign.gather(1, target.clamp(0)).where(moved, -1)
    sizes = torch.ones_like(pruned.weight) if size is None else size.float()
    mass = (sizes if mass is None else mass.float()).where(moved, 0.0)
    slots = pruned.keep.shape[1]
    totals = sum_slots(mass[..., None], assign, slots)[..., 0]
    weight = mass / _of_slot(totals, assign, 1.0)
    return Plan(
        pruned.keep,
        assign,
        weight.where(assign >= 0, 0.0),
        sum_slots(sizes[..., None], assign, slots)[..., 0],
        merges=True,
    )


def sum_slots(values: Tensor, assign: Tensor, slots: int) -> Tensor:
    """Sums `[B, K, C]` of values `[B, N, C]` float32 over a slot's tokens, in their order on every
    device; `assign` `[B, N]` is -1 for none.
    """
    batch, n, width = values.shape
    slot = assign.where(assign >= 0, slots)  # the dropped ones in a slot of their own
    order = slot.argsort(dim=1, stable=True)
    lengths = torch.zeros(batch, slots + 1, dtype=torch.int64, device=values.device)
    lengths.scatter_add_(1, slot, torch.ones_like(slot))
    gathered = values.gather(1, order[..., None].expand(-1, -1, width)).reshape(batch * n, width)
    # a segment's sum has one order of additions, unlike a scatter with atomics
    sums = torch.segment_reduce(gathered, "sum", lengths=lengths.flatten(), axis=0, unsafe=True)
    return sums.view(batch, slots + 1, width)[:, :slots]


def take(values: Tensor, plan: Plan, fill: float = 0) -> Tensor:
    """What belongs to the token that represents each slot: `[B, K, ...]` of values `[B, N, ...]` of
    any dtype, bit for bit; `fill` after a row's last slot.
    """
    batch, slots = plan.keep.shape
    index = plan.keep.clamp(0).view(batch, slots, *[1] * (values.ndim - 2))
    used = plan.valid.view(index.shape)
    return values.gather(1, index.expand(-1, -1, *values.shape[2:])).masked_fill(~used, fill)


def reduce(x: Tensor, plan: Plan) -> Tensor:
    """The states `[B, K, C]` of the slots, of x `[B, N, C]`; 0 after a row's last slot. One token
    keeps its bits; a mean is summed in float32.
    """
    kept = take(x, plan)
    if not plan.merges:
        return kept
    slots = plan.keep.shape[1]
    alone = take(plan.weight, plan) == 1
    means = sum_slots(x.float() * plan.weight[..., None], plan.assign, slots)
    return kept.where(alone[..., None] | ~plan.valid[..., None], means.to(x.dtype))


def restore(y: Tensor, plan: Plan, base: Tensor | None = None) -> Tensor:
    """The full set `[B, N, C]`: every token has the state of its slot, of y `[B, K, C]`; dropped
    ones have that of `base` `[B, N, C]`, or 0.
    """
    states = _of_slot(y, plan.assign, 0.0)
    return states if base is None else states.where(plan.assign[..., None] >= 0, base.to(y.dtype))


def _of_slot(values: Tensor, assign: Tensor, fill: float) -> Tensor:
    """`values [B, K, ...]` of every token's slot: `[B, N, ...]`, `fill` for dropped ones."""
    shape = (*assign.shape, *[1] * (values.ndim - 2))
    if values.shape[1] == 0:
        return values.new_full((*assign.shape, *values.shape[2:]), fill)
    index = assign.clamp(0).view(shape).expand(*assign.shape, *values.shape[2:])
    return values.gather(1, index).masked_fill(assign.view(shape) < 0, fill)


def find_violations(plan: Plan, valid: Tensor, size: Tensor | None = None) -> list[str]:
    """Broken invariants of `Plan`, in words; `valid` and `size` as in `merge_tokens`."""
    broken = []
    n, (batch, slots) = valid.shape[1], plan.keep.shape
    used = plan.valid
    moved = plan.assign >= 0
    where = torch.arange(n, device=valid.device)
    sizes = torch.ones_like(plan.weight) if size is None else size.float()
    if bool((used[:, 1:] & ~used[:, :-1]).any()) or bool((plan.keep >= n).any()):
        broken.append("keep holds indices of tokens, then -1")
    if bool(((plan.keep[:, 1:] <= plan.keep[:, :-1]) & used[:, 1:]).any()):
        broken.append("keep ascends and is unique")
    if broken:
        return broken
    if bool((used & ~valid.gather(1, plan.keep.clamp(0))).any() | (moved & ~valid).any()):
        broken.append("only valid tokens are kept or merged")
    if bool((plan.assign >= plan.counts[:, None]).any()):
        return [*broken, "assign names slots of its row"]
    represents = take(plan.assign, plan) == torch.arange(slots, device=valid.device)
    if bool((used & ~represents).any()):
        broken.append("the token that represents a slot is assigned to it")
    stays = take(where.expand(batch, -1), plan, -1).eq(plan.keep)
    if not plan.merges and bool((moved.sum(1) != plan.counts).any() | ~stays.all()):
        broken.append("a plan that does not merge has one token a slot")
    weights = sum_slots(plan.weight[..., None], plan.assign, slots)[..., 0]
    if bool(((weights - used.float()).abs() > 1e-4).any() | (plan.weight < 0).any()):
        broken.append("weights of a slot are >= 0 and sum to 1")
    if bool((plan.weight.where(~moved, 0.0) != 0).any()):
        broken.append("dropped tokens weigh nothing")
    sums = sum_slots(sizes[..., None], plan.assign, slots)[..., 0]
    if bool(((sums - plan.size).abs() > 1e-3).any()):
        broken.append("size counts the tokens of a slot")
    return broken
