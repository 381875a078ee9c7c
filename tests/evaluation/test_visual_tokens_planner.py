"""Whether fewer visual tokens pay: arithmetic on injected costs, and a run on a tiny model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import mmaccel
from mmaccel.errors import OptionError
from mmaccel.evaluation import planner
from mmaccel.evaluation.planner import PromptCosts, VisualTokenPlan
from tests.fixtures.tiny_vlms import IMAGE, build_vlm, draw_prompts, encodes_first

WHOLE = PromptCosts(1.0, 4.0, 0.1, 0.0, 1000.0)
LESS = PromptCosts(1.0, 1.5, 0.08, 0.5, 220.0)


def plan_of(whole: PromptCosts = WHOLE, less: PromptCosts = LESS, **more: Any) -> VisualTokenPlan:
    options: dict[str, Any] = dict(max_new_tokens=11, concurrency=1, text_tokens=20)
    method = mmaccel.DART(keep=0.22)
    return VisualTokenPlan(method, whole, less, **options | more, device="cpu")


def test_expected_seconds() -> None:
    plan = plan_of()
    assert plan.seconds_without == pytest.approx(1 + 4 + 10 * 0.1)
    assert plan.seconds_with == pytest.approx(1 + 1.5 + 10 * 0.08)
    assert plan.speed_up == pytest.approx(6 / 3.3) and plan.worth_it
    assert plan.longest_answer is None  # steps are faster too
    assert plan.shares == pytest.approx({"encoder": 1 / 6, "prefill": 4 / 6, "steps": 1 / 6})
    assert "1.82 times as fast" in str(plan) and "worth it: True" in str(plan)
    one = plan_of(max_new_tokens=1)
    assert (one.seconds_without, one.seconds_with) == (5.0, 2.5)


@pytest.mark.parametrize("step", [0.0999, 0.101, 0.2])
def test_the_longest_answer_that_pays(step: float) -> None:
    plan = plan_of(less=replace(LESS, step=step))
    longest = plan.longest_answer
    assert longest is not None
    assert replace(plan, max_new_tokens=longest).worth_it
    assert not replace(plan, max_new_tokens=longest + 1).worth_it
    assert plan_of(less=replace(LESS, prefill=4.0, step=step)).longest_answer == 0


def test_how_rounds_differ() -> None:
    wild = plan_of(rounds=((WHOLE, LESS), (LESS, WHOLE)))
    assert wild.spread == pytest.approx((3.3 / 6, 6 / 3.3)) and "0.55 to 1.82" in str(wild)


needs_encoding = pytest.mark.skipif(
    not encodes_first(), reason="this transformers encodes images in its first pass"
)


@needs_encoding
def test_a_run_is_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_vlm("llava_next")
    inputs = draw_prompts("llava_next", model, (1,))
    n_visual = int((inputs["input_ids"] == IMAGE).sum())
    first = model.generate(**inputs, max_new_tokens=1, do_sample=False)[0, -1]
    model.generation_config.eos_token_id = int(first)  # an answer would end at once
    calls, generate = [], type(model).generate

    def count(self: Any, *args: Any, **given: Any) -> Any:
        made = generate(self, *args, **given)
        calls.append((len(made), made.shape[1] - given["input_ids"].shape[1]))
        return made

    monkeypatch.setattr(type(model), "generate", count)
    method = mmaccel.FastV(keep=0.25, layer=1)
    plan = mmaccel.plan_visual_tokens(
        model, inputs, method=method, concurrency=3, max_new_tokens=40, repeats=2
    )
    assert calls == [(3, 9)] * 6  # eight steps, whatever the answer; the first two warm up
    assert plan.method is method and "plan" not in vars(method) and len(plan.rounds) == 2
    assert plan.whole.visual_tokens == n_visual and plan.whole.selection == 0
    kept = -(-n_visual // 4)
    assert plan.reduced.visual_tokens == pytest.approx((n_visual + 2 * kept) / 3, abs=0.5)
    assert 0 < plan.reduced.selection < plan.reduced.prefill
    assert plan.text_tokens == inputs["input_ids"].shape[1] - n_visual
    assert (plan.concurrency, plan.max_new_tokens) == (3, 40)
    for side, k in ((plan.whole, 0), (plan.reduced, 1)):
        for name in ("encoder", "prefill", "step"):
            a, b = (getattr(pair[k], name) for pair in plan.rounds)
            assert getattr(side, name) == pytest.approx((a + b) / 2) and min(a, b) > 0
    default = mmaccel.plan_visual_tokens(model, inputs, 0.5, repeats=1)
    assert default.method == mmaccel.DivPrune(keep=0.5) and default.concurrency == 1


@needs_encoding
def test_plans_of_later_steps_are_no_part_of_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Methods that revive tokens plan at every step."""
    model = build_vlm("llava_next")
    inputs = draw_prompts("llava_next", model, (1,))
    clock = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    found = planner.measure_costs(model, inputs, mmaccel.LazyLLM(keep=0.5))
    once = planner.measure_costs(model, inputs, mmaccel.PyramidDrop(keep=0.5))
    assert found.selection == once.selection > 0  # as many plans of the prompt's pass


@needs_encoding
def test_wrong_input_is_refused() -> None:
    model = build_vlm("llava_next")
    inputs = draw_prompts("llava_next", model, (1,))
    for wrong in ({"keep": 0}, {"method": "nowhere"}, {"concurrency": 0}):
        with pytest.raises(OptionError):
            mmaccel.plan_visual_tokens(model, inputs, **wrong)
    text = {name: inputs[name][:, :3] for name in ("input_ids", "attention_mask")}
    with pytest.raises(OptionError, match="with an image"):
        mmaccel.plan_visual_tokens(model, text)
