"""Policies on diffusers' `LLaDA2Pipeline`: `CachedBlocks`, and what all policies have in common."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.errors import BusyError, NumericsError, OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.diffusion_lm import amused
from mmaccel.pipelines.hosts.diffusion_lm.diffusion_gemma import pipeline as gemma
from mmaccel.pipelines.hosts.diffusion_lm.llada2 import service
from mmaccel.policies import CanvasInterrupt
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures.llada2 import MASK, build_pipe

RAGGED = ["hello there", "abc", "a longer prompt than the others"]


def run(pipe: Any, seed: int = 0, **options: Any) -> Any:
    defaults = {"gen_length": 24, "block_length": 8, "num_inference_steps": 6, "temperature": 1.0}
    generator = torch.Generator().manual_seed(seed)
    return pipe(**(defaults | {"prompt": "hello world", "generator": generator} | options))


CASES: dict[str, tuple[str, dict[str, Any]]] = {  # how the model reads masks, and the call
    "no editing": ("causal", {"editing_threshold": None, "prompt": "eight ok"}),
    "many edits": (
        "blocks", {"editing_threshold": 0.02, "max_post_steps": 5, "temperature": 0.0},
    ),
    "small blocks": ("blocks", {"block_length": 4, "gen_length": 14, "temperature": 0.3}),
    "ragged, end": ("causal", {"prompt": RAGGED, "eos_token_id": 7, "threshold": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize(("reading", "options"), CASES.values(), ids=CASES)
def test_tokens_are_those_of_the_pipeline(reading: str, options: dict[str, Any]) -> None:
    pipe = build_pipe(reading, options.get("block_length", 8))
    plain = run(pipe, **options)
    with mmaccel.attach(pipe, "cached-blocks", strict=True) as handle:
        served = run(pipe, **options)
    assert torch.equal(served.sequences, plain.sequences) and served.texts == plain.texts
    assert handle.stats.fallbacks == [] and handle.stats.exactness == "bitwise"
    assert handle.stats.reference == "the pipeline as it is, with its 2-D mask"


def test_positions_are_counted_by_hand() -> None:
    """A step a token and no editing."""
    pipe = build_pipe("blocks")
    options = {"prompt": "x" * 19, "gen_length": 29, "num_inference_steps": 8, "threshold": 2.0}
    options |= {"editing_threshold": None, "temperature": 0.0, "eos_early_stop": False}
    with mmaccel.attach(pipe, mmaccel.CachedBlocks()) as handle:
        run(pipe, **options)
        pipe.model.tokens_processed.clear()
        run(pipe, **options)
    # 19 + 29 columns are 6 blocks, 2 of them prompt. The third has 5 slots and 8 steps, and stops
    # one step after its last commit: that step computed its final tokens, and nothing is computed
    # again. The others stop with their last commit, and are computed once more with the next block.
    by_hand = [24] + [8] * 5 + [8] * 8 + [16] + [8] * 7 + [16] + [8] * 7
    assert pipe.model.tokens_processed == by_hand and handle.stats.positions == sum(by_hand)
    assert handle.stats.passes == len(by_hand) == 6 + 3 * 8


@pytest.mark.slow
def test_a_callback_may_change_any_token() -> None:
    pipe = build_pipe("blocks")
    seen: list[Any] = []
    for where in (2, 14):  # in a finished block, and in one to come

        def change(pipe: Any, step: int, inner: int, tensors: Any, where: int = where) -> Any:
            seen.append((step, inner, sorted(tensors)))
            block_x = tensors["block_x"].clone()
            if step == 7:
                block_x[:, where] = 11
            return {"block_x": block_x}

        names = ["block_x", "sampled_probs", "transfer_index", "active_block"]
        options = {"callback_on_step_end": change, "callback_on_step_end_tensor_inputs": names}
        options |= {"prompt": "twelve chars"}
        seen.clear()
        plain, calls = run(pipe, **options), list(seen)
        seen.clear()
        with mmaccel.attach(pipe, "cached-blocks", strict=True):
            served = run(pipe, **options)
        assert torch.equal(served.sequences, plain.sequences) and seen == calls


def test_masks_that_hide_something_are_checked_separately() -> None:
    pipe = build_pipe("fickle")
    with mmaccel.attach(pipe, "cached-blocks") as handle:
        for options in ({"prompt": RAGGED}, {"prompt": "hello", "gen_length": 21}):
            plain = run(build_pipe("fickle"), **options)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert torch.equal(run(pipe, **options).sequences, plain.sequences)
    assert [bool(stats.fallbacks) for stats in handle.history] == [False, True]


@pytest.mark.parametrize("reading", ["full", "refused"])
def test_the_models_own_mask_can_be_asked_for(reading: str) -> None:
    """Exact with respect to the pipeline over a model that makes a block mask of the 2-D one."""
    reference = run(build_pipe("blocks"), prompt=RAGGED)
    pipe = build_pipe(reading)
    with mmaccel.attach(pipe, mmaccel.CachedBlocks(mask="blocks"), strict=True) as handle:
        served = run(pipe, prompt=RAGGED)
    assert torch.equal(served.sequences, reference.sequences)
    assert "4-D block mask" in handle.stats.reference and "reference" in str(handle.stats)
    if reading == "refused":
        with mmaccel.attach(pipe, "cached-blocks"):
            with pytest.raises(UnsupportedModelError, match=r"CachedBlocks\(mask='blocks'\)"):
                run(pipe)


def test_a_plain_transformers_model_is_served_under_its_causal_mask() -> None:
    from transformers import LlamaForCausalLM

    pipe = build_pipe("causal")
    plain_class = LlamaForCausalLM(pipe.model.config).double().eval()
    plain_class.load_state_dict(pipe.model.state_dict())
    pipe.register_modules(model=plain_class)
    plain = run(pipe)
    with mmaccel.attach(pipe, "cached-blocks", strict=True) as handle:
        assert torch.equal(run(pipe).sequences, plain.sequences)
    assert handle.stats.positions < 24 * handle.stats.passes


OPTIONS: dict[str, Any] = {"prompt": "hello", "gen_length": 16}
POLICIES = ["cached-blocks", Stepwise(cache="block")]


def test_calls_of_the_model_outside_the_pipelines_calls_are_its_own() -> None:
    pipe = build_pipe("full")
    ids = torch.arange(12)[None] % 5 + 4
    inputs = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(12)[None]}
    own = pipe.model(ids, **inputs).logits
    with mmaccel.attach(pipe, mmaccel.CachedBlocks("blocks")) as handle:
        assert torch.equal(pipe.model(ids, **inputs).logits, own)
        pipe(**OPTIONS)
        assert torch.equal(pipe.model(ids, **inputs).logits, own)
    assert len(handle.history) == 1


@pytest.mark.slow
def test_output_types_are_those_of_the_pipeline() -> None:
    pipe = build_pipe("blocks")
    for policy in POLICIES:
        for options in ({"output_type": "seq"}, {"return_dict": False}, {"prompt": ["ab", "abc"]}):
            plain = pipe(**(OPTIONS | options))
            with mmaccel.attach(pipe, policy):
                served = pipe(**(OPTIONS | options))
            assert type(served) is type(plain) and len(served) == len(plain)
            assert served[0].shape == plain[0].shape and served[0].dtype == plain[0].dtype
            texts = [out[1] if isinstance(out, tuple) else out.texts for out in (plain, served)]
            assert type(texts[0]) is type(texts[1])


@pytest.mark.parametrize("policy", POLICIES)
def test_an_interrupt_has_the_canvas(policy: Any) -> None:
    pipe = build_pipe("blocks")
    seen: list[torch.Tensor] = []

    def stop(pipe: Any, step: int, inner: int, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(tensors["block_x"].clone())
        if step == 5:
            raise KeyboardInterrupt
        return {}

    with mmaccel.attach(pipe, policy), pytest.raises(CanvasInterrupt) as stopped:
        pipe(**OPTIONS, callback_on_step_end=stop)
    shown = seen[-1][:, 5:21]
    tokens, is_committed = stopped.value.generation.tokens, stopped.value.is_committed
    assert tokens.shape == is_committed.shape == (1, 16) and 0 < is_committed.sum() < 16
    assert torch.equal(
        tokens[:, : shown.shape[1]][is_committed[:, : shown.shape[1]]],
        shown[is_committed[:, : shown.shape[1]]],
    )
    assert int(is_committed.sum()) == int((shown != MASK).sum())


@pytest.mark.parametrize("policy", POLICIES)
def test_bad_input_and_nested_calls_are_refused(policy: Any) -> None:
    pipe = build_pipe("blocks")
    ids = torch.tensor([[5, 6, 7], [5, MASK, 7]])
    with mmaccel.attach(pipe, policy) as handle:
        with pytest.raises(ValueError, match="gen_length` must be > 0"):
            pipe(**(OPTIONS | {"gen_length": 0}))
        with pytest.raises(ValueError, match="block_length` must be > 0"):
            pipe(**OPTIONS, block_length=0)
        with pytest.raises(OptionError, match="no mask token, received id 40 in row 1"):
            pipe(**(OPTIONS | {"prompt": None, "input_ids": ids}))
        with pytest.raises(TypeError, match="unexpected keyword"):
            pipe(**OPTIONS, guidance_scale=2.0)
        with pytest.raises(BusyError, match="one call at a time"):
            pipe(**OPTIONS, callback_on_step_end=lambda *_: pipe(**OPTIONS))
        with torch.no_grad():
            pipe.model.lm_head.weight[4] = float("nan")
        with pytest.raises(NumericsError):
            pipe(**OPTIONS)
    assert handle.history == []


TABLES = {
    "AmusedPipeline": amused.ARGUMENTS,
    "LLaDA2Pipeline": service.ARGUMENTS,
    "DiffusionGemmaPipeline": gemma.ARGUMENTS,
}


def test_every_argument_of_a_pipeline_is_accounted_for() -> None:
    import diffusers

    for name, table in TABLES.items():
        taken = set(inspect.signature(getattr(diffusers, name).__call__).parameters) - {"self"}
        assert taken == set(table)


def test_arguments_of_the_scheduler_are_refused() -> None:
    """Under policies of canvases; the pipeline's own loop reads them, as without a policy."""
    refused = {name: row for name, row in service.ARGUMENTS.items() if row.use == "refuse"}
    pipe = build_pipe("refused")
    with mmaccel.attach(pipe, "stepwise") as handle:
        for name in refused:
            with pytest.raises(OptionError, match=f"^{name}: .*Stepwise"):
                pipe(**OPTIONS, **{name: 2})
        assert handle.history == []
        pipe(**OPTIONS, **{name: row.neutral for name, row in refused.items()})
