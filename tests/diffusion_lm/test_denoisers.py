"""Denoisers over published forward signatures: positions, masks, shifts, numbering."""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmaccel.contracts import CanvasPass, Denoiser, Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.diffusion_lm.answering import _answers, answering
from mmaccel.pipelines.hosts.diffusion_lm.models import (
    DreamDenoiser,
    FastDLLMDenoiser,
    LLaDADenoiser,
    LuminaDenoiser,
    SDARDenoiser,
)
from mmaccel.pipelines.hosts.diffusion_lm.selected_logits import queried_logits
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.layout import Columns, ColumnSets
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.canvas import PROMPTS, run
from tests.fixtures.denoiser_targets import CODES, FIRST, LENGTH, MASK, VOCAB, images
from tests.fixtures.denoisers import TinyDream, TinyFastDLLM, TinyLLaDA, TinyLumina
from tests.fixtures.fused_lms import lay_out_all, note_products
from tests.fixtures.joints import WrappedDenoiser
from tests.fixtures.sdar import TinySDAR, published

NEWLINE = 36  # of the models of images


class Forgetful(TinySDAR):
    """Ignores the cache that it is given."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return super().forward(*args, **(inputs | {"past_key_values": None, "use_cache": False}))


def build(family: str) -> Any:
    """A denoiser of text around a tiny model."""
    if family == "llada":
        return LLaDADenoiser(TinyLLaDA(VOCAB, max_sequence_length=64), MASK)
    if family == "dream":
        return DreamDenoiser(TinyDream(VOCAB, mask_token_id=MASK, max_position_embeddings=64))
    if family == "lumina":
        return LuminaDenoiser(TinyLumina(VOCAB), MASK)
    if family == "sdar":
        return SDARDenoiser(TinySDAR(VOCAB, mask_token_id=MASK, block_size=4))
    if family == "sdar-uncached":
        return SDARDenoiser(Forgetful(VOCAB, mask_token_id=MASK, block_size=4))
    return FastDLLMDenoiser(TinyFastDLLM(VOCAB, bd_size=4), MASK)


TEXTS = ("sdar-uncached", "sdar", "fast-dllm", "llada", "dream", "lumina")


class Recorded(WrappedDenoiser):
    """A denoiser that records the entries and logits of every pass."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.passes: list[tuple[CanvasPass, Tensor]] = []

    def forward(self, entries: CanvasPass) -> Tensor:
        logits = super().forward(entries)
        self.passes.append((entries, logits))
        return logits


def alone(model: Any, entries: CanvasPass, row: int) -> Tensor:
    """Logits `[Q, V]` of one row without padding, by the model's body and a mask written here."""
    seen = entries.reads[row].any(0)
    ids = entries.tokens[row][seen][None]
    positions = torch.arange(ids.shape[1])
    mask = None
    if model.block is not None:
        mask = positions // model.block <= (positions // model.block)[:, None]
    logits = model.model.body(ids, positions[None], mask).logits[0]
    before = int((~seen).sum())
    return logits[entries.queries[row] - before]


@pytest.mark.parametrize("family", TEXTS)
def test_logits_are_those_of_every_row_alone(family: str) -> None:
    model = Recorded(build(family))
    assert isinstance(model.inner, Denoiser)
    assert model.supports_kv_cache == (family != "sdar-uncached")
    run(Stepwise(), model, LENGTH, 0.0)
    assert len(model.passes) == LENGTH
    for entries, logits in model.passes:
        assert logits.shape == (len(PROMPTS), entries.queries.shape[1], VOCAB)
        for row in range(len(PROMPTS)):
            wanted = alone(model.inner, entries, row)
            assert torch.allclose(logits[row], wanted, rtol=0, atol=1e-6)


