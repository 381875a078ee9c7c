"""A step over a tree, walked by rules: the tokens have the distribution of the plain loop.

From the last known token on, the walk asks at each entry which of its children is accepted, and
goes there; where none is, the token that was drawn instead ends it. What is asked at an entry
depends on the drafts behind it by one slot and on nothing deeper: the path is not the longest of
those that could be accepted, which would prefer tokens by what follows them.

Children are of two kinds. Those that were drawn for a plan are verified by a `SiblingRule`. Those
that a shape chose among drafts without randomness are certain: a token is drawn from the target,
and the child that holds it is accepted, if there is one, as in SpecExec. Where the chain's draft
itself was drawn, it is verified first, and the others against what it leaves of the target.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmaccel.checks import check_answer, check_kind
from mmaccel.samplers.acceptance import draw, is_kept, residual
from mmaccel.samplers.noise import Fresh, Stream
from mmaccel.samplers.trees.contract import TreeShape, check_nodes
from mmaccel.samplers.trees.drawn import DrawnTree, draw_tree
from mmaccel.samplers.trees.entries import TreeEntries
from mmaccel.samplers.trees.siblings.contract import Choice, SiblingRule, Uniforms
from mmaccel.samplers.trees.walk import find_path
from mmaccel.samplers.window.fresh_drafts import draft_afresh, verify_chain
from mmaccel.samplers.window.run import WindowRun

Choose = Callable[[Tensor, Tensor, int], Choice]
"""(entry `[B]` int64, p `[B, V]`, drafts before) -> the entry of the accepted child, -1 for none,
and the token behind the entry."""


class RuleStep:
    """Steps of a fresh run over trees; `rule` is that of siblings that are drawn."""

    def __init__(self, run: WindowRun, shape: TreeShape, rule: SiblingRule) -> None:
        self._run = run
        self._shape = shape
        self._rule = rule
        is_drawn = "drawn" in shape.ways(run.drafter.source)
        self._plan = shape.plan(run.chooser.widest) if is_drawn else None

    def __call__(self) -> None:
        run = self._run
        drafts, p_draft = draft_afresh(run)
        fresh = run.noise.fresh(run.rows.slots, run.rows.passes)
        grown = None if run.is_retry else self._grow(drafts, p_draft, fresh)
        if grown is None:
            verify_chain(run, drafts, p_draft, fresh)
            return
        entries, choose = grown
        pass_scores = run.passes.forward_tree(entries.tokens, entries.parents, entries.depths())
        last, n_right, tokens = walk(entries.width, pass_scores.target, choose)

        # from here on the pass is one over the window that the path is in
        path = find_path(run, entries, last)
        run.passes.keep(pass_scores, path)
        run.observe(None)
        index = torch.arange(entries.width, device=last.device)
        # behind the path stand guesses, which some drafters learn from
        likeliest = pass_scores.target.argmax(-1).gather(1, path.entries)
        tokens = torch.where(index <= n_right[:, None], tokens, likeliest)
        run.accept_path(path, tokens, index[:-1] < n_right[:, None])

    def _grow(
        self, drafts: Tensor, p_draft: Tensor, fresh: Fresh
    ) -> tuple[TreeEntries, Choose] | None:
        """The entries of the pass, and what chooses among children; None for the chain alone."""
        run = self._run
        drafter = run.drafter
        if self._plan is not None:
            tree = draw_tree(run, drafter, self._rule, self._plan, drafts, p_draft)
            if tree is None:
                return None
            return choose_by_rule(run, tree, self._rule, fresh)
        silent = p_draft.new_zeros(*drafts.shape, 1)
        nodes = self._shape.grow(run, drafter, drafts, silent)
        if nodes is None:
            return None
        check_nodes(self._shape, nodes, drafts, run.vocab_size)
        entries = TreeEntries.of(drafts, nodes)
        return entries, choose_certain(entries, p_draft, fresh)


def walk(
    width: int, scores: Tensor, choose: Choose, *, reads_back: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk all rows from the first entry on, by the target's scores `[B, E, V]`, W - 1 drafts at
    most.

    Whether a row is still on its way is asked of the device only if `reads_back`. Returns the last
    entry of each row's path `[B]` int64, how many drafts it has `[B]` int64, and the tokens of its
    slots `[B, W]` int64, the one behind the path included.
    """
    rows = torch.arange(len(scores), device=scores.device)
    entry = torch.zeros_like(rows)
    n_right = torch.zeros_like(rows)
    is_open = torch.ones_like(rows, dtype=torch.bool)
    tokens = rows.new_zeros(len(rows), width)
    for before in range(width):
        p_target = scores[rows, entry].softmax(-1)
        choice = choose(entry, p_target, before)
        tokens[:, before] = torch.where(is_open, choice.tokens, 0)
        is_open = is_open & (choice.sibling >= 0)
        entry = torch.where(is_open, choice.sibling, entry)
        n_right = n_right + is_open
        if reads_back and not bool(is_open.any()):
            break
    return entry, n_right, tokens


