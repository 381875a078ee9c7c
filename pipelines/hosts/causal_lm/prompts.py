"""Passes of a causal LM over prompts, at which methods look."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.contracts import Pass, PrefixGroups
from mmaccel.pipelines.hosts.causal_lm.caches import share_prompts
from mmaccel.pipelines.hosts.layers.observing import Observer, RepeatedPrompt
from mmaccel.pipelines.hosts.layers.stores import LayerStores

if TYPE_CHECKING:
    from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow


def run_prompt(window: CausalLMWindow, entries: Pass) -> None:
    stores = window.run_caches()
    width = entries.tokens.shape[1]
    lengths = entries.lengths
    if lengths is None:
        lengths = torch.full_like(entries.indices[:, 0], width)
    observer = stores.observe_part(lengths, width)
    surplus = window.prompt_width(width) - width
    if surplus and entries.reads is None:
        of_channels = (0, 0) * (entries.tokens.ndim - 2)  # of embeddings
        entries = replace(entries, tokens=pad(entries.tokens, (*of_channels, 0, surplus)))
    attention = window.methods.attention
    chooses = False
    if attention is not None and entries.lengths is not None and entries.reads is None:
        chooses = attention.chooses_prompts and not attention.is_whole
    ends = lengths - 1  # [R], columns of the prompts' last tokens, which may be in another part
    ends_here = (ends >= 0) & (ends < width)
    options = dict(window.facts.last_only)
    scored = ends[ends_here].unique() if window.takes_whole_prompts else ends[:0]
    if len(scored) and options:
        options = dict.fromkeys(options, scored.cpu())  # the head may be on another device
        ends = torch.searchsorted(scored, ends)  # among the columns that have logits
    output = window.run_pass(
        entries,
        is_prompt=True,
        sparse=stores.sparse if chooses else None,
        watcher=observer,
        prompt=lengths if chooses else None,
        **options,
    )
    if len(scored):
        _keep_logits(window, output.logits, ends, ends_here)
    if window.read_prompt is not None and window.setup.prefixes is None:
        assert window.last_states is not None
        window.read_prompt(entries, window.last_states)
    if observer is not None:
        _repeat(window, entries.tokens[:, :width], lengths, observer)
    stores.end_part()


def _keep_logits(window: CausalLMWindow, logits: Tensor, ends: Tensor, ends_here: Tensor) -> None:
    """Keep logits `[R, n, V]` behind prompts for the first pass over windows: those at `ends` `[R]`
    int64, of rows whose prompt `ends_here` `[R]` bool.
    """
    at = ends.clamp(0, logits.shape[1] - 1).to(logits.device)[:, None, None]
    behind = logits.gather(1, at.expand(-1, -1, logits.shape[2]))[:, 0, : window.vocab_size]
    if window.prompt_logits is not None:  # of rows whose prompts ended in an earlier part
        is_new = ends_here.to(behind.device)[:, None]
        behind = torch.where(is_new, behind, window.prompt_logits)
    window.prompt_logits = behind


def _repeat(window: CausalLMWindow, tokens: Tensor, lengths: Tensor, observer: Observer) -> None:
    """Feed a prompt `[R, T]` a second time behind itself, where it is overwritten."""
    method = window.methods.evictor
    if method is None or not method.repeated or int(lengths.max()) <= method.budget:
        return
    watcher = RepeatedPrompt(observer, lengths)
    for first in range(0, tokens.shape[1], method.repeated):
        watcher.begin(first)
        piece = Pass(tokens[:, first : first + method.repeated], lengths)
        window.run_pass(piece, watcher=watcher, **window.facts.last_only)


def prefill_shared(
    window: CausalLMWindow, entries: Pass, groups: PrefixGroups, prompts: LayerStores
) -> bool:
    """A pass over prompts of one row a group; whether they end with it, and all rows read them."""
    of_rows = window.run_caches()
    first = entries.tokens.new_tensor(groups.first)
    of_groups = entries.select(first)
    try:
        window.caches = prompts
        with window.select_inputs(first):
            run_prompt(window, of_groups)
    finally:
        window.caches = of_rows
    if int(of_groups.indices[0, -1]) + 1 < max(groups.lengths):
        return False
    share_prompts(of_rows, groups, prompts)
    return True
