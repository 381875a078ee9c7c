"""Several codebooks a step as a stream of codes, and the steps of a next-scale model, against
transformers' own model over everything at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate, one_hot

import mmaccel
from mmaccel import CausalLMWindow, Jacobi, Noise, SamplingParams
from mmaccel.contracts import Pass
from mmaccel.errors import OptionError
from mmaccel.pipelines.codebooks import CodebookWindow
from mmaccel.pipelines.layers.methods import LayerMethods
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt

BOOKS = 3
CODES = 7
STEPS = 6
ROWS = [[1, 2, 3], [4, 5, 6, 0, 1, 2], [3, 3, 3, 5], [2, 0, 1]]  # the third ends inside a step


def build_steps(**changes: Any) -> tuple[Any, Tensor]:
    """A causal LM with one head for all codebooks, and their embeddings."""
    model = build_lm("llama", vocab_size=BOOKS * CODES, **changes)
    tables = torch.randn(BOOKS, CODES, 32, generator=torch.Generator().manual_seed(3))
    return model, tables.to(model.dtype)


def open_codes(model: Any, tables: Tensor, **options: Any) -> CodebookWindow:
    return CodebookWindow(CausalLMWindow(model, **options), tables)


@torch.no_grad()
def greedy(model: Any, tables: Tensor, row: list[int], n_codes: int) -> list[int]:
    """Codes after a row, a step at a time, by the model over all whole steps at once."""
    codes = list(row)
    while len(codes) < len(row) + n_codes:
        n_whole = len(codes) // BOOKS
        books = torch.tensor(codes[: n_whole * BOOKS]).view(n_whole, BOOKS)
        embedded = sum(tables[book][books[:, book]] for book in range(BOOKS))
        logits = model(inputs_embeds=embedded[None]).logits[0, -1].view(BOOKS, CODES)  # type: ignore[index]
        step = logits.argmax(-1).tolist()
        codes += step[len(codes) % BOOKS :]
    return codes[len(row) : len(row) + n_codes]


def sample(policy: Any, window: Any, rows: list[list[int]], **options: Any) -> Any:
    branches = options.pop("branches", 1)
    n_items = len(rows) // branches
    return policy.sample(
        window,
        make_prompt(rows, branches),
        STEPS * BOOKS,
        params=SamplingParams(**options),
        noise=Noise.from_seed(list(range(n_items)), n_items),
    )


@pytest.mark.parametrize("fused", [False, True], ids=["model", "fused"])
def test_greedy_codes_are_those_of_a_loop_over_whole_steps(fused: bool) -> None:
    model, tables = build_steps()
    expected = [greedy(model, tables, row, STEPS * BOOKS) for row in ROWS]
    for policy in (mmaccel.Autoregressive(), Jacobi(window=8), Jacobi(window=2)):
        out = sample(policy, open_codes(model, tables, fused=fused), ROWS, temperature=0.0)
        assert out.tokens.tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 5])
def test_prompts_in_chunks_that_end_inside_a_step(size: int) -> None:
    model, tables = build_steps()
    row = [*ROWS[1], *ROWS[2]]
    window = open_codes(model, tables)
    window.prefill_chunk_size = size
    out = sample(mmaccel.Autoregressive(), window, [row], temperature=0.0)
    assert out.tokens.tolist() == [greedy(model, tables, row, STEPS * BOOKS)]
    assert out.stats.prefill_passes == -(-(len(row) - 1) // size)


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("window", [2, 5, 12])
def test_jacobi_samples_the_plain_loops_codes(window: int, branches: int) -> None:
    model, tables = build_steps()
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 5, "branches": branches}
    if branches == 2:
        options["guidance_scale"] = 2.0
    plain = sample(mmaccel.Autoregressive(), open_codes(model, tables), ROWS, **options)
    codes = sample(Jacobi(window=window), open_codes(model, tables), ROWS, **options)
    assert torch.equal(codes.tokens, plain.tokens)
    assert codes.stats.passes < plain.stats.passes


def test_a_stream_of_codes_costs_no_more_passes_than_steps() -> None:
    """What is redrawn behind a rejected code of a step is right, and accepted in the next pass."""
    model, tables = build_steps()
    out = sample(Jacobi(window=2 * BOOKS), open_codes(model, tables), ROWS[:1], temperature=1.0)
    assert out.stats.passes <= STEPS + 1


@torch.no_grad()
def test_a_rollback_leaves_no_trace() -> None:
    """Passes that begin anywhere in a step, over codes that were wrong before."""
    model, tables = build_steps()
    window = open_codes(model, tables)
    draws = torch.Generator().manual_seed(1)
    codes = torch.randint(CODES, (2, 15), generator=draws)
    wrong = torch.randint(CODES, (2, 6), generator=draws)
    window.reserve(2, 15)
    window.prefill(Pass(codes[:, :2], torch.zeros(2, dtype=torch.int64)))
    whole = window.forward(Pass(codes[:, 2:], torch.full((2,), 2)))
    window.reserve(2, 15)
    window.prefill(Pass(codes[:, :5], torch.zeros(1, dtype=torch.int64).expand(2)))
    window.forward(Pass(wrong, torch.tensor([5, 4])))
    again = window.forward(Pass(codes[:, 4:12], torch.tensor([4, 4])))
    torch.testing.assert_close(again, whole[:, 2:10], atol=1e-5, rtol=1e-4)


def test_a_smaller_cache_of_steps() -> None:
    """A budget that covers everything changes nothing; a small one drops steps, not codes."""
    model, tables = build_steps()
    rows = [[1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]]
    plain = sample(Jacobi(window=6), open_codes(model, tables), rows, temperature=0.0)
    for budget, dropped in ((64, 0), (2, 2)):  # four steps are processed before
        window = open_codes(model, tables)
        methods = LayerMethods(kv_cache=mmaccel.StreamingLLM(budget=budget, sinks=1))
        assert not window.find_layer_obstacle(methods)
        window.use_methods(methods)
        out = sample(Jacobi(window=6), window, rows, temperature=0.0)
        assert window.n_evicted[0] == dropped
        assert torch.equal(out.tokens, plain.tokens) == (dropped == 0)


@pytest.mark.parametrize("method", [mmaccel.H2O(budget=2), mmaccel.TOVA(budget=2)], ids=repr)
def test_a_smaller_cache_after_a_prompt_in_chunks(method: Any) -> None:
    model, tables = build_steps()
    row = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6]
    made = []
    for size in (None, 1, 4, 7):
        window = open_codes(model, tables)
        window.use_methods(LayerMethods(kv_cache=method))
        window.prefill_chunk_size = size
        made.append(sample(Jacobi(window=6), window, [row], temperature=0.0).tokens)
        assert window.n_evicted == (2, 4)
    assert all(tokens.equal(made[0]) for tokens in made)


def test_what_cannot_be_wrapped() -> None:
    model, tables = build_steps()
    with pytest.raises(OptionError, match="expected 14 logits, 7 for each of 2 codebooks"):
        open_codes(model, tables[:2])
    with pytest.raises(OptionError, match="received a CodebookWindow; wrap a causal LM"):
        CodebookWindow(open_codes(model, tables), tables)


SIDES = (1, 2, 3)
SIZES = [side * side for side in SIDES]


def embed_scales(table: Tensor, codes: list[Tensor]) -> Tensor:
    """Inputs `[R, n, D]` of the next scale: all codes so far, drawn at its size and added up."""
    side = SIDES[len(codes)]
    total = torch.zeros(len(codes[0]) if codes else 2, table.shape[1], side, side)
    for own, found in zip(SIDES, codes, strict=False):
        picture = table[found].mT.unflatten(2, (own, own))
        total = total + interpolate(picture, size=(side, side), mode="nearest")
    return total.flatten(2).mT


@torch.no_grad()
def at_once(model: Any, inputs: list[Tensor]) -> Tensor:
    """Logits `[R, sum of n, V]` of all scales in one pass of transformers' own model."""
    scale = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    mask = torch.zeros(1, 1, len(scale), len(scale)).masked_fill(
        scale[:, None] < scale, float("-inf")
    )
    positions = torch.arange(len(scale)).expand(2, -1)
    return model(
        inputs_embeds=torch.cat(inputs, 1), attention_mask=mask, position_ids=positions
    ).logits


