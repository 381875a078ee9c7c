"""`CachedBlocks` on diffusers' `LLaDA2Pipeline`: the same tokens, fewer positions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.errors import UnsupportedModelError
from tests.fixtures.llada2 import END, MASK, build_model, build_pipe

RAGGED = ["hello there", "abc", "a longer prompt than the others"]


def run(pipe: Any, seed: int = 0, **options: Any) -> Any:
    defaults = {"gen_length": 24, "block_length": 8, "num_inference_steps": 6, "temperature": 1.0}
    generator = torch.Generator().manual_seed(seed)
    return pipe(**(defaults | {"prompt": "hello world", "generator": generator} | options))


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "no editing": {"editing_threshold": None},
    "sure edits": {"editing_threshold": 0.02, "max_post_steps": 5},
    "threshold": {"threshold": 0.2, "editing_threshold": 0.4},
    "cold": {"temperature": 0.3, "top_k": 12, "top_p": 0.9},
    "aligned": {"prompt": "eight ok"},
    "one token": {"prompt": "x", "gen_length": 9},
    "long prompt": {"prompt": "a prompt that fills more than four blocks"},
    "small blocks": {"block_length": 4, "gen_length": 14},
    "ragged": {"prompt": RAGGED},
    "ragged, end": {"prompt": RAGGED, "eos_token_id": 7, "threshold": 0.1},
    "end ignored": {"prompt": RAGGED, "eos_token_id": 7, "eos_early_stop": False},
}


@pytest.mark.parametrize("reading", ["blocks", "causal"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_pipeline(case: str, reading: str) -> None:
    block = CASES[case].get("block_length", 8)
    pipe = build_pipe(reading, block)
    options = {"num_inference_steps": 6} | CASES[case]
    for seed in range(2):
        plain = run(pipe, seed, **options)
        with mmaccel.attach(pipe, "cached-blocks", strict=True) as handle:
            served = run(pipe, seed, **options)
        assert torch.equal(served.sequences, plain.sequences) and served.texts == plain.texts
        assert handle.stats.fallbacks == [] and handle.stats.exactness == "bitwise"
        assert handle.stats.reference == "the pipeline as it is, with its 2-D mask"


def test_the_seeds_and_options_make_a_difference() -> None:
    pipe = build_pipe("blocks")
    outputs = [run(pipe, seed).sequences for seed in range(3)]
    outputs += [run(pipe, 0, **CASES[case]).sequences for case in ("greedy", "cold", "sure edits")]
    assert len({tuple(made[0].tolist()) for made in outputs}) == 6


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
    # one step behind the last commit: that step saw all of it, and nothing is computed again. The
    # others stop with their last commit, and are computed once more beside the next block.
    by_hand = [24] + [8] * 5 + [8] * 8 + [16] + [8] * 7 + [16] + [8] * 7
    assert pipe.model.tokens_processed == by_hand and handle.stats.positions == sum(by_hand)
    assert handle.stats.passes == len(by_hand) == 6 + 3 * 8


def test_512_tokens_recompute_little() -> None:
    pipe = build_pipe("blocks", 32)
    options = {"gen_length": 512, "block_length": 32, "num_inference_steps": 8, "threshold": 0.9}
    options |= {"prompt": "x" * 32, "eos_early_stop": False}
    pipe.model.tokens_processed.clear()
    plain = run(pipe, **options)
    n_plain, steps = sum(pipe.model.tokens_processed), len(pipe.model.tokens_processed)
    for editing in (0.5, None):
        with mmaccel.attach(pipe, mmaccel.CachedBlocks()) as handle:
            served = run(pipe, **(options | {"editing_threshold": editing}))
        if editing:
            assert torch.equal(served.sequences, plain.sequences) and handle.stats.passes == steps
            assert handle.stats.positions < n_plain / 5
        assert handle.stats.positions <= 1.2 * 32 * handle.stats.passes


def test_a_callback_may_change_any_token() -> None:
    pipe = build_pipe("blocks")
    seen: list[Any] = []
    for where in (2, 9, 14, -1):

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
        plain, told = run(pipe, **options), list(seen)
        seen.clear()
        with mmaccel.attach(pipe, "cached-blocks", strict=True):
            served = run(pipe, **options)
        assert torch.equal(served.sequences, plain.sequences) and seen == told


def test_a_model_that_sees_everything_runs_without_a_cache() -> None:
    pipe = build_pipe("full")
    plain = run(pipe, prompt=RAGGED)
    with mmaccel.attach(pipe, "cached-blocks") as handle:
        with pytest.warns(UserWarning, match="change with later ones under the 2-D mask"):
            served = run(pipe, prompt=RAGGED)
        assert torch.equal(served.sequences, plain.sequences)
        assert "change with later ones" in handle.stats.fallbacks[0]
    with mmaccel.attach(pipe, "cached-blocks", strict=True):
        with pytest.raises(UnsupportedModelError, match="change with later ones"):
            run(pipe)


def test_masks_that_hide_something_are_checked_apart() -> None:
    pipe = build_pipe("fickle")
    with mmaccel.attach(pipe, "cached-blocks") as handle:
        for options in ({"prompt": RAGGED}, {"prompt": "hello", "gen_length": 21}):
            plain = run(build_pipe("fickle"), **options)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert torch.equal(run(pipe, **options).sequences, plain.sequences)
    assert [bool(stats.fallbacks) for stats in handle.history] == [False, True]


def test_blocks_of_another_length_than_the_models_are_found_out() -> None:
    pipe = build_pipe("blocks", 12)
    with mmaccel.attach(pipe, "cached-blocks", strict=True):
        with pytest.raises(UnsupportedModelError, match="passes over cached blocks of 8 do not"):
            run(pipe, block_length=8)
        run(pipe, block_length=12)


@pytest.mark.parametrize("reading", ["full", "refused", "causal"])
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


def test_the_bed_is_block_causal_and_its_weights_matter() -> None:
    model = build_model("full")
    ids = torch.arange(16)[None] % 9 + 4
    every = torch.ones_like(ids)
    places = torch.arange(16)[None]
    own = model(ids, attention_mask=every, position_ids=places).logits
    other = ids.clone()
    other[:, 12] = END if ids[0, 12] != END else MASK
    moved = model(other, attention_mask=every, position_ids=places).logits
    assert (own[:, :8] - moved[:, :8]).abs().max() > 1e-3
