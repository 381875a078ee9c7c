"""What the library says of released language models."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable
from dataclasses import replace
from inspect import getsource
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

import mmaccel
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers.eviction import Eviction
from mmaccel.samplers.drafting.memory import suffix
from tests.fixtures.tiny_lms import left_padded

pytestmark = pytest.mark.slow
SNAPKV = mmaccel.SnapKV(budget=100, window=32, kernel=5)


def encode(tokenizer: Any, *sizes: int) -> list[list[int]]:
    """Beginnings of a module of the standard library, one behind the other."""
    ids: list[int] = tokenizer(getsource(textwrap))["input_ids"]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [ids[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def generate(
    model: Any, policy: Any, rows: list[list[int]], n_new: int = 12, *,
    sample: bool = False, seed: Any = 7, **methods: Any,
) -> Tensor:  # fmt: skip
    """New tokens of each row, `[R, n_new]`."""
    inputs = left_padded(rows)
    options = {"do_sample": sample, "max_new_tokens": n_new, "min_new_tokens": n_new}
    with mmaccel.attach(model, policy, strict=True, seed=seed, **methods):
        made: Tensor = model.generate(**inputs, **options, pad_token_id=0)
    return made[:, inputs["input_ids"].shape[1] :]


def test_greedy_tokens_are_transformers_own(released: Any) -> None:
    model, tokenizer = released
    rows = encode(tokenizer, 40, 23)
    out = model.generate(**left_padded(rows), do_sample=False, max_new_tokens=6)
    assert generate(model, mmaccel.Jacobi(6), rows, 6).equal(out[:, -6:])


def test_drawn_tokens_are_the_plain_loops(smollm2: Any) -> None:
    model, tokenizer = smollm2
    rows = encode(tokenizer, 40, 23)
    plain = generate(model, mmaccel.Autoregressive(), rows, 4, sample=True)
    policy = mmaccel.Jacobi(4, drafts="token-recycling")
    assert generate(model, policy, rows, 4, sample=True).equal(plain)


def test_exact_passes_are_bitwise_in_bfloat16(smollm2: Any) -> None:
    """Of any width, and of a row in a batch as of the row alone."""
    model, tokenizer = smollm2
    model = copy.deepcopy(model).to(torch.bfloat16)
    rows = encode(tokenizer, 60, 31)
    plain = generate(model, mmaccel.Autoregressive(), rows, 8, sample=True, fused="exact")
    policy = mmaccel.Jacobi(5, drafts="token-recycling")
    assert generate(model, policy, rows[:1], 8, sample=True, fused="exact").equal(plain[:1])
    with mmaccel.attach(model, "jacobi", fused="exact") as run:
        model.generate(**left_padded(rows), max_new_tokens=2)
    assert (run.stats.exactness, run.stats.dtype) == ("bitwise", "bfloat16")


def test_text_is_drafted_where_it_repeats_and_nowhere_else(
    smollm2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a token more costs an eighth of a pass, whatever else the machine does."""
    tuner = suffix.Suffix(token_cost=0.125).make_tuner()
    monkeypatch.setattr(suffix, "keep", lambda *given: tuner)
    model, tokenizer = smollm2
    code = getsource(textwrap.indent)
    asked = {
        "copy": f"Repeat this function, with the name changed to `changed`:\n\n{code}",
        "prose": "Write a story about a lighthouse keeper who finds a message in a bottle.",
    }
    stats = {}
    for kind, text in asked.items():
        turns = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        given = {"max_new_tokens": 36, "do_sample": False}
        inputs = {"input_ids": torch.tensor([ids["input_ids"]])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        plain = model.generate(**inputs, **given)
        with mmaccel.attach(model, mmaccel.Jacobi(32), strict=True) as run:
            assert model.generate(**inputs, **given).equal(plain)
        assert run.stats.drafts == "suffix" and run.stats.notes == []
        stats[kind] = run.stats
    prompt = stats["prose"].tokens_processed - stats["prose"].passes
    assert stats["copy"].passes < 24 and stats["prose"].passes > 28
    assert prompt < 100  # few passes of prose are wide


def test_methods_of_caches_and_attention_serve_bfloat16(smollm2: Any) -> None:
    """In which kernels of attention round apart by more than in small random models."""
    model, tokenizer = smollm2
    model = copy.deepcopy(model).to(torch.bfloat16)
    given = tokenizer("Paris is the capital of", return_tensors="pt")
    methods = {"kv_cache": "snapkv", "attention": "quest"}
    with mmaccel.attach(model, "jacobi", strict=True, **methods) as run:
        model.generate(**given, max_new_tokens=4, do_sample=False)
    assert run.stats.fallbacks == []


def test_windows_rows_and_chunks_under_eviction(short_smollm2: Any) -> None:
    model, tokenizer = short_smollm2
    rows = encode(tokenizer, 260, 150)
    method = replace(SNAPKV, budget=36)
    plain = generate(model, mmaccel.Autoregressive(), rows, kv_cache=method)
    for given in ({}, {"prefill_chunk_size": 128}):
        made = generate(model, mmaccel.Jacobi(16), rows, kv_cache=method, **given)
        assert made.equal(plain), given
    alone = generate(model, mmaccel.Jacobi(16), rows[1:], kv_cache=method)
    assert alone[0].equal(plain[1])
    whole = generate(model, mmaccel.Autoregressive(), rows)
    assert whole[:, 0].equal(plain[:, 0]) and not whole.equal(plain)


def test_sliding_layers_keep_what_others_evict(short_gemma3: Any) -> None:
    """A prompt of 560 tokens, of which five layers see the last 512."""
    model, tokenizer = short_gemma3
    rows = encode(tokenizer, 560)
    half = replace(SNAPKV, budget=280)
    expected = generate(model, mmaccel.Autoregressive(), rows, 6, kv_cache=half)
    assert generate(model, mmaccel.Jacobi(16), rows, 6, kv_cache=half).equal(expected)


def test_bfloat16_differs_at_ties_alone(smollm2: Any) -> None:
    """A window's first other token is as likely as the plain loop's, up to what bfloat16 rounds."""
    model, tokenizer = smollm2
    short = copy.deepcopy(model).to(torch.bfloat16)
    rows = encode(tokenizer, 61, 75)
    made = generate(short, mmaccel.Jacobi(8, drafts="ngram"), rows)
    for row, ids in enumerate(rows):
        out = short.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)[0]
        differs = (made[row] != out[len(ids) :]).nonzero()
        if len(differs):
            at = int(differs[0])
            with torch.no_grad():
                logits = short(out[None, : len(ids) + at]).logits[0, -1].float()
            pair = logits[[int(made[row, at]), int(out[len(ids) + at])]]
            assert abs(pair[0] - pair[1]) <= 2 * torch.finfo(torch.bfloat16).eps * pair.abs().max()


