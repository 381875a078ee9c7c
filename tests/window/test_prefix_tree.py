"""Prompts that begin with what others have left: what is found, what goes, and that tokens stay.

That a row which takes its prompt from others is the row alone, under every policy and in every way
that rows come, is proved in `tests/matrix/test_batching.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import (
    CausalLMWindow,
    ContinuousBatching,
    PrefixTree,
)
from mmaccel.contracts import FinishedRow, Pass
from mmaccel.model_parts import PromptPiece
from mmaccel.pipelines.hosts.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.pipelines.hosts.layers.stores import LayerStores
from mmaccel.results import Progress
from mmaccel.samplers.prefix_tree import count_common
from mmaccel.samplers.prompt_chunks import Part
from mmaccel.samplers.window.prefix_reader import PrefixReader
from tests.fixtures.arriving import Arriving
from tests.fixtures.tiny_lms import build_lm
from tests.window.prefix_runs import (
    ALIKE,
    ALL,
    N_PROMPTS,
    PROMPTS,
    SYSTEM,
    Patch,
    Watched,
    alone,
    ids,
    open_tree,
)

F32, F64 = torch.float32, torch.float64
decode = ALIKE.decode


def hold(tree: PrefixTree, *prompts: list[int]) -> None:
    """Insert prompts whose entries are their tokens and positions."""
    for tokens in prompts:

        def copy(first: int, last: int, tokens: list[int] = tokens) -> Any:
            own = torch.tensor(tokens[first:last], dtype=torch.float32).view(1, -1, 1)
            at = torch.arange(first, last, dtype=torch.float32).view(1, -1, 1)
            return [(own, at)]

        tree.insert(tuple(tokens), copy)


def find(tree: PrefixTree, tokens: list[int]) -> list[int]:
    """The tokens of a prompt that a tree holds, whose entries are those of their positions."""
    found = tree.match(tuple(tokens))
    if not found.length:
        return []
    ((own, at),) = found.entries()
    assert at.flatten().tolist() == [*range(found.length)]
    return own.flatten().long().tolist()


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_the_longest_beginning_is_found(chunk_size: int) -> None:
    """Of several prompts, whatever a chunk has; and each token is held once a path."""
    tree = open_tree(chunk_size=chunk_size)
    hold(tree, PROMPTS[0], PROMPTS[4], PROMPTS[1], PROMPTS[3])
    for tokens in (*PROMPTS, SYSTEM + ids(7, 9), PROMPTS[1] + [3, 4], ids(9, 9), [PROMPTS[0][0]]):
        longest = max(count_common(tuple(tokens), tuple(own)) for own in PROMPTS)
        n_found = longest if longest >= tree.least else 0
        assert find(tree, tokens) == tokens[:n_found]
    paths = {tuple(own[: k + 1]) for own in PROMPTS for k in range(len(own))}
    assert len(paths) <= tree.n_tokens <= len(paths) + chunk_size
    assert tree.n_bytes == 8 * tree.n_tokens
    assert tree.n_evicted == 0


def test_a_longer_prompt_takes_the_place_of_its_beginning() -> None:
    tree = open_tree()
    for length in (5, 6, 7, 6, 8, 8):
        hold(tree, SYSTEM[:length])
    assert tree.n_tokens == 8
    assert find(tree, SYSTEM) == SYSTEM[:8]


def test_what_was_used_last_stays() -> None:
    """Ends go before beginnings, and what a prompt was looked up for counts as used."""
    tree = open_tree(max_tokens=20)
    one, two, three = SYSTEM[:8] + [1, 1, 1, 1], SYSTEM[:8] + [2, 2, 2, 2], [3] * 8
    hold(tree, one, two)
    assert tree.n_tokens == 16
    assert find(tree, one) == one
    hold(tree, three)
    assert (tree.n_tokens, tree.n_evicted) == (20, 4)
    assert [find(tree, each) for each in (one, two, three)] == [one, SYSTEM[:8], three]
    hold(tree, ids(60, 5))
    assert (tree.n_tokens, tree.n_evicted) == (20, 24)
    assert find(tree, ids(60, 5)) == ids(60, 5)[:20]
    assert find(tree, one) == []


@pytest.mark.parametrize("name", ["llama", "gemma3, deep"])
def test_what_was_found_is_not_processed(name: str) -> None:
    """Rows of one prompt wait for one of them; a second run processes nothing."""
    window, tree = Watched(name, dtype=F64), open_tree()
    made, given = ALIKE.decode_joined(window, ALL, [], 5, tree)
    ALIKE.assert_alone(given, ALL, name=name, dtype=F64)
    assert window.prompts == [[2, 28], [1, 8]]  # rows 0 and 4, then the end of row 1
    assert made.stats.prefill_passes == 2
    window.seen.clear()
    again, given = ALIKE.decode_joined(window, ALL, [], 5, tree)
    ALIKE.assert_alone(given, ALL, name=name, dtype=F64)
    assert window.prompts == []
    assert again.stats.prefix_tokens == N_PROMPTS and "prefix tree" in str(again.stats)
    private = ALIKE.decode_joined(Watched(name, dtype=F64), ALL, [], 5)[0].stats
    assert private.tokens_processed - again.stats.tokens_processed == 5 * 32
    assert (private.prefix_tokens, private.prefill_passes) == (0, 1)


@pytest.mark.parametrize(("name", "fused"), [("gpt2", True), ("gemma3", False)])
def test_entries_are_those_of_private_prompts(name: str, fused: bool) -> None:
    """Also in layers that slide."""
    window, tree = Watched(name, dtype=F64, fused=fused), open_tree()
    given: list[FinishedRow] = []
    decode(window, [0, 1], ContinuousBatching(1, given.append, prefix_tree=tree))
    private = Watched(name, dtype=F64, fused=fused)
    decode(private, [1])
    made = window.run_caches().copy_row(0, 0, 32)
    for pair, own in zip(made, private.run_caches().copy_row(0, 0, 32), strict=True):
        for entries, wanted in zip(pair, own, strict=True):
            torch.testing.assert_close(entries, wanted, rtol=0, atol=1e-12)


def test_a_row_that_leaves_takes_nothing_from_others() -> None:
    """The first row goes while its prompt is half processed and another one waits for it, and a
    third while it decodes.
    """
    window, tree, shown = Watched(), open_tree(), []
    window.setup.prefill_chunk_size = 4

    def on_step(progress: Progress) -> Tensor:
        shown.append(progress.rows)
        is_late = len(shown) > 12
        ended = {1, 4} if is_late else {1} if len(shown) == 3 else set()
        return torch.tensor([0 if row in ended else 99 for row in progress.rows])

    given: list[FinishedRow] = []
    arriving = Arriving([1, 2, 0, 4], ALIKE.read, gap=1, most=1)
    batching = ContinuousBatching(5, given.append, arriving, tree)
    decode(window, [4], batching, width=33, on_step=on_step)
    ended = {row.row: row for row in given}
    assert ended.keys() == {0, 1, 2, 3, 4}
    assert ended[1].tokens.numel() == 0
    for row, number in ((0, 4), (2, 2), (3, 0)):
        own = alone(ALIKE, number)
        assert ended[row].tokens.tolist() == own.tokens[0].tolist()


def check_one_slot() -> None:
    """A prompt, another one and the first again, in the same memory."""
    given: list[FinishedRow] = []
    arriving = Arriving([4, 0], ALIKE.read, gap=1, most=1)
    batching = ContinuousBatching(1, given.append, arriving, open_tree())
    assert decode(Watched(), [0], batching, width=33).stats.prefix_tokens == 28
    for row, number in zip(given, (0, 4, 0), strict=True):
        assert row.tokens.tolist() == alone(ALIKE, number).tokens[0].tolist()


def test_what_is_kept_is_not_written_to(monkeypatch: Patch) -> None:
    """By the next row of the same batch slot; planted: a row's own memory is what is kept."""
    check_one_slot()

    def hand_out(stores: LayerStores, row: int, first: int, last: int) -> Any:
        held = [layer.held() for layer in stores.layers]
        return [(keys[row, :, first:last], values[row, :, first:last]) for keys, values in held]

    monkeypatch.setattr(LayerStores, "copy_row", hand_out)
    with pytest.raises(AssertionError):
        check_one_slot()


