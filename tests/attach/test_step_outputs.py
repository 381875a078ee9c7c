"""What `generate` returns next to its sequences, under a policy: equal to plain `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.pipelines.hosts.transformers_release import CACHE
from tests.fixtures.tiny_lms import PROMPTS as RAGGED
from tests.fixtures.tiny_lms import build_lm

ALONE = {"input_ids": torch.tensor([[5, 6, 9]])}
POLICIES = {
    "jacobi": mmaccel.Jacobi(window=8),
    "speculative-jacobi": mmaccel.SpeculativeJacobi(window=8),
}
SCORES = {"output_scores": True, "output_logits": True}
STATES = {"output_hidden_states": True, "output_attentions": True}
EVERYTHING = ("scores", "logits", "hidden_states", "attentions")
EARLY: dict[str, Any] = {"sequence_bias": {(3,): 2.0}, "repetition_penalty": 1.3}  # ends early


def _generate(model: Any, policy: Any = None, seed: Any = None, **options: Any) -> Any:
    options = {"max_new_tokens": 14, "return_dict_in_generate": True} | options
    if policy is None:
        return model.generate(**options)
    with mmaccel.attach(model, policy, seed=seed, strict=True) as run:
        out = model.generate(**options)
    assert run.stats is not None and not run.stats.fallbacks
    return out


def assert_alike(ours: Any, plain: Any) -> None:
    """Both are equal up to rounding, tuples entry by entry."""
    if isinstance(plain, Tensor):
        assert ours.shape == plain.shape and ours.dtype == plain.dtype
        assert torch.allclose(ours, plain, rtol=0, atol=1e-5, equal_nan=True)
    elif plain is None:
        assert ours is None
    else:
        assert len(ours) == len(plain)
        for one, other in zip(ours, plain):
            assert_alike(one, other)


def compare(
    model: Any, policy: str, options: dict[str, Any], *fields: str, **more: Any
) -> tuple[Any, Any]:
    """A call under a policy and without: sequences are equal, the other fields alike."""
    plain = _generate(model, **options, **more)
    ours = _generate(model, POLICIES[policy], **options, **more)
    assert torch.equal(ours.sequences, plain.sequences)
    for field in fields:
        assert_alike(getattr(ours, field), getattr(plain, field))
    return ours, plain


def read_cache(cache: Any) -> list[Tensor]:
    """Keys and values of a cache."""
    return [states for layer in cache.layers for states in (layer.keys, layer.values)]


# a model, a batch and a policy; rows of the batch without a mask cannot be padded
ALIKE = pytest.mark.parametrize(
    ("name", "batch", "policy"),
    [
        ("llama", RAGGED, "speculative-jacobi"),
        ("gpt2", ALONE, "jacobi"),
        ("gemma3", RAGGED, "jacobi"),
    ],
)


@pytest.mark.parametrize("early", [False, True])
@ALIKE
def test_greedy_scores_and_cache(
    name: str, batch: dict[str, Any], policy: str, early: bool
) -> None:
    model = build_lm(name)
    options: dict[str, Any] = batch | SCORES | {"do_sample": False}
    options |= EARLY if early else {"eos_token_id": None}
    ours, plain = compare(model, policy, options, "scores", "logits")
    assert ours.hidden_states is None and ours.attentions is None
    assert_alike(read_cache(getattr(ours, CACHE)), read_cache(getattr(plain, CACHE)))
    if early and name == "llama":  # the padding after a row's end is tested
        ends = (plain.sequences[:, 4:] == 3).long().argmax(1)
        assert len(set(ends.tolist())) > 1


@ALIKE
def test_hidden_states_and_attentions(name: str, batch: dict[str, Any], policy: str) -> None:
    model = build_lm(name, attn_implementation="eager")
    options: dict[str, Any] = batch | STATES | SCORES | EARLY | {"do_sample": False}
    compare(model, policy, options, *EVERYTHING)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_states_without_a_cache(name: str) -> None:
    """The loop then gives out those of all tokens at every step."""
    model = build_lm(name, attn_implementation="eager")
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0]])
    mask = torch.ones_like(mask) if name == "gemma3" else mask  # holes under sliding windows
    prompt: dict[str, Any] = RAGGED | {"attention_mask": mask, "use_cache": False}
    options = prompt | STATES | SCORES | {"do_sample": False, "max_new_tokens": 5}
    ours, _ = compare(model, "jacobi", options, *EVERYTHING)
    assert getattr(ours, CACHE) is None


def test_scores_under_guidance() -> None:
    """The second logits of guidance have the model's dtype, the others are float32."""
    model = build_lm("llama").to(torch.float64)
    options: dict[str, Any] = RAGGED | SCORES | {"do_sample": False, "guidance_scale": 1.6}
    options["negative_prompt_ids"] = torch.tensor([[1], [1], [2]])
    compare(model, "jacobi", options, "scores", "logits")


def test_sampled_scores_under_guidance() -> None:
    """Those of every step are what one step of transformers gives after the same tokens."""
    model, away = build_lm("llama"), torch.tensor([[1], [1], [2]])
    options: dict[str, Any] = SCORES | {"do_sample": True, "temperature": 0.8, "top_k": 9}
    options |= {"guidance_scale": 1.6, "repetition_penalty": 1.4, "eos_token_id": None}
    given = RAGGED | options | {"negative_prompt_ids": away, "max_new_tokens": 6}
    ours = _generate(model, POLICIES["speculative-jacobi"], seed=4, **given)
    for step, scores in enumerate(ours.scores):
        ids = ours.sequences[:, : 4 + step]
        mask = torch.nn.functional.pad(RAGGED["attention_mask"], (0, step), value=1)
        negative = torch.cat([away, ids[:, 4:]], 1)
        one = {"input_ids": ids, "attention_mask": mask, "negative_prompt_ids": negative}
        plain = _generate(model, **one, **options, max_new_tokens=1)
        assert_alike(scores, plain.scores[0])
        drawn = scores.gather(1, ours.sequences[:, 4 + step, None])
        assert bool(drawn.isfinite().all()) and bool(scores.isinf().any(1).all())


def test_stopping_criteria_read_the_scores() -> None:
    """A row ends where its token was less than 0.3 likely."""
    seen: list[int] = []

    def is_unlikely(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        seen.append(len(scores))
        return scores[-1].softmax(-1).gather(1, ids[:, -1:])[:, 0] < 0.3

    model = build_lm("llama")
    options: dict[str, Any] = RAGGED | SCORES | {"do_sample": False}
    compare(model, "jacobi", options, "scores", stopping_criteria=[is_unlikely])
    n_steps = len(seen) // 2  # of the plain loop, then under the policy
    assert seen == [*range(1, n_steps + 1)] * 2 and n_steps < 14
