"""Prompts that begin with what a prefix tree holds, or as others do, for which they wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mmaccel.capabilities import explain, refuse
from mmaccel.contracts import TokenModel
from mmaccel.model_parts import CopiedEntries
from mmaccel.results import Stats
from mmaccel.samplers.prefix_tree import PREFIX_TREE, Match, PrefixTree, count_common
from mmaccel.samplers.prompt_chunks import Part, PromptFeed

if TYPE_CHECKING:
    from mmaccel.samplers.drafting.contract import DraftSource

FindRow = Callable[[int, int], int]
"""The row of a pass by the number of a row and its branch."""


class PrefixReader:
    """What a run reads of a prefix tree, and leaves in it. Models whose rows cannot take over
    entries of others, and drafts of another model, are refused.
    """

    def __init__(
        self, tree: PrefixTree, model: TokenModel, source: DraftSource, *, is_static: bool
    ) -> None:
        refuse(explain(PREFIX_TREE, source, model))
        assert isinstance(model, CopiedEntries)
        self._tree = tree
        self._model = model
        tree.open(model.entries_key)
        self._n_read = 0
        self._n_shared = 0
        self._shared_from: int | None = None
        can_share = not is_static and not source.needs_layers
        if tree.shared_from is not None and can_share and not model.lack("shared prompts"):
            self._shared_from = tree.shared_from

    def begin(self, row: int) -> None:
        """Let a row of the passes read nothing of others: before its prompt, and after its end."""
        if self._shared_from is not None:
            self._model.write_entries(row, ())

    def read(self, feed: PromptFeed, find_row: FindRow) -> None:
        """Let prompts that have not begun take over what the tree holds, or wait for others."""
        tree = self._tree
        ahead: list[tuple[int, ...]] = []
        for row, cursor in feed.cursors.items():
            for branch, tokens in enumerate(cursor.prompts):
                if cursor.done[branch] == 0 and tokens:
                    match = tree.match(tokens)
                    n_shared = max((count_common(tokens, other) for other in ahead), default=0)
                    cursor.waits[branch] = n_shared >= match.length + tree.least
                    if match.length and not cursor.waits[branch]:
                        self._write(find_row(row, branch), match, tokens)
                        cursor.done[branch] = match.length
                if cursor.remaining[branch]:
                    ahead.append(tokens)

    def describe(self, stats: Stats) -> None:
        stats.prefix_tokens = self._n_read
        if self._n_shared:
            stats.notes.append(
                f"prefix_tree: {self._n_shared} tokens of prompts were read in one store with "
                "other rows; exact with respect to the model whose attention adds up a prompt and "
                "what follows it apart, which may change last bits"
            )

    def _write(self, row: int, match: Match, tokens: tuple[int, ...]) -> None:
        self._n_read += match.length
        self._tree.n_read += match.length
        key = None
        if self._shared_from is not None and match.length >= self._shared_from:
            key = tokens[: match.length]
            self._n_shared += match.length
        self._model.write_entries(row, match.entries(), key)

    def keep(self, parts: Sequence[Part], find_row: FindRow) -> None:
        """Leave prompts in the tree that are whole after a chunk."""
        for row, cursor, branch, *_ in parts:
            if not cursor.remaining[branch]:
                copy = partial(self._model.copy_entries, find_row(row, branch))
                self._tree.insert(cursor.prompts[branch], copy)
