"""Growth: a tree while a shape adds nodes to it, which are children that the drafter names."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.samplers.drafting.contract import Children, Drafter, Nodes, OpenRun, Paths
from mmaccel.samplers.trees.constants import as_index
from mmaccel.samplers.trees.contract import Plan


class Growth:
    """The chain of a window, and the nodes that were added so far; E entries.

    `tokens`, `parents` (-1: none) and `depths`, the drafts on their path, are `[B, E]` int64.
    """

    def __init__(self, run: OpenRun, drafter: Drafter, drafts: Tensor, noise: Tensor) -> None:
        self._run = run
        self._drafter = drafter
        self._drafts = drafts
        self._noise = noise
        rows = len(drafts)
        self.width = drafts.shape[1] + 1
        number = torch.arange(self.width, device=drafts.device).expand(rows, -1)
        self.tokens = torch.cat([torch.zeros_like(number[:, :1]), drafts], 1)
        self.parents = number - 1
        self.depths = number
        self._paths = drafts[:, None].expand(-1, self.width, -1)  # [B, E, W-1]

    def children(self, entries: Tensor, k: int) -> Children | None:
        """What may follow entries `[B, n]`, up to k each, first the chain's next draft; None for a
        pass without a tree. Behind the window or the row's end: log-probabilities of -inf.
        """
        depths = self.depths.gather(1, entries)
        index = entries[..., None].expand(-1, -1, self._paths.shape[2])
        inside = depths.clamp(max=self.width - 2)
        paths = Paths(self._paths.gather(1, index), inside)
        children = self._drafter.children(self._run, paths, self._noise, k=k)
        if children is None:
            return None
        log_probs = children.log_probs.masked_fill(children.log_probs.isnan(), float("-inf"))
        after = self._run.rows.slots[:, :1] + inside + 1  # the slots that children predict
        is_behind = self._run.rows.is_over(after) | (depths > inside)
        log_probs = log_probs.masked_fill(is_behind[..., None], float("-inf"))

        # after an entry of the chain: its next draft, then all others in their order
        draft = self._drafts.gather(1, inside)[..., None]
        is_draft = children.tokens == draft
        of_draft = log_probs.masked_fill(~is_draft, float("-inf")).amax(-1, keepdim=True)
        of_draft = of_draft.where(is_draft.any(-1, keepdim=True), log_probs[..., :1])
        order = is_draft.long().argsort(stable=True)
        others = log_probs.masked_fill(is_draft, float("-inf")).gather(2, order)
        tokens = torch.cat([draft, children.tokens.gather(2, order)], 2)[..., :-1]
        chances = torch.cat([of_draft, others], 2)[..., :-1]
        is_chain = (entries < self.width - 1)[..., None]
        return Children(
            torch.where(is_chain, tokens, children.tokens),
            torch.where(is_chain, chances, log_probs),
        )

    def add(self, parents: Tensor, tokens: Tensor) -> None:
        """Add nodes that hold `tokens` `[B, n]` and follow the entries `parents` `[B, n]`."""
        depths = self.depths.gather(1, parents)
        index = parents[..., None].expand(-1, -1, self._paths.shape[2])
        at = depths.clamp(max=self.width - 2)[..., None]  # the slot of the nodes
        paths = self._paths.gather(1, index).scatter(2, at, tokens[..., None])
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        self.depths = torch.cat([self.depths, depths + 1], 1)
        self._paths = torch.cat([self._paths, paths], 1)

    def keep(self, nodes: Tensor) -> None:
        """Go on with the nodes `[B, n]` alone, each behind the one that it follows."""
        width = self.width
        chain = torch.arange(width, device=nodes.device).expand(len(nodes), -1)
        kept = torch.cat([chain, nodes], 1)  # [B, W + n]
        number = torch.zeros_like(self.tokens)
        number.scatter_(1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept))
        parents = self.parents.gather(1, kept)
        self.parents = number.gather(1, parents.clamp(min=0)).where(parents >= 0, parents)
        self.tokens = self.tokens.gather(1, kept)
        self.depths = self.depths.gather(1, kept)
        index = kept[..., None].expand(-1, -1, self._paths.shape[2])
        self._paths = self._paths.gather(1, index)

    def nodes(self, is_needed: Tensor | None = None) -> Nodes:
        """The nodes that were added. One that is not needed (`[B, N]` bool), and that none which is
        follows, becomes a copy of the chain's first draft.
        """
        tokens = self.tokens[:, self.width :]
        parents = self.parents[:, self.width :]
        if is_needed is not None:
            tokens = tokens.where(is_needed, self._drafts[:, :1])
            parents = parents.where(is_needed, 0)
        return Nodes(tokens, parents)


def grow_planned(tree: Growth, plan: Plan) -> Nodes | None:
    """The nodes of a plan, if any, without absent ranks and depths beyond a narrow window."""
    device = tree.tokens.device
    entries = {entry: entry for entry in range(tree.width)}  # of the plan -> of this pass
    is_needed = torch.ones_like(tree.tokens, dtype=torch.bool)  # [B, E]
    for generation in plan:
        nodes = [node for node in generation if node.parent in entries and node.depth < tree.width]
        if not nodes:
            break
        parents = as_index([entries[node.parent] for node in nodes], device)
        parents = parents.expand(len(tree.tokens), -1)
        children = tree.children(parents, 1 + max(node.rank for node in nodes))
        if children is None:
            return None
        known = [n for n, node in enumerate(nodes) if node.rank < children.tokens.shape[2]]
        ranks = as_index([nodes[n].rank for n in known], device)
        at = as_index(known, device)
        for n in known:
            entries[nodes[n].number] = len(entries)
        parents = parents[:, at]
        tree.add(parents, children.tokens[:, at, ranks])
        has_child = children.log_probs[:, at, ranks] > float("-inf")
        is_needed = torch.cat([is_needed, has_child & is_needed.gather(1, parents)], 1)
    if len(entries) == tree.width:
        return None
    return tree.nodes(is_needed[:, tree.width :])
