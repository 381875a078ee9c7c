"""DrawnTree: a plan, the same in every pass, whose nodes are drawn by generations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.checks import check_answer
from mmaccel.samplers.drafting.contract import Drafter, OpenRun
from mmaccel.samplers.trees.constants import as_index
from mmaccel.samplers.trees.contract import Plan, Planned
from mmaccel.samplers.trees.siblings.contract import SiblingRule, SlotNoise


class DrawnTree(NamedTuple):
    """The E entries of a pass, and what they were drawn from."""

    tokens: Tensor  # [B, E] int64
    parents: Tensor  # [B, E] int64, as in `mmaccel.contracts.Pass`
    p_draft: Tensor  # [B, E, V], of what follows an entry; zeros where nothing was drawn
    children: Tensor  # [E, K] int64, what follows an entry, in the order of the draws; -1: none
    is_there: Tensor  # [B, E] bool, whether an entry could be drawn, and all that it follows


def draw_tree(
    run: OpenRun,
    drafter: Drafter,
    rule: SiblingRule,
    plan: Plan,
    drafts: Tensor,
    p_draft: Tensor,
) -> DrawnTree | None:
    """Draw a tree beside the chain `[B, W-1]` int64, drawn from `p_draft` `[B, W-1, V]`; None where
    the window has no room. Nodes of `plan` deeper than the window are left out.
    """
    n_drafts = drafts.shape[1]
    width = n_drafts + 1
    widest = run.chooser.widest
    tree = _begin(drafts, p_draft)
    entry_of = {entry: entry for entry in range(width)}  # of the plan -> of this pass
    families: dict[int, list[int]] = {entry: [entry + 1] for entry in range(n_drafts)}
    filled = width  # entries whose children's distribution is known
    for generation in plan:
        nodes = [node for node in generation if node.parent in entry_of and node.depth < width]
        if not nodes:
            break
        nodes.sort(key=lambda node: node.rank)  # siblings in the order of their draws
        is_behind_chain = nodes[0].parent < widest
        if not is_behind_chain:
            more = drafter.distributions(run, tree.tokens, tree.parents, filled)
            tree = tree._replace(p_draft=torch.cat([tree.p_draft[:, :filled], more], 1))
            filled = tree.tokens.shape[1]
        tree = _add(run, rule, tree, nodes, entry_of, drafts if is_behind_chain else None)
        for node in nodes:
            parent = entry_of[node.parent]
            families.setdefault(parent, []).append(entry_of[node.number])
    if len(entry_of) == width:
        return None
    most = max(map(len, families.values()))
    children: list[int] = []  # [E K], rows filled up with -1
    for entry in range(tree.tokens.shape[1]):
        family = families.get(entry, [])
        children += family + [-1] * (most - len(family))
    return tree._replace(children=as_index(children, drafts.device).view(-1, most))


def _begin(drafts: Tensor, p_draft: Tensor) -> DrawnTree:
    rows, n_drafts = drafts.shape
    number = torch.arange(-1, n_drafts, device=drafts.device)
    tokens = torch.cat([torch.zeros_like(drafts[:, :1]), drafts], 1)
    last = p_draft.new_zeros(rows, 1, p_draft.shape[2])
    return DrawnTree(
        tokens,
        parents=number.expand(rows, -1),
        p_draft=torch.cat([p_draft, last], 1),
        children=number.new_zeros(0, 0),
        is_there=torch.ones_like(tokens, dtype=torch.bool),
    )


def _add(
    run: OpenRun,
    rule: SiblingRule,
    tree: DrawnTree,
    nodes: list[Planned],
    entry_of: dict[int, int],
    drafts: Tensor | None,
) -> DrawnTree:
    """Draw a generation of nodes; `entry_of` gets their entries. `drafts` are the chain's."""
    device = tree.tokens.device
    depth_of = {entry_of[node.parent]: node.depth - 1 for node in nodes}
    parents = sorted(depth_of)
    n_drawn = {parent: 0 if drafts is None else 1 for parent in parents}
    places = []  # of each node: which parent, which of its draws
    for node in nodes:
        parent = entry_of[node.parent]
        places.append((parents.index(parent), n_drawn[parent]))
        n_drawn[parent] += 1
    for number, node in enumerate(nodes, start=tree.tokens.shape[1]):
        entry_of[node.number] = number
    index = as_index(parents, device)
    depths = as_index([depth_of[parent] for parent in parents], device)

    # siblings of all parents at once
    slots = run.rows.slots[:, :1] + depths
    noise = SlotNoise(run.noise, slots, run.rows.passes)
    first = None if drafts is None else drafts[:, index]
    k = max(n_drawn.values())
    drawn = rule.draw(tree.p_draft[:, index], noise, k, first)  # [B, n, K]
    shape = (len(tree.tokens), len(parents), k)
    check_answer(f"{type(rule).__name__}.draw", drawn, shape, "int64")
    at = as_index([parent for parent, _ in places], device)
    tokens = drawn[:, at, as_index([draw for _, draw in places], device)]
    above = index[at].expand(len(tokens), -1)
    is_there = (tokens >= 0) & tree.is_there.gather(1, above)
    p_draft = tree.p_draft.new_zeros(*tokens.shape, tree.p_draft.shape[2])
    return DrawnTree(
        torch.cat([tree.tokens, tokens.clamp(min=0)], 1),
        torch.cat([tree.parents, above], 1),
        torch.cat([tree.p_draft, p_draft], 1),
        tree.children,
        torch.cat([tree.is_there, is_there], 1),
    )
