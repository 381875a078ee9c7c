"""Rows that read one stored prompt: the logits, tokens and entries of private prompts, once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import Pass, Prompt
from mmaccel.pipelines.hosts.causal_lm import lacks
from mmaccel.pipelines.hosts.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers import shared_prefix
from mmaccel.pipelines.hosts.layers.shared_prefix import SharedPrefix
from mmaccel.pipelines.hosts.runner.engine import find_other_inputs
from mmaccel.results import Stats
from tests.fixtures.lanes import every
from tests.fixtures.tiny_lms import EOS, PAD, build_lm, left_padded, shared_lm
from tests.fixtures.toy_models import make_prompt
from tests.layers.test_eviction import ROUTES, draw_rows
from tests.matrix.cells import covering
from tests.matrix.examples import Target, make, text_policies

LONG, SHORT, OTHER = draw_rows(33, 9, 17)
# groups of three and two rows, two of them equally large, and one prompt without a prefix
ROWS = [LONG, SHORT, LONG, OTHER, [7], LONG, SHORT, OTHER]
N_NEW = 12
ENTRY = 2 * 2 * 4 * 8 * 4  # bytes: layers, keys and values, heads, width, of a number
STEPS = (torch.tensor([1, 2, 3, 1, 2, 3, 1, 1]), torch.tensor([2, 1, 1, 3, 3, 1, 2, 2]))


def open_window(
    rows: list[list[int]], *, shares: bool, name: str = "llama", pieces: int = 1, **options: Any
) -> CausalLMWindow:
    """A window whose caches hold all but the last token of each row."""
    window = CausalLMWindow(shared_lm(name), **options)
    prompt = make_prompt(rows)
    if shares:
        assert not window.lack("shared prompts")
        window.setup.prefixes = prompt.groups
    width = prompt.tokens.shape[1] - 1
    window.reserve(len(rows), width + N_NEW)
    size = -(-width // pieces)
    for first in range(0, width, size):
        tokens = prompt.tokens[:, first : min(first + size, width)]
        start = torch.tensor([first]).expand(len(rows))
        lengths = prompt.lengths - 1 if pieces == 1 else None
        window.prefill(Pass(tokens, start, lengths=lengths))
    return window


def decode(window: CausalLMWindow, width: int) -> list[Tensor]:
    """The logits of three passes, between which rows accept some tokens and reject others."""
    generator = torch.Generator().manual_seed(5)
    prompt = make_prompt(ROWS)
    start = prompt.lengths - 1
    tokens = prompt.tokens.gather(1, start[:, None])
    found = []
    for accepted in (*STEPS, STEPS[0]):
        drafts = torch.randint(4, 40, (len(ROWS), width - 1), generator=generator)
        found.append(window.forward(Pass(torch.cat([tokens, drafts], 1), start)))
        start = start + accepted.clamp(max=width)
        tokens = torch.randint(4, 40, (len(ROWS), 1), generator=generator)
    return found


def check_logits(width: int = 3, pieces: int = 1, **options: Any) -> None:
    private = decode(open_window(ROWS, shares=False, **options), width)
    shared = decode(open_window(ROWS, shares=True, pieces=pieces, **options), width)
    for own, received in zip(private, shared, strict=True):
        torch.testing.assert_close(received, own, rtol=0, atol=1e-5)


def test_groups_are_rows_with_the_same_tokens() -> None:
    """Whatever stands in their padding."""
    tokens = torch.tensor([[5, 6, 9], [5, 6, 0], [5, 6, 7], [5, 7, 9]])
    groups = Prompt(tokens, torch.tensor([2, 2, 3, 2])).groups
    assert groups.rows == ((0, 1), (2,), (3,))
    assert groups.lengths == (1, 2, 1)
    assert groups.n_saved == 1


@covering(
    name=["llama", "qwen2", "gemma", "gpt2", "cohere", "gemma3, deep"],
    fused=ROUTES,
    attention=["auto", "kernel"],
)
def test_logits_are_those_of_private_prompts(name: str, fused: bool, attention: str) -> None:
    """Grouped heads, ragged prompts, rollbacks; by torch, and by `window_attention`."""
    check_logits(name=name, fused=fused, attention=attention)


@pytest.mark.parametrize(
    "options",
    [{"width": 1}, {"width": 8}, {"pieces": 3}, {"name": "gemma2", "fused": True}],
    ids=["narrow", "wide", "a prompt in pieces", "a softcap, in plain products"],
)
def test_other_passes(options: dict[str, Any]) -> None:
    check_logits(**options)


@pytest.mark.parametrize(("name", "fused"), [("llama", True), ("gemma3, deep", False)])
def test_a_tree_is_that_of_private_prompts(name: str, fused: bool) -> None:
    """And so is what follows, after a path was kept."""
    parents = torch.tensor([[-1, 0, 0, 1, 2, 2]]).expand(len(ROWS), -1)
    path = torch.tensor([[0, 2, 4], [0, 1, -1], [0, 2, 5], [0, -1, -1]]).repeat(2, 1)
    tokens = torch.tensor(draw_rows(*[6] * len(ROWS)))
    start = make_prompt(ROWS).lengths - 1
    found = []
    for shares in (False, True):
        window = open_window(ROWS, shares=shares, name=name, fused=fused)
        assert not window.lack("trees")
        logits = [window.forward(Pass(tokens, start, parents=parents))]
        window.commit(start, path)
        ends = start + (path >= 0).sum(1)
        found.append([*logits, window.forward(Pass(tokens[:, :2], ends))])
    for own, received in zip(*found, strict=True):
        torch.testing.assert_close(received, own, rtol=0, atol=1e-5)


def test_rows_with_other_inputs_share_nothing() -> None:
    """Prompts of image tokens have lengths beside them, positions of grids are a table."""
    window = ImageTokenWindow(shared_lm("llama"), range(8, 24))
    prompt = make_prompt([LONG, SHORT, LONG])
    window.begin(prompt)
    assert not find_other_inputs(window, prompt.groups)
    window.begin(replace(prompt, lengths=torch.tensor([33, 9, 32])))
    assert "other inputs" in find_other_inputs(window, prompt.groups)


def test_prompts_are_stored_and_processed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of one prompt where eight rows had eight."""
    rows = [LONG] * 8
    open_window(rows, shares=True, stride=None)  # the model's self-check
    widths: list[tuple[int, int]] = []
    compute = CausalLMWindow.compute

    def note(self: CausalLMWindow, **inputs: Any) -> Any:
        widths.append(tuple(inputs["input_ids"].shape))
        return compute(self, **inputs)

    monkeypatch.setattr(CausalLMWindow, "compute", note)
    start = make_prompt(rows).lengths - 1
    sizes = {}
    for shares in (False, True):
        window = open_window(rows, shares=shares, stride=None)
        window.forward(Pass(torch.full((8, 2), 5), start))
        sizes[shares] = window.run_caches().n_bytes
    assert widths == [(8, 32), (8, 2), (1, 32), (8, 2)]
    prefix = window.run_caches().prefix
    assert prefix is not None
    assert prefix.n_bytes == len(LONG[:-1]) * ENTRY
    assert sizes[False] - sizes[True] == 7 * prefix.n_bytes


