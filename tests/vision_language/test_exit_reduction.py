"""Fewer visual tokens in front of the first layer: which columns go, and what the rest computes.

The reference is the whole prompt under a mask that hides the dropped tokens, at the positions that
all tokens had. It is run by the model itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import OptionError, RandomTokens, UniformTokens, UnsupportedModelError
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_vlms import IMAGE, build_vlm, draw_prompts, encodes_first

pytestmark = pytest.mark.skipif(
    not encodes_first(),
    reason="this transformers encodes images in its first pass",
)

N_NEW = 10
GREEDY = dict(max_new_tokens=N_NEW, do_sample=False)


def answer(model: Any, method: Any, inputs: Any, policy: Any = None, seed: Any = 5) -> Any:
    policy = policy or mmaccel.Autoregressive()
    with mmaccel.attach(model, policy, strict=True, seed=seed, visual_tokens=method) as run:
        made = model.generate(**inputs, **GREEDY)
    return made, run.stats


def test_keeping_all_changes_nothing(named: tuple[str, Any]) -> None:
    name, model = named
    inputs = draw_prompts(name, model)
    own = model.generate(**inputs, **GREEDY)
    for method in (RandomTokens(keep=1.0), UniformTokens(keep=1), RandomTokens(n_keep=10_000)):
        made, stats = answer(model, method, inputs)
        assert torch.equal(made, own)
    assert stats.exactness == "bitwise"


@torch.no_grad()
def test_the_rest_computes_what_a_mask_over_the_whole_prompt_computes(
    named: tuple[str, Any], stays: list[Tensor]
) -> None:
    name, model = named
    if name == "gemma3":  # a sliding window counts the columns that there are
        model = build_vlm(name, window=512)
    inputs = draw_prompts(name, model)
    made, stats = answer(model, RandomTokens(keep=0.5), inputs)
    (kept,) = stays
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    is_text = (ids != IMAGE) & mask.bool()
    assert bool((kept | ~is_text).all()) and stats.exactness == "relaxed"
    before = int((ids == IMAGE).sum())
    after = int((kept & (ids == IMAGE)).sum())
    assert f"{after} of {before} visual tokens" in stats.reference and after < 0.7 * before
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    if name.startswith("qwen"):
        grids = {k: inputs[k] for k in ("image_grid_thw", "mm_token_type_ids")}
        positions, _ = model.base_model.get_rope_index(ids, attention_mask=mask, **grids)
    reference = model.generate(
        **inputs | {"attention_mask": kept.long(), "position_ids": positions}, **GREEDY
    )
    assert torch.equal(made, reference)


def test_policies_make_the_plain_loops_tokens_on_what_is_kept(named: tuple[str, Any]) -> None:
    name, model = named
    inputs, method = draw_prompts(name, model), RandomTokens(keep=0.4)
    plain, _ = answer(model, method, inputs)
    for policy in (mmaccel.Jacobi(5), mmaccel.Speculative()):
        assert torch.equal(answer(model, method, inputs, policy)[0], plain)


def test_rows_are_reduced_alone(named: tuple[str, Any]) -> None:
    name, model = named
    together = draw_prompts(name, model, (2, 0, 1))
    made, _ = answer(model, RandomTokens(keep=0.4), together, seed=[7, 8, 9])
    alone, _ = answer(model, RandomTokens(keep=0.4), draw_prompts(name, model, (2,)), seed=[7])
    assert torch.equal(alone[0, -N_NEW:], made[0, -N_NEW:])


def test_a_shorter_prompt_is_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass has the kept columns alone."""
    model = build_vlm("llava_next")
    inputs, widths = draw_prompts("llava_next", model, (1, 1)), []
    prefill = model._prefill

    def count(ids: Tensor, *args: Any, **options: Any) -> Any:
        widths.append(ids.shape[1])
        return prefill(ids, *args, **options)

    monkeypatch.setattr(model, "_prefill", count)
    answer(model, UniformTokens(keep=0.25), inputs)
    counts = (inputs["input_ids"] == IMAGE).sum(1)
    n_text = inputs["attention_mask"].sum(1) - counts
    assert widths[0] <= int((n_text + 0.25 * counts).max()) + 1


def test_no_image_runs_plain() -> None:
    model = build_vlm("llava")
    inputs = {"input_ids": torch.randint(5, 30, (2, 6))}
    made, stats = answer(model, RandomTokens(keep=0.5), inputs)
    assert torch.equal(made, model.generate(**inputs, **GREEDY))
    assert stats.exactness == "bitwise" and stats.reference == ""
    assert stats.notes == ["visual_tokens: no image in the prompt, nothing to drop"]


def test_a_prompt_that_was_shortened_already_is_refused() -> None:
    """Fewer placeholders than features, as a processor that drops some would leave."""
    model = build_vlm("llava")
    inputs = draw_prompts("llava", model, (1,))
    for name in ("input_ids", "attention_mask"):
        at = int((inputs["input_ids"][0] == IMAGE).nonzero()[0])
        inputs |= {f"new_{name}": torch.cat([inputs[name][:, :at], inputs[name][:, at + 3 :]], 1)}
    inputs |= {name: inputs.pop(f"new_{name}") for name in ("input_ids", "attention_mask")}
    with pytest.raises(UnsupportedModelError, match="a placeholder for each of the 16 image feat"):
        answer(model, RandomTokens(keep=0.5), inputs)


def test_bad_requests_are_refused() -> None:
    model = build_vlm("llava")
    for bad in ("nowhere", RandomTokens, [], [RandomTokens(keep=0.5), UniformTokens(keep=0.5)]):
        with pytest.raises(OptionError, match="visual_tokens: expected"):
            mmaccel.attach(model, mmaccel.Jacobi(4), visual_tokens=bad)
    with pytest.raises(UnsupportedModelError, match="visual_tokens: expected a vision-language"):
        mmaccel.attach(build_lm("llama"), mmaccel.Jacobi(4), visual_tokens=RandomTokens(keep=0.5))


def test_a_cache_that_the_caller_sees_is_no_reduced_one() -> None:
    model = build_vlm("llava")
    inputs = draw_prompts("llava", model, (1,))
    options: dict[str, Any] = GREEDY | {"return_dict_in_generate": True}
    with pytest.warns(UserWarning, match="a cache that the caller sees"):
        with mmaccel.attach(model, mmaccel.Jacobi(4), visual_tokens=RandomTokens(keep=0.5)) as run:
            model.generate(**inputs, **options)
    assert run.stats.fallbacks


def test_methods_by_name_and_by_dictionary() -> None:
    model, policy = build_vlm("llava"), mmaccel.Autoregressive()
    inputs = draw_prompts("llava", model)
    for given, method in (
        ("divprune", mmaccel.DivPrune(keep=0.22)),
        ({"name": "divprune", "keep": 0.5}, mmaccel.DivPrune(keep=0.5)),
        (["divprune", {"name": "dart", "n_keep": 3}],
         [mmaccel.DivPrune(keep=0.22), mmaccel.DART(n_keep=3)]),
    ):  # fmt: skip
        (made, stats), (wanted, other) = (answer(model, m, inputs) for m in (given, method))
        assert torch.equal(made, wanted) and stats.reference == other.reference
    for bad, said in (
        ("dartt", "did you mean dart"),
        ({"keep": 0.5}, "a dictionary with a name"),
        ({"name": "dart", "kepp": 0.5}, "'kepp'"),
        (0.5, "a method such as"),
    ):
        with pytest.raises(OptionError, match=f"visual_tokens.*{said}"):
            mmaccel.attach(model, policy, visual_tokens=bad)  # type: ignore[arg-type]
