"""Canvas policies on a `LLaDA2Pipeline`: our decoder over the pipeline's model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.diffusion_lm.llada2.service import read_params
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.llada2 import MASK, build_pipe
from tests.fixtures.tiny_lms import falls_back

RAGGED = ["hello there", "abc", "a longer prompt than the others"]
OPTIONS: dict[str, Any] = {"gen_length": 20, "eos_early_stop": False, "temperature": 1.0}


def block_mask(length: int, block: int) -> Tensor:
    """The mask of the model's own generate, `[1, 1, L, L]`."""
    index = torch.arange(length) // block
    return (index <= index[:, None]).double()[None, None]


def plain_loop(model: Any, prompt: list[int], length: int, block: int) -> list[int]:
    """Greedy, one token a pass, the most confident first; over all columns, without a cache."""
    tokens = torch.tensor([prompt + [MASK] * length])
    for first in range(len(prompt) // block * block, tokens.shape[1], block):
        last = min(first + block, tokens.shape[1])
        while bool((tokens[:, first:last] == MASK).any()):
            logits = model(
                tokens[:, :last],
                attention_mask=block_mask(last, block),
                position_ids=torch.arange(last)[None],
            ).logits[0]
            logits[:, MASK] = float("-inf")
            peak = logits.softmax(-1).amax(-1)
            peak = torch.where(
                (tokens[0, :last] == MASK) & (torch.arange(last) >= first), peak, -1.0
            )
            slot = int(peak.argmax())
            tokens[0, slot] = logits[slot].argmax()
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("reading", ["full", "refused", "blocks"])
def test_greedy_tokens_are_those_of_a_plain_loop(reading: str) -> None:
    pipe = build_pipe(reading)
    for text in ("hello world, hello", "eight ok"):
        with mmaccel.attach(pipe, Stepwise(cache="block"), strict=True) as handle:
            made = pipe(**(OPTIONS | {"temperature": 0.0, "prompt": text})).sequences
        ids = pipe.tokenizer(text)["input_ids"][0].tolist()
        assert made[0].tolist() == plain_loop(pipe.model, ids, 20, 8)
        assert handle.stats.fallbacks == [] and handle.stats.passes == 20
        assert "4-D block mask" in handle.stats.reference


def test_positions_of_a_blockwise_run_are_counted_by_hand() -> None:
    pipe = build_pipe("refused")
    with mmaccel.attach(pipe, Stepwise(cache="block"), strict=True) as handle:
        pipe(**(OPTIONS | {"prompt": "x" * 12, "gen_length": 20}))
        pipe.model.tokens_processed.clear()
        pipe(**(OPTIONS | {"prompt": "x" * 12, "gen_length": 20}))
    by_hand = [16] + [8] * 3 + [16] + [8] * 7 + [16] + [8] * 7
    assert pipe.model.tokens_processed == by_hand and handle.stats.positions == sum(by_hand)


def test_rows_end_at_the_end_token() -> None:
    pipe = build_pipe("refused")
    with mmaccel.attach(pipe, Stepwise(cache="block"), seed=0, strict=True) as handle:
        free = pipe(**OPTIONS, prompt=RAGGED).sequences
        end = int(free[1, 6])
        out = pipe(**(OPTIONS | {"eos_early_stop": True}), eos_token_id=end, prompt=RAGGED)
    for row, tokens, text in zip(free.tolist(), out.sequences.tolist(), out.texts):
        n = row.index(end) + 1 if end in row else 20
        assert tokens == row[:n] + [MASK] * (20 - n) and len(text.split()) == n
    assert handle.stats.tokens == int((out.sequences != MASK).sum())


def test_callbacks_see_the_canvas_and_cannot_write_to_it() -> None:
    pipe = build_pipe("refused")
    seen: list[Tensor] = []

    def watch(pipe: Any, step: int, inner: int, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(tensors["block_x"].clone())
        assert step == inner == len(seen) - 1
        return tensors

    with mmaccel.attach(pipe, Stepwise(cache="block"), strict=True):
        out = pipe(**OPTIONS, prompt="hello", callback_on_step_end=watch)
        left = [int((tokens == MASK).sum()) for tokens in seen]
        assert left == list(range(19, -1, -1)) and torch.equal(seen[-1][:, 5:], out.sequences)
        with pytest.raises(OptionError, match="as it was given"):
            pipe(
                **OPTIONS,
                prompt="hello",
                callback_on_step_end=lambda *given: {"block_x": given[3]["block_x"] + 1},
            )

        def write(pipe: Any, step: int, inner: int, tensors: dict[str, Any]) -> dict[str, Any]:
            tensors["block_x"][:, -1] = 7
            return {}

        def interrupt(pipe: Any, step: int, inner: int, tensors: Any) -> None:
            pipe._interrupt = True

        with pytest.raises(OptionError, match="block_x as it was given"):
            pipe(**OPTIONS, prompt="hello", callback_on_step_end=write)
        with pytest.raises(OptionError, match="_interrupt: expected False, .* does not read it"):
            pipe(**OPTIONS, prompt="hello", callback_on_step_end=interrupt)
        del pipe._interrupt
        names = ["block_x", "sampled_probs"]
        options: dict[str, Any] = {"callback_on_step_end_tensor_inputs": names}
        seen.clear()
        with pytest.raises(UnsupportedModelError, match="asks for sampled_probs"):
            pipe(**OPTIONS, prompt="hello", callback_on_step_end=watch, **options)


def test_a_layout_holds_slots() -> None:
    pipe = build_pipe("refused")
    layout = mmaccel.Grid(4, 4, vocab_size=41, row_end=9)
    with mmaccel.attach(pipe, mmaccel.ConfidentParallel(0.2), layout=layout, strict=True):
        made = pipe(**OPTIONS, prompt=["ab", "abc"]).sequences
    assert bool((made[:, 4::5] == 9).all())


def test_a_model_that_follows_no_block_mask_runs_as_it_is() -> None:
    """It takes a 4-D mask and a cache, and is causal under every mask."""
    pipe = build_pipe("causal")
    own = type(pipe.model).forward

    def ignore(model: Any, input_ids: Tensor, attention_mask: Tensor, **others: Any) -> Any:
        if attention_mask.ndim == 4:
            attention_mask = input_ids.new_ones(input_ids.shape[0], attention_mask.shape[-1])
        return own(model, input_ids, attention_mask, **others)

    type(pipe.model).forward = ignore  # a class of this pipeline's own
    plain = pipe(**OPTIONS, prompt="hello", generator=torch.Generator().manual_seed(1))
    reason = "does not follow a 4-D mask of blocks of 8.* depend on no later position"
    with falls_back(pipe, reason, Stepwise()):
        made = pipe(**OPTIONS, prompt="hello", generator=torch.Generator().manual_seed(1))
    assert torch.equal(made.sequences, plain.sequences)


USUAL = {"temperature": 0.7, "top_k": None, "top_p": None, "sampling_method": "multinomial"}


@pytest.mark.parametrize(
    "given, params",
    [
        ({}, SamplingParams(temperature=0.7)),
        ({"top_k": 1, "top_p": 0.1}, SamplingParams(temperature=0.7, top_k=1, top_p=0.1)),
        ({"top_k": -1, "top_p": 2.0}, SamplingParams(temperature=0.7)),  # both off
        ({"sampling_method": "greedy", "top_k": 5}, SamplingParams(temperature=0.0, top_k=5)),
    ],
)
def test_sampling_arguments_are_read_as_in_the_pipeline(
    given: dict[str, Any], params: SamplingParams
) -> None:
    assert read_params({**USUAL, **given}) == params