@pytest.mark.parametrize("kept", [[0, 2, 3, 5, 7], [6, 0], [4, 5]])
def test_rows_that_end_early(kept: list[int]) -> None:
    """Those that are left go on, from prompts that some of them do not read any more."""
    rows = torch.tensor(kept)
    found = []
    sizes = []
    start = (make_prompt(ROWS).lengths - 1)[rows]
    for shares in (False, True):
        window = open_window(ROWS, shares=shares)
        decode(window, 3)
        window.keep_rows(rows)
        tokens = torch.tensor([[5, 9, 6]]).expand(len(kept), -1)
        found.append(window.forward(Pass(tokens, start)))
        prefix = window.run_caches().prefix
        sizes.append(0 if prefix is None else prefix.n_bytes)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)
    prompts = {tuple(ROWS[row]) for row in kept}
    longest = max(len(prompt) - 1 for prompt in prompts)
    assert sizes[1] <= sum(len(prompt) > 1 for prompt in prompts) * longest * ENTRY


def generate(
    policy: Any, share_prefix: Any, rows: list[list[int]] | None = None, **options: Any
) -> tuple[Any, Stats]:
    """What `generate` returns for three rows of each prompt."""
    model = build_lm("llama")
    given: dict[str, Any] = {"do_sample": True, "max_new_tokens": N_NEW, "pad_token_id": PAD}
    given |= {"eos_token_id": EOS, "num_return_sequences": 3} | options
    prompts = left_padded([LONG, OTHER] if rows is None else rows)
    with mmaccel.attach(model, policy, seed=4, strict=True, share_prefix=share_prefix) as handle:
        made = model.generate(**prompts, **given)
    assert handle.stats is not None
    return made, handle.stats