def choose_by_rule(
    run: WindowRun, tree: DrawnTree, rule: SiblingRule, fresh: Fresh
) -> tuple[TreeEntries, Choose]:
    """The entries of a drawn tree, and what chooses among their children."""
    entries = TreeEntries(tree.tokens, tree.parents, fresh.coins.shape[1])
    n_others = tree.children.shape[1] - 1
    others = run.noise.uniforms(run.rows.slots, n_others, Stream.COINS, run.rows.passes)
    coins = torch.cat([fresh.coins[..., None], others], 2)  # [B, W, K]
    return entries, choose_drawn(tree, rule, coins, fresh.redraws)


def choose_drawn(tree: DrawnTree, rule: SiblingRule, coins: Tensor, redraws: Tensor) -> Choose:
    """By a rule, among children that were drawn; coins are `[B, W, K]`, redraws `[B, W]`."""
    rows = torch.arange(len(tree.tokens), device=tree.tokens.device)

    def choose(entry: Tensor, p_target: Tensor, before: int) -> Choice:
        children = tree.children[entry]  # [B, K]
        at = children.clamp(min=0)
        is_there = (children >= 0) & tree.is_there.gather(1, at)
        siblings = tree.tokens.gather(1, at).masked_fill(~is_there, -1)
        uniforms = Uniforms(coins[:, before], redraws[:, before])
        choice = rule.choose(p_target, tree.p_draft[rows, entry], siblings, uniforms)
        name = f"{type(rule).__name__}.choose"
        check_kind(name, choice, Choice)
        for tensor in choice:  # a captured step reads no values
            check_answer(name, tensor, rows.shape, "int64")
        # from the number among siblings to the entry
        chosen = children.gather(1, choice.sibling.clamp(min=0)[:, None])[:, 0]
        return Choice(torch.where(choice.sibling >= 0, chosen, -1), choice.tokens)

    return choose


def choose_certain(entries: TreeEntries, p_draft: Tensor, fresh: Fresh) -> Choose:
    """Among children that no randomness chose, but for the chain's drafts, drawn from `p_draft`."""
    n_drafts = p_draft.shape[1]
    rows = torch.arange(len(p_draft), device=p_draft.device)

    def choose(entry: Tensor, p_target: Tensor, before: int) -> Choice:
        has_draft = entry < n_drafts  # the entries of the chain, whose next draft comes first
        at = entry.clamp(max=n_drafts - 1)
        draft = entries.tokens.gather(1, at[:, None] + 1)
        q = p_draft[rows, at]
        coins = fresh.coins[:, before, None]
        is_first = has_draft & is_kept(p_target[:, None], q[:, None], draft, coins)[:, 0]
        rest = torch.where(has_draft[:, None], residual(p_target, q), p_target)
        token = draw(rest[:, None], fresh.redraws[:, before, None])
        token = torch.where(is_first[:, None], draft, token)  # [B, 1]

        # the first child that holds it
        holds = (entries.parents == entry[:, None]) & (entries.tokens == token)
        child = torch.where(holds.any(1), holds.long().argmax(1), -1)
        return Choice(child, token[:, 0])

    return choose