def test_other_weights_find_nothing() -> None:
    window, tree = Watched(), open_tree()
    for n_read in (0, 28, 0):
        given: list[FinishedRow] = []
        made = decode(window, [0], ContinuousBatching(1, given.append, prefix_tree=tree))
        assert made.stats.prefix_tokens == n_read
        wanted = decode(window, [0])
        assert given[0].tokens.equal(wanted.tokens[0])
        if n_read:
            with torch.no_grad():
                window.model.get_input_embeddings().weight.mul_(0.5)


def test_image_tokens_after_a_prompt_are_no_part_of_it() -> None:
    """Prompts of image vocabularies follow from their ids alone, whatever their lengths."""
    window = ImageTokenWindow(build_lm("llama"), range(8, 24))
    tree = PrefixTree(1000, chunk_size=4, least=2, shared_from=4)
    made = []
    for chosen in (None, tree, tree):
        given: list[FinishedRow] = []
        window.begin(ALIKE.read([0, 1, 3]))
        decode(window, [0, 1, 3], ContinuousBatching(2, given.append, prefix_tree=chosen))
        made.append([row.tokens.tolist() for row in sorted(given, key=lambda row: row.row)])
    assert made[0] == made[1] == made[2]
    assert tree.n_read == 24 + 16 + 28 + 32 + 16