@pytest.mark.parametrize(("number", "name"), every(3, enumerate(text_policies())))
def test_every_window_policy(number: int, name: str) -> None:
    """The tokens and passes of private prompts, sampled and ended by a stop token; every other
    policy is guided.
    """
    guided = number % 2 == 1
    drafter = CausalLMWindow(build_lm("qwen2"))
    policy = make("policies", name, Target(None, drafter))
    options: dict[str, Any] = {}
    if guided:
        options["guidance_scale"] = 1.7
        options["negative_prompt_ids"] = torch.tensor([SHORT] * 6)
    made, stats = generate(policy, False, **options)
    shared, shared_stats = generate(policy, True, **options)
    assert torch.equal(shared, made)
    assert shared_stats.passes == stats.passes
    assert shared_stats.exactness == stats.exactness
    n_rows, n_prompts = (12, 3) if guided else (6, 2)
    width = len(LONG) - 1
    saved = stats.tokens_processed - shared_stats.tokens_processed
    assert saved == (n_rows - n_prompts) * width
    assert any(f"{n_rows} rows read {n_prompts} stored" in note for note in shared_stats.notes)
    assert not any("share_prefix" in note for note in stats.notes)


def test_chunks_of_a_shared_prompt() -> None:
    """A pass processes some tokens of one row a prompt."""
    whole, _ = generate("jacobi", True)
    made, stats = generate("jacobi", True, prefill_chunk_size=24)
    assert torch.equal(made, whole)
    assert stats.prefill_passes == 3  # 12 tokens of each prompt
    assert any("6 rows read 2 stored" in note for note in stats.notes)


def test_a_cache_that_the_caller_sees() -> None:
    """Holds the entries that transformers' loop would have left."""
    made, shared = (
        generate("jacobi", shares, [LONG], return_dict_in_generate=True)[0]
        for shares in (False, True)
    )
    assert torch.equal(shared.sequences, made.sequences)
    pairs = zip(made.past_key_values.layers, shared.past_key_values.layers, strict=True)
    for own, received in pairs:
        torch.testing.assert_close(received.keys, own.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(received.values, own.values, rtol=0, atol=1e-5)


REASONS: dict[str, tuple[list[list[int]], str]] = {
    "other prompts": ([LONG, SHORT], "no two rows have the same prompt"),
    "one token": ([[7], [7]], "no two rows have the same prompt of two tokens"),
    "a row alone": ([LONG], "one row is decoded at a time"),
    "a short prompt": ([SHORT, SHORT], "it would save 8 entries"),
}


@pytest.mark.parametrize("case", REASONS)
def test_auto_says_why_it_does_not(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the passes of a self-check."""
    rows, reason = REASONS[case]
    model = build_lm("llama")
    monkeypatch.setattr(lacks, "_of_layers", lambda *_: pytest.fail("asked"))
    with mmaccel.attach(model, "jacobi", share_prefix="auto") as handle:
        model.generate(**left_padded(rows), max_new_tokens=3, do_sample=False)
    assert handle.stats is not None
    assert [reason in note for note in handle.stats.notes] == [True]


def test_auto_gives_way_to_methods_of_layers() -> None:
    model = build_lm("llama")
    rows = left_padded([LONG] * 40)
    method = mmaccel.StreamingLLM(budget=8)
    with mmaccel.attach(model, "jacobi", share_prefix="auto", kv_cache=method) as handle:
        model.generate(**rows, max_new_tokens=3, do_sample=False)
    with mmaccel.attach(model, "jacobi", share_prefix="auto") as other:
        model.generate(**rows, max_new_tokens=3, do_sample=False)
    assert handle.stats is not None and other.stats is not None
    assert any("leaves each row entries of its own" in note for note in handle.stats.notes)
    assert any("40 rows read 1 stored prompt" in note for note in other.stats.notes)


BUGS = ("no weights", "positions begin anew", "another group's prompt")


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "no weights":
        monkeypatch.setattr(
            shared_prefix, "merge", lambda own, lse, other, other_lse: (own + other) / 2
        )
    elif bug == "positions begin anew":
        position_ids = CausalLMWindow.position_ids

        def restart(self: CausalLMWindow, positions: Tensor) -> Tensor:
            caches = self.run_caches()
            if caches.prefix is not None:
                positions = positions - caches.prefix.lengths[:, None]
            return position_ids(self, positions)

        monkeypatch.setattr(CausalLMWindow, "position_ids", restart)
    else:
        join = SharedPrefix.join
        monkeypatch.setattr(
            SharedPrefix, "join", lambda self, row, key, layers: join(self, row, key > 0, layers)
        )
    with pytest.raises(AssertionError):
        check_logits()