def test_products_in_onednns_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits, in every pass, and none of the forwards stays behind."""
    lay_out_all(monkeypatch)
    model = Recorded(build("fast-dllm"))
    model.inner.model.float()
    rows = note_products(monkeypatch)
    made = run(Stepwise(), model, LENGTH, 0.0)
    n_linears = sum(type(module) is nn.Linear for module in model.inner.model.modules())
    assert made.stats.passes == LENGTH and len(rows) >= 2 * n_linears
    assert not any("forward" in vars(module) for module in model.inner.model.modules())
    for entries, logits in model.passes:
        wanted = alone(model.inner, entries, 0)
        assert torch.allclose(logits[0], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llada", "dream", "lumina"])
def test_a_pass_over_a_block_reads_what_the_pass_before_has_written(family: str) -> None:
    """Keys and values outside the block are those of the first pass, by hand."""
    model = build(family)
    draw = torch.Generator().manual_seed(2)
    before, after = torch.randint(VOCAB - 1, (2, 1, 9), generator=draw)
    block = torch.arange(4, 7)
    after = torch.where((torch.arange(9) >= 4) & (torch.arange(9) < 7), after, before)
    columns = Columns(Prompt(before[:, :3], torch.tensor([3])), 6, None, model.shift)
    model.reserve(1, columns.cache_size)
    whole, slots = torch.arange(9)[None], torch.arange(1, 4)[None]
    everything = torch.ones(1, 9, dtype=torch.bool)
    inside = torch.isin(whole, block)
    for tokens, computed in ((before, everything), (after, inside)):
        sets = ColumnSets(computed, computed, everything)
        logits = model.forward(columns.as_entries(tokens[None, :, 3:], sets, slots))[0]

    stored: dict[int, tuple[Tensor, Tensor]] = {}

    def store(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stored[layer] = keys, values
        return keys, values

    def join(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        both = [known.clone() for known in stored[layer]]
        for known, new in zip(both, (keys, values), strict=True):
            known[:, :, block] = new[:, :, 1:]
        return both[0], both[1]

    body = model.model.body
    body(before, whole, None, store)
    asking = torch.arange(3, 7)[None]  # the entry before the block, too
    expected = body(after[:, asking[0]], asking, None, join).logits[0]
    expected = expected[:3] if model.shift else expected[1:]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    assert not any("attention" in vars(each) for each in model.model.modules())


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llada", "none"), ("dream", "prefix"), ("lumina", "dual"), ("dream", "vicinity")],
)
def test_positions_by_hand_and_drafts_over_a_cache(family: str, kind: str) -> None:
    """Two blocks of 3 after 3, 1 and 5 tokens: a refresh computes all, two passes what is not read
    from the cache; margin 1.
    """
    own = {
        "none": [3 * 9 + 3 * 9, 3 * 7 + 3 * 7, 3 * 11 + 3 * 11],
        "prefix": [9 + 2 * 6 + 9 + 2 * 3, 7 + 2 * 6 + 7 + 2 * 3, 11 + 2 * 6 + 11 + 2 * 3],
        "dual": [9 + 2 * 3 + 9 + 2 * 3, 7 + 2 * 3 + 7 + 2 * 3, 11 + 2 * 3 + 11 + 2 * 3],
        "vicinity": [9 + 2 * 5 + 9 + 2 * 4, 7 + 2 * 5 + 7 + 2 * 4, 11 + 2 * 5 + 11 + 2 * 4],
    }[kind]
    model, cache = build(family), CachePlan(kind, margin=1)
    whole = run(Stepwise(block=3, cache=cache), model, LENGTH, 1.0)
    assert whole.stats.positions == sum(own)
    made = run(LosslessUnmask(3, block=3, cache=cache), model, LENGTH, 1.0)
    assert torch.equal(made.tokens, whole.tokens) and made.stats.passes <= whole.stats.passes
    alone = run(Stepwise(block=3, cache=cache), model, LENGTH, 1.0, row=1)
    assert torch.equal(alone.tokens[0], whole.tokens[1]) and alone.stats.positions == own[1]


@pytest.mark.parametrize("family", ["sdar", "fast-dllm"])
def test_finished_blocks_are_cached_exactly(family: str) -> None:
    model = build(family)
    expected = run(Stepwise(), model, 10, 1.0)
    before = model.model.tokens_processed
    made = run(Stepwise(cache="block"), model, 10, 1.0)
    computed = model.model.tokens_processed - before
    assert torch.equal(made.tokens, expected.tokens)
    assert made.stats.positions <= computed < 0.6 * expected.stats.positions
    alone = run(Stepwise(cache="block"), model, 10, 1.0, row=1)
    assert torch.equal(alone.tokens[0], made.tokens[1])


@pytest.mark.parametrize("prompt, length", [([5, 9, 7, 1, 2, 3], 10), ([8], 11)])
def test_tokens_are_those_of_sdars_published_loop(prompt: list[int], length: int) -> None:
    made = run(Stepwise(cache="block"), build("sdar"), length, 0.0, prompts=[prompt])
    tokens, theirs = published(TinySDAR(VOCAB), prompt, length, 4, MASK)
    assert made.tokens[0].tolist() == tokens and len(set(tokens)) > 2
    # theirs stores a block by a pass of its own, ours with the first pass of the next block, so
    # that it never stores the last block; both compute the prompt's blocks once
    assert made.stats.positions == theirs - 4


class Appending(TinySDAR):
    """Indexes the cache's layers always, which transformers 5 does not allow."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return super().forward(*args, **(inputs | {"store_kv": False}))