@pytest.mark.parametrize("fused", [False, True], ids=["model", "fused"])
@torch.no_grad()
def test_the_steps_of_a_next_scale_model(fused: bool) -> None:
    """Every scale is one pass of embeddings over the cache of those before; its entries see each
    other.
    """
    model = build_lm("llama")
    table = torch.randn(40, 32, generator=torch.Generator().manual_seed(5))
    window = CausalLMWindow(model, fused=fused)
    window.reserve(2, sum(SIZES))
    codes: list[Tensor] = []
    inputs: list[Tensor] = []
    logits: list[Tensor] = []
    begin = 0
    for size in SIZES:
        inputs.append(embed_scales(table, codes))
        end = begin + size
        reads = (torch.arange(sum(SIZES) + 1) < end).expand(2, 1, -1)
        start = torch.full((2,), begin)
        logits.append(window.forward(Pass(inputs[-1], start, reads=reads)))
        noise = one_hot(torch.tensor([begin % 2, 1]), 40)[:, None]  # rows differ
        codes.append((logits[-1] + 3 * noise).argmax(-1))
        begin = end
    assert not torch.equal(codes[1][0], codes[1][1])
    torch.testing.assert_close(torch.cat(logits, 1), at_once(model, inputs), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_queries_and_positions_of_a_pass() -> None:
    model = build_lm("llama")
    window = CausalLMWindow(model)
    ids = torch.randint(40, (2, 6), generator=torch.Generator().manual_seed(1))
    window.reserve(2, 12)
    start = torch.zeros(2, dtype=torch.int64)
    positions = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 3, 3]])
    wanted = torch.tensor([[5, 0], [2, 3]])
    found = window.forward(Pass(ids, start, positions=positions, queries=wanted))
    own = model(input_ids=ids, position_ids=positions).logits
    expected = own.gather(1, wanted[..., None].expand(-1, -1, own.shape[-1]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
