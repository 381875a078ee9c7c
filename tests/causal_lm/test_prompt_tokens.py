"""Words that leave a prompt: LazyLLM and ILRe against their rules written over positions.

The references compute in float64: LazyLLM's one token after the other
(`tests.fixtures.revival_reference`), ILRe's from the attention maps of transformers.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import ILRe, LazyLLM
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.prompt_cuts import revival
from mmaccel.reduction.visual_tokens.context import VisualContext
from tests.fixtures.fused_lms import build_decoder
from tests.fixtures.lanes import every
from tests.fixtures.revival_reference import RevivalReference
from tests.fixtures.tiny_lms import VOCAB, build_lm, left_padded

N_NEW = 12
LENGTHS = (40, 33)
FIRST, NEWEST = 2, 5
ENDS: dict[str, int] = {"first": FIRST, "newest": NEWEST}
METHODS = {
    "lazy-llm": LazyLLM(keep=0.4, layers=(1, 3), **ENDS),
    "ilre": ILRe(keep=0.4, layer=2, **ENDS),
}


def build(**changes: Any) -> Any:
    """Rows of it never end."""
    model = build_lm("llama", **{"num_hidden_layers": 4, "num_key_value_heads": 2} | changes)
    model.generation_config.eos_token_id = None
    return model


def prompts(*lengths: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(3)
    return left_padded([torch.randint(4, VOCAB, (n,), generator=made).tolist() for n in lengths])


def answer(
    model: Any,
    method: Any,
    inputs: dict[str, Tensor],
    policy: Any = "autoregressive",
    **options: Any,
) -> tuple[Tensor, Any]:
    """New tokens and statistics of a call."""
    asked = {"do_sample": False, "max_new_tokens": N_NEW} | options
    with mmaccel.attach(model, policy, strict=True, seed=5, prompt_tokens=method) as run:
        made = model.generate(**inputs, **asked)
    return made[:, inputs["input_ids"].shape[1] :], run.stats


def words_of(length: int) -> list[int]:
    """Positions that may leave."""
    return list(range(FIRST, length - NEWEST))


@torch.no_grad()
@pytest.mark.parametrize("keep", [0.1, 0.7])
def test_lazy_llm_computes_what_its_reference_computes(keep: float) -> None:
    """Every logit of the prompt and of every step, and which positions each layer computed."""
    model, found, widths = build(), list[Tensor](), list[list[int]]()
    inputs, before = prompts(LENGTHS[0]), (1, 3)
    model.register_forward_hook(lambda _model, _given, out: found.append(out.logits[:, -1]))
    for layer in model.get_decoder().layers:
        layer.register_forward_hook(
            lambda layer, given, _: widths.append([layer.self_attn.layer_idx, given[0].shape[1]])
        )
    made, stats = answer(model, LazyLLM(keep=keep, layers=before, **ENDS), inputs)
    reference = RevivalReference(model, before, keep)
    states = model.get_input_embeddings()(inputs["input_ids"][0])
    places = torch.arange(LENGTHS[0])[None]
    assert made[0].tolist() == reference.run(states, places, words_of(LENGTHS[0]), N_NEW)
    expected = torch.stack(reference.logits).float()
    assert torch.allclose(torch.cat(found[-N_NEW:]), expected, atol=1e-4, rtol=1e-4)
    computed = [[layer, len(own)] for step in reference.computed for layer, own in enumerate(step)]
    assert widths[-len(computed) :] == computed
    n_computed = sum(at < LENGTHS[0] for step in reference.computed for own in step for at in own)
    assert f"{n_computed} of {4 * LENGTHS[0]} layers" in stats.notes[-1]


def recall_by_hand(model: Any, ids: Tensor, method: ILRe) -> list[int]:
    """Positions `[n]` of one row's words that ILRe keeps: lists of pooled attention, one a width of
    pooling, taken in turns until the budget is full.
    """
    length, words = len(ids), words_of(len(ids))
    assert method.layer is not None and method.keep is not None
    maps = model(ids[None], output_attentions=True, use_cache=False).attentions[method.layer - 1]
    mass = [float(maps[0, :, -NEWEST:, at].sum()) for at in words]
    lists = []
    for width in method.kernels:
        reach = range(-(width // 2), width // 2 + 1)
        near = [[mass[k + j] for j in reach if 0 <= k + j < len(mass)] for k in range(len(mass))]
        lists.append(sorted(range(len(mass)), key=lambda k: (-max(near[k]), k)))
    budget, chosen = int(len(words) * method.keep + 0.5), list[int]()
    for row in zip(*lists):
        for each in row:
            if each not in chosen and len(chosen) < budget:
                chosen.append(each)
    kept = {words[k] for k in chosen}
    return [at for at in range(length) if at not in words or at in kept]


@torch.no_grad()
@pytest.mark.parametrize("keep", [0.2, 0.5])
def test_ilre_is_the_model_on_the_words_it_recalls(keep: float) -> None:
    """At the positions that they had, and new words behind the whole prompt."""
    model, inputs = build(), prompts(*LENGTHS)
    method = ILRe(keep=keep, layer=2, **ENDS)
    made, stats = answer(model, method, inputs)
    exact = deepcopy(model).double()
    exact.set_attn_implementation("eager")
    n_kept = 0
    for row, length in enumerate(LENGTHS):
        ids = inputs["input_ids"][row, -length:]
        positions = recall_by_hand(exact, ids, method)
        n_kept += len(positions) - FIRST - NEWEST
        tokens = ids[positions].tolist()
        for k in range(N_NEW):
            at = torch.tensor([positions + list(range(length, length + k))])
            own = {"attention_mask": torch.ones_like(at), "position_ids": at}  # one sequence
            logits = exact(torch.tensor([tokens]), **own, use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        assert made[row].tolist() == tokens[-N_NEW:]
    n_words = sum(len(words_of(length)) for length in LENGTHS)
    assert f"{n_kept} of {n_words} words recalled in front of layer 2" in stats.reference
    assert stats.prefill_passes == 1 and stats.exactness == "relaxed"


WINDOWS = {
    "jacobi": mmaccel.Jacobi(window=5),
    "speculative Jacobi": mmaccel.SpeculativeJacobi(window=5, coupling="maximal"),
    "a draft model": mmaccel.Speculative(4, build()),
    "n-grams": mmaccel.Jacobi(window=4, drafts="ngram"),
}
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 3}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_rows_choose_alone(method: Any) -> None:
    """In windows with drafts, and one row after the other without."""
    model, inputs = build(), prompts(*LENGTHS)
    together, _ = answer(model, method, inputs, WINDOWS["n-grams"])
    for row, length in enumerate(LENGTHS):
        alone, _ = answer(
            model, method, {"input_ids": inputs["input_ids"][row : row + 1, -length:]}
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_windows_have_the_plain_loops_tokens_on_these_words(
    method: Any, options: dict[str, Any]
) -> None:
    """Some drafts are accepted and some are not."""
    inputs = prompts(*LENGTHS)
    for spread in (0.25, 0.1):
        model = build(initializer_range=spread)
        plain, stats = answer(model, method, inputs, max_new_tokens=24, **options)
        assert not torch.equal(plain, answer(model, None, inputs, max_new_tokens=24, **options)[0])
        passes = list[int]()
        for name, policy in WINDOWS.items():
            if not options or policy.exactness == "bitwise":
                made, found = answer(model, method, inputs, policy, max_new_tokens=24, **options)
                assert torch.equal(made, plain), name
                passes.append(found.passes)
        assert min(passes) < stats.passes


@pytest.mark.parametrize("kind", [LazyLLM, ILRe])
def test_keeping_all_is_the_plain_model(kind: Any) -> None:
    model, inputs = build(), prompts(*LENGTHS)
    plain, whole = answer(model, None, inputs, **SAMPLED)
    for method in (kind(keep=1), kind(n_keep=1000)):
        made, stats = answer(model, method, inputs, **SAMPLED)
        assert torch.equal(made, plain) and stats.exactness == whole.exactness
    short = prompts(FIRST + NEWEST, 3)  # nothing may leave
    plain, _ = answer(model, None, short)
    assert torch.equal(answer(model, kind(keep=0.1, **ENDS), short)[0], plain)


CALLS = list[int]()


@dataclass(frozen=True)
class DropsThenWants(LazyLLM):
    """The prompt's pass drops the last words; later steps want all."""

    def budget(self, context: VisualContext) -> Tensor:
        CALLS.append(context.layer or 0)
        return context.initial - (7 if len(CALLS) == 1 else 0)

    def score(self, context: VisualContext) -> Tensor:
        return -torch.arange(context.x.shape[1]).expand(len(context.x), -1).float()


