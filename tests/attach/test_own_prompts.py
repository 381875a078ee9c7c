"""Prompts that are more than ids under left padding: embeddings, caches, holes, token types."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import mmaccel
from mmaccel.pipelines.hosts.transformers_release import CACHE, OLD_CACHE
from mmaccel.samplers.compare_logits import compare_logits
from tests.attach.test_step_outputs import POLICIES, SCORES, assert_alike, read_cache
from tests.fixtures.tiny_lms import PAD, PassCounter, build_lm, falls_back
from tests.fixtures.tiny_lms import PROMPTS as RAGGED
from tests.fixtures.windows import build_model, prompts

LENGTH = 12


HOLES = {"attention_mask": torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 1]])}


def _embed(model: Any) -> dict[str, Any]:
    own = model.get_input_embeddings()(RAGGED["input_ids"]).detach()
    return {"inputs_embeds": own + 0.1 * torch.linspace(-1, 1, own.shape[-1])}


# what takes the place of a prompt's arguments
CASES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "holes": lambda model: HOLES,
    "right padding": lambda model: {
        "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    },
    "embeddings": lambda model: {"input_ids": None} | _embed(model),
    "embeddings and ids": _embed,
    "positions": lambda model: {"position_ids": torch.arange(4).repeat(3, 1) * 2 + 3},
}


def _compare(model: Any, options: dict[str, Any], policy: Any) -> tuple[Any, Any]:
    """Ours, whose tokens and scores are those of plain `generate`, and its statistics.

    Scores of the model's own forward differ by 1e-5 at most, logits of the fused decoder by 1e-5
    standard deviations.
    """
    options = {"max_new_tokens": LENGTH, "do_sample": False, "return_dict_in_generate": True} | (
        options | SCORES
    )
    plain = model.generate(**copy.deepcopy(options))
    with mmaccel.attach(model, policy, strict=True, fused=False) as run:
        own = model.generate(**copy.deepcopy(options))
    assert torch.equal(own.sequences, plain.sequences)
    assert_alike(own.scores, plain.scores)
    assert_alike(own.logits, plain.logits)
    with mmaccel.attach(model, policy, strict=True) as run:
        ours = model.generate(**copy.deepcopy(options))
    assert torch.equal(ours.sequences, plain.sequences)
    off = [compare_logits(a, b).largest for a, b in zip(plain.logits, ours.logits, strict=True)]
    assert max(off) < 1e-5
    return ours, run.stats


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(("name", "policy"), [("llama", "speculative-jacobi"), ("gpt2", "jacobi")])
def test_greedy(name: str, policy: str, case: str) -> None:
    model = build_lm(name)
    _, stats = _compare(model, RAGGED | CASES[case](model), POLICIES[policy])
    assert stats.prefill_passes == 1
    assert stats.passes <= LENGTH + 1


def test_token_types_go_on_with_the_last() -> None:
    """GPT-2 adds an embedding of each token's type."""
    model = build_lm("gpt2")
    types = {"token_type_ids": (torch.arange(4) + 11).expand(3, 4)}
    plain = model.generate(**RAGGED, max_new_tokens=LENGTH, do_sample=False)
    ours, _ = _compare(model, RAGGED | types, mmaccel.Jacobi(window=8))
    assert not torch.equal(ours.sequences, plain)  # the types matter


def test_the_prompt_s_pass_gives_the_first_token() -> None:
    """Without drafts the passes are those of the plain loop."""
    model = build_lm("llama")
    with PassCounter(model) as counter, mmaccel.attach(model, "autoregressive", fused=False) as run:
        made = model.generate(**RAGGED, **_embed(model), max_new_tokens=8, do_sample=False)
    rows, width = RAGGED["input_ids"].shape
    assert counter.passes == made.shape[1] - width
    assert counter.passes == run.stats.passes + run.stats.prefill_passes
    assert run.stats.tokens_processed == rows * (made.shape[1] - 1)


def test_imagegpt_with_a_static_cache_runs_the_original() -> None:
    """Its mask then counts the free entries of the cache, which changes its tokens."""
    model = build_model("imagegpt")
    options = prompts("imagegpt", [[5, 6, 7], [4, 5, 6]]) | {"cache_implementation": "static"}
    try:
        plain = model.generate(**options, max_new_tokens=8, do_sample=False)
    except RuntimeError as error:
        if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23):
            raise
        pytest.skip(f"transformers {transformers.__version__} itself cannot do this: {error}")
    with falls_back(model, "a StaticCache, whose size ImageGPT takes"):
        ours = model.generate(**options, max_new_tokens=8, do_sample=False)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_sliding_windows(name: str) -> None:
    """Windows count columns, so holes run the original; embeddings and caches do not."""
    model = build_lm(name)
    _compare(model, RAGGED | _embed(model), mmaccel.Jacobi(window=8))
    options: dict[str, Any] = RAGGED | HOLES | {"max_new_tokens": 4}
    with falls_back(model, "holes for a model with sliding windows"):
        model.generate(**options)