def _forget_the_start(patch: Patch) -> None:
    """What follows what was found is written over it."""
    forward_mixed = CausalLMWindow.forward_mixed

    def wrong(window: CausalLMWindow, entries: Pass, pieces: Sequence[PromptPiece]) -> Tensor:
        return forward_mixed(window, entries, [replace(piece, start=0) for piece in pieces])

    patch.setattr(CausalLMWindow, "forward_mixed", wrong)


def _write_to_a_neighbour(patch: Patch) -> None:
    """What was found goes to the first row."""
    write_entries = CausalLMWindow.write_entries

    def wrong(window: CausalLMWindow, row: int, entries: Any, key: Any) -> None:
        write_entries(window, 0, entries, key)

    patch.setattr(CausalLMWindow, "write_entries", wrong)


def _keep_before_the_end(patch: Patch) -> None:
    """A prompt is kept once its first chunk is processed."""
    keep = PrefixReader.keep

    def wrong(reader: PrefixReader, parts: Sequence[Part], find_row: Any) -> None:
        for part in parts:
            done = part.cursor.done
            part.cursor.done = [*part.cursor.ends]
            keep(reader, parts, find_row)
            part.cursor.done = done

    patch.setattr(PrefixReader, "keep", wrong)


def _find_too_much(patch: Patch) -> None:
    """A chunk counts as a whole where its first token is right."""
    patch.setattr(
        "mmaccel.samplers.prefix_tree.count_common",
        lambda one, other: min(len(one), len(other)) if one[:1] == other[:1] else 0,
    )


BUGS: dict[str, Callable[[Patch], None]] = {
    "the start is forgotten": _forget_the_start,
    "entries of a neighbour": _write_to_a_neighbour,
    "half a prompt is kept": _keep_before_the_end,
    "a chunk is found too early": _find_too_much,
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug: str, monkeypatch: Patch) -> None:
    BUGS[bug](monkeypatch)
    window, tree = Watched(), open_tree(chunk_size=16)
    window.setup.prefill_chunk_size = 7
    _, given = ALIKE.decode_joined(window, ALL[:3], ALL[3:], 4, tree)
    with pytest.raises(AssertionError):
        ALIKE.assert_alone(given, ALL)