CLASSES = (
    "llama", "qwen2", "gemma", "phi", "cohere", "starcoder2", "gpt_neox", "opt", "biogpt",
    "mixtral", "ministral3", "qwen2_vl", "gemma2",
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", every(3, CLASSES))
def test_a_revived_word_is_as_if_it_had_stayed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values behind the cut are those of the pass over all words, of which those
    before it, which are all that it attends to, stayed.
    """
    model = build_lm(name) if name == "gemma2" else build_decoder(name)
    if name == "gemma2":  # whose scores are capped, but not by sdpa of transformers 5.17
        model.set_attn_implementation("eager")
    windows, process = list[CausalLMWindow](), CausalLMWindow.process_prompt
    monkeypatch.setattr(
        CausalLMWindow, "process_prompt", lambda self: (windows.append(self), process(self))[1]
    )
    inputs = prompts(24)
    with mmaccel.attach(model, "autoregressive", prompt_tokens=LazyLLM(n_keep=99)):
        model.generate(**inputs, do_sample=False, max_new_tokens=2)
    index = torch.arange(16, 23)[None]
    whole = windows[-1].run_caches().read(index)
    for n_new in (1, 3):
        CALLS.clear()
        method = DropsThenWants(keep=0.5, layers=(1,), first=2, newest=1)
        with mmaccel.attach(model, "autoregressive", strict=True, prompt_tokens=method) as run:
            model.generate(**inputs, do_sample=False, max_new_tokens=n_new)
        assert f"{7 * (n_new > 1)} tokens were revived" in run.stats.notes[-1]
        for number, pair in enumerate(zip(whole, windows[-1].run_caches().read(index))):
            for theirs, ours in zip(*pair):
                is_same = torch.isclose(ours, theirs, atol=1e-5, rtol=1e-4).all(-1)
                assert is_same.all() if number == 0 or n_new > 1 else not is_same.any()


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["another position", "read where it was dropped", "stale"])
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one in windows of which drafts are rejected."""
    model, inputs = build(initializer_range=0.15), prompts(*LENGTHS)
    policy: Any = "autoregressive"
    method = LazyLLM(keep=0.3, layers=(1, 3), **ENDS)
    expected, _ = answer(model, method, inputs, max_new_tokens=40)
    cache, step = revival.AuxiliaryCache, revival._Step
    if bug == "another position":
        note = cache.note_prompt

        def shift(self: Any, stage: int, numbers: Tensor) -> None:
            note(self, stage, numbers)
            if stage == 0:
                own = self.places["position_embeddings"]
                self.places["position_embeddings"] = tuple(v.roll(1, 1) for v in own)

        monkeypatch.setattr(cache, "note_prompt", shift)
    elif bug == "read where it was dropped":
        make = step._make_mask

        def sees_all(self: Any, at: Tensor, sees: Tensor, dtype: torch.dtype) -> Any:
            return make(self, at, torch.ones_like(sees), dtype)

        monkeypatch.setattr(step, "_make_mask", sees_all)
    else:
        policy = mmaccel.Speculative(4, build(initializer_range=0.2))
        assert torch.equal(answer(model, method, inputs, policy, max_new_tokens=40)[0], expected)
        monkeypatch.setattr(cache, "forget", lambda self, start: None)
    made, _ = answer(model, method, inputs, policy, max_new_tokens=40)
    assert not torch.equal(made, expected)


def test_the_words_that_are_left_come_in_chunks() -> None:
    model, inputs = build(), prompts(*LENGTHS)
    call: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
    for name, is_whole in (("ilre", False), ("lazy-llm", True)):
        with mmaccel.attach(model, "jacobi", prompt_tokens=METHODS[name]) as run:
            made = model.generate(**inputs, **call)
            assert model.generate(**inputs, **call, prefill_chunk_size=8).equal(made)
        assert not run.stats.fallbacks
        notes = [note for note in run.stats.notes if "tokens leave it inside" in note]
        assert bool(notes) == is_whole and (run.stats.prefill_passes > 2) == (not is_whole)


def test_a_call_that_cannot_lose_words_says_why() -> None:
    model, inputs = build(), prompts(*LENGTHS)
    method = METHODS["ilre"]
    with mmaccel.attach(model, "jacobi", prompt_tokens=method) as run:
        embedded = model.get_input_embeddings()(inputs["input_ids"])
        asked = {"inputs_embeds": embedded, "attention_mask": inputs["attention_mask"]}
        model.generate(**asked, do_sample=False, max_new_tokens=2)
        assert run.stats.fallbacks == ["prompt_tokens with a prompt of embeddings"]
        model.generate(**inputs, do_sample=False, max_new_tokens=2, guidance_scale=2.0)
        assert run.stats.fallbacks == ["prompt_tokens with guidance"]