def _next_turn(out: Any, mask: torch.Tensor, said: list[list[int]]) -> dict[str, Any]:
    """The prompt of a chat's next turn: all that was said, and the cache."""
    ids = torch.cat([out.sequences, torch.tensor(said)], 1)
    grown = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return {"input_ids": ids, "attention_mask": grown, CACHE: getattr(out, CACHE)}


@pytest.mark.parametrize(
    ("name", "only_new", "policy"),
    [("llama", False, "speculative-jacobi"), ("gpt2", True, "jacobi"), ("gemma3", True, "jacobi")],
)
@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_chat_pays_its_prompt_once(name: str, only_new: bool, policy: str) -> None:
    model = build_lm(name)
    options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True}
    first = RAGGED | {"max_new_tokens": 6, "eos_token_id": None}
    plain = model.generate(**first, **options)
    with mmaccel.attach(model, POLICIES[policy], strict=True):
        ours = model.generate(**first, **options)
    said = [[7, 8, 9], [9, 9, 6], [4, 8, 4]]
    turns = [_next_turn(out, RAGGED["attention_mask"], said) for out in (plain, ours, ours)]
    assert turns[1][CACHE].get_seq_length() == 4 + 6 - 1
    if only_new:
        for turn in turns:
            turn["input_ids"] = turn["input_ids"][:, 9:]
    cache = copy.deepcopy(turns[1][CACHE])
    del turns[2][CACHE]
    turns[2][OLD_CACHE if only_new else "cache"] = cache  # both names, with every release
    options["max_new_tokens"] = LENGTH
    expected = model.generate(**turns[0], **options, **SCORES)
    crossed = model.generate(**turns[1], **options, **SCORES)  # plain, from our cache
    with mmaccel.attach(model, POLICIES[policy], strict=True) as run:
        found = model.generate(**turns[2], **options, **SCORES)
    for out in (crossed, found):
        assert torch.equal(out.sequences, expected.sequences)
        assert_alike(out.scores, expected.scores)
    assert getattr(found, CACHE) is cache  # as transformers, which goes on in the caller's cache
    n_columns = RAGGED["input_ids"].shape[1] + 6 + 3
    assert cache.get_seq_length() == n_columns + len(found.scores) - 1
    assert_alike(read_cache(cache), read_cache(getattr(expected, CACHE)))
    stats = run.stats
    assert stats is not None
    assert stats.tokens_processed <= 3 * (n_columns - 9) + stats.passes * 3 * 8


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_static_caches(name: str) -> None:
    model = build_lm(name)
    ours, _ = _compare(model, RAGGED | {"cache_implementation": "static"}, POLICIES["jacobi"])
    from transformers import StaticCache

    assert isinstance(getattr(ours, CACHE), StaticCache)
    cache = StaticCache(config=model.config, max_cache_len=40)
    ids = RAGGED["input_ids"]
    with torch.no_grad():
        model(**{k: v[:, :2] for k, v in RAGGED.items()}, **{CACHE: cache})
    _compare(model, RAGGED | {CACHE: cache, "input_ids": ids}, POLICIES["jacobi"])


def test_a_static_cache_that_is_too_short() -> None:
    """A sliding layer made for the first turn slides over fewer columns than the model does."""
    model = build_lm("mistral", sliding_window=32)
    options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True}
    first = RAGGED | options | {"max_new_tokens": 6, "eos_token_id": None}
    said = [[7, 8], [9, 9], [4, 8]]

    def talk() -> torch.Tensor:
        out = model.generate(**first, cache_implementation="static")
        turn = _next_turn(out, RAGGED["attention_mask"], said)
        made: torch.Tensor = model.generate(**turn, **options, max_new_tokens=LENGTH).sequences
        return made

    plain = talk()
    with falls_back(model, "less room than the call needs") as run:
        ours = talk()
    assert torch.equal(ours, plain)
    assert [len(stats.fallbacks) for stats in run.history] == [0, 1]


def test_overrides_that_matter_beyond_a_length() -> None:
    """Phi-3's rotary positions change at 24 positions: shorter calls are served."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4, "original_max_position_embeddings": 24,
    }  # fmt: skip
    config = transformers.Phi3Config(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=96,
        original_max_position_embeddings=24, rope_parameters=rope, initializer_range=0.25,
        bos_token_id=1, eos_token_id=None, pad_token_id=PAD,
    )  # fmt: skip
    torch.manual_seed(7)
    model = transformers.Phi3ForCausalLM(config).eval()
    _compare(model, RAGGED | {"max_new_tokens": 21}, mmaccel.Jacobi(window=8))
    with falls_back(model, "more positions than the model's 24"):
        model.generate(**RAGGED, max_new_tokens=22, do_sample=False)