def test_a_chat_of_three_turns_at_half_the_cache(smollm2: Any) -> None:
    """What the first turn said is looked up in the third."""
    model, tokenizer = smollm2
    asked = [
        "Hello! My name is Ada, I live in Lisbon, and my dog is called Biscuit.",
        "Tell me one short fact about dogs.",
        "What is my dog called?",
    ]
    turns: list[dict[str, str]] = []
    for question in asked:
        turns.append({"role": "user", "content": question})
        last = question == asked[-1]
        primer = [{"role": "assistant", "content": "Your dog is called"}] if last else []
        given = {"continue_final_message": True} if last else {"add_generation_prompt": True}
        ids = tokenizer.apply_chat_template(turns + primer, return_dict=True, **given)["input_ids"]
        method = replace(SNAPKV, budget=len(ids) // 2, window=8)
        made = generate(model, mmaccel.Jacobi(), [ids], 4 if last else 16, kv_cache=method)
        turns.append({"role": "assistant", "content": tokenizer.decode(made[0])})
    assert turns[-1]["content"].split()[0].startswith("Biscuit")


def by_key_head(attention: Tensor) -> Tensor:
    """`[H, ...]` of `[Hq, ...]`, added up."""
    return attention.unflatten(0, (3, -1)).sum(1)


def vote_snapkv(attention: Tensor) -> Tensor:
    """Listing 1 of the paper, of `[Hq, T, T]`; the window stays."""
    votes = by_key_head(attention[:, -SNAPKV.window :, : -SNAPKV.window].sum(1))
    pooled = avg_pool1d(votes, SNAPKV.kernel, 1, SNAPKV.kernel // 2)
    return torch.cat([pooled, pooled.new_full((3, SNAPKV.window), float("inf"))], 1)


def vote_h2o(attention: Tensor) -> Tensor:
    """Algorithm 1, of all queries of the prompt; half of the budget is of the last entries."""
    votes = by_key_head(attention.sum(1))
    votes[:, -50:] = float("inf")
    return votes


VOTES: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {  # of `tests/layers` all
    "snapkv": (SNAPKV, vote_snapkv),
    "tova": (mmaccel.TOVA(budget=100), lambda attention: attention[:, -1].mean(0, keepdim=True)),
    "h2o": (mmaccel.H2O(budget=100), vote_h2o),
}


@pytest.fixture(scope="module")
def attentions(short_smollm2: Any) -> list[Tensor]:
    """Of a prompt of 300 tokens, `[Hq, T, T]` of each layer of the model's own forward."""
    model, tokenizer = short_smollm2
    model.set_attn_implementation("eager")
    with torch.no_grad():
        ids = torch.tensor(encode(tokenizer, 300))
        found = model(ids, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return [each[0] for each in found]


def share_alike(short_smollm2: Any, attentions: list[Tensor], name: str) -> float:
    """Of layers and heads, those that keep what the model's own attention says."""
    model, tokenizer = short_smollm2
    rows = encode(tokenizer, 300)
    method, vote = VOTES[name]
    kept: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        own = Eviction.evict

        def note(*given: Any, **named: Any) -> Any:
            made = own(*given, **named)
            kept.extend(made)
            return made

        patch.setattr(Eviction, "evict", note)
        generate(model, mmaccel.Jacobi(4), rows, 1, kv_cache=method)
    alike = []
    for ours, attention in zip(kept, attentions, strict=True):
        theirs = vote(attention).topk(method.budget).indices.sort(-1).values
        alike += [bool(a.equal(b)) for a, b in zip(ours[0], theirs, strict=True)]
    return sum(alike) / len(alike)


@pytest.mark.parametrize("name", VOTES)
def test_entries_that_stay_are_the_papers(
    short_smollm2: Any, attentions: list[Tensor], name: str
) -> None:
    """In 95 % of heads all of them; of scores that are almost equal either may stay."""
    assert share_alike(short_smollm2, attentions, name) > 0.95


@pytest.mark.parametrize("name", VOTES)
def test_an_eviction_before_the_last_token_is_seen(
    short_smollm2: Any, attentions: list[Tensor], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window ends one entry early, and the last token has no vote."""
    monkeypatch.setattr(CausalLMWindow, "takes_whole_prompts", property(lambda self: False))
    assert share_alike(short_smollm2, attentions, name) < 0.5