@pytest.mark.parametrize(
    "build_it, words",
    [
        (lambda: SDARDenoiser(Forgetful(VOCAB, block_size=4), MASK), "from a Forgetful"),
        (lambda: SDARDenoiser(Appending(VOCAB, block_size=4), MASK), "TypeError"),
        (lambda: SDARDenoiser(TinySDAR(VOCAB, num_hidden_layers=None), MASK), "num_hid"),
    ],
)
def test_a_model_without_a_cache_computes_everything_and_says_why(
    build_it: Any, words: str
) -> None:
    for _ in range(2):  # the self-check without a cache does not count for one with
        model = build_it()
        assert not model.supports_kv_cache and words in model.kv_cache_reason
    made = run(Stepwise(), model, LENGTH)
    assert torch.equal(made.tokens, run(Stepwise(), build("sdar"), LENGTH).tokens)
    with pytest.raises(UnsupportedModelError, match="entries that later passes read"):
        run(Stepwise(cache="prefix"), model, LENGTH)


def test_a_model_that_follows_no_mask_is_refused() -> None:
    inner = TinyFastDLLM(VOCAB)
    inner.model = SimpleNamespace()  # which makes its mask elsewhere
    with pytest.raises(UnsupportedModelError, match="no attribute 'eval_mask'"):
        FastDLLMDenoiser(inner, MASK)
    assert not _answers  # which are known by the ids of modules


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_are_cached_in_every_dtype(dtype: torch.dtype) -> None:
    sdar = TinySDAR(VOCAB, mask_token_id=MASK, block_size=2).to(dtype)
    fast = TinyFastDLLM(VOCAB, bd_size=16).to(dtype)
    assert SDARDenoiser(sdar).supports_kv_cache
    assert FastDLLMDenoiser(fast, MASK).supports_kv_cache


def test_an_entry_that_reads_nothing_writes_no_nan() -> None:
    model = build("sdar")
    model.reserve(1, 6)
    ids, index = torch.tensor([[5, 9, 7]]), torch.arange(3)[None]
    reads = torch.ones(1, 3, 6, dtype=torch.bool)
    reads[..., 3:] = False
    reads[:, 2] = False
    entries = CanvasPass(
        tokens=ids, positions=index, cache_indices=index, reads=reads, queries=index
    )
    assert not model.forward(entries)[:, :2].isnan().any()
    reads[:, 2] = reads[:, 1]
    assert model.forward(entries).isfinite().all()


def test_the_head_runs_on_queried_positions() -> None:
    inner = (model := build("llada")).model
    inner.calls = inner.head_rows = 0
    run(Stepwise(block=2), model, LENGTH)
    assert inner.calls == LENGTH and inner.head_rows == LENGTH * 2 * len(PROMPTS)


@dataclass(frozen=True)
class Lines:
    """Every third slot ends a row of the image."""

    newline: int
    columns: int = 3
    frame: int = 6

    def forced(self, slots: Tensor) -> Tensor | None:
        return torch.where(slots % 3 == 2, self.newline, -1)

    def allowed(self, slots: Tensor) -> Tensor | None:
        return None


@pytest.mark.parametrize("family", ["mmada", "lumina"])
def test_a_range_of_the_vocabulary(family: str) -> None:
    """Prompts and tokens between rows are the model's own, the rest are codes from 0 on."""
    model = Recorded(images(family))
    assert model.vocab_size == model.mask_token == CODES
    newline = int(model.inner.to_canvas(torch.tensor(NEWLINE)))
    rows = [[5, 26, 7], [8, 2], [3], [4, 4]]  # 26 is a code and, in a prompt, a word
    tokens = torch.tensor([row + [0] * (3 - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    prompt = Prompt(model.inner.to_canvas(tokens), lengths, branches=2, layout=Lines(newline))
    options = {"params": SamplingParams(guidance_scale=2.5), "noise": Noise.from_seed(3, 2)}
    made = Stepwise().sample(model, prompt, 6, **options)
    assert bool((made.tokens[:, 2::3] == newline).all())
    assert made.stats.passes == 4
    entries, logits = model.passes[-1]
    ids = model.inner.to_model(entries.tokens)
    assert torch.equal(ids[2:, -6:], ids[:2, -6:])  # both branches have one canvas
    assert int((ids == MASK).sum()) == 4 and set(ids[0, :3].tolist()) == {5, 26, 7}
    plain = replace(entries, tokens=ids)
    for row in range(4):
        wanted = alone(model.inner, plain, row)[:, FIRST : FIRST + CODES]
        assert torch.allclose(logits[row], wanted, rtol=0, atol=1e-6)
    drafted = LosslessUnmask(3).sample(images(family), prompt, 6, **options)
    assert torch.equal(drafted.tokens, made.tokens)


def test_passes_of_two_threads_answer_for_themselves_and_leave_nothing() -> None:
    """One begins inside the other, and ends behind it."""
    holder = type("Holder", (), {"attention": lambda self: "own"})()
    begun = [Event(), Event()]
    ended = Event()
    heard: list[str] = []

    def first() -> None:
        with answering([holder], "attention", lambda module: "first"):
            begun[0].set()
            begun[1].wait(5)
            heard.append(holder.attention())
        heard.append(holder.attention())
        ended.set()

    def second() -> None:
        begun[0].wait(5)
        with answering([holder], "attention", lambda module: "second"):
            begun[1].set()
            ended.wait(5)
            heard.append(holder.attention())

    threads = [Thread(target=first), Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == ["first", "own", "second"]
    assert holder.attention() == "own"
    assert not vars(holder)


def test_a_pass_of_another_thread_has_states_of_its_own() -> None:
    head = nn.Linear(4, 6)
    states = torch.randn(1, 3, 4)
    others: list[Tensor] = []

    def forward() -> Any:
        thread = Thread(target=lambda: others.append(head(states)))
        thread.start()
        thread.join()
        return SimpleNamespace(logits=head(states))

    forward.get_output_embeddings = lambda: head  # type: ignore[attr-defined]
    logits = queried_logits(forward, torch.tensor([[2, 0]]))
    assert torch.equal(logits, head(states)[:, [2, 0]])
    assert torch.equal(others[0], head(states))


def test_a_model_over_every_column_refuses_padding() -> None:
    denoiser = LuminaDenoiser(TinyLumina(VOCAB), MASK)
    denoiser.supports_kv_cache = False
    with pytest.raises(UnsupportedModelError, match="received padding"):
        run(Stepwise(), denoiser, 4, prompts=[[5] * 7, [3, 4]])
