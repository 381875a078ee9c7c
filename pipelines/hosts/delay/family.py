"""The family of decoders of several codebooks a step: windows over the codes of a pattern."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.contracts import Layout, Prompt
from mmaccel.pipelines.hosts.causal_lm.compatibility import ModelFacts
from mmaccel.pipelines.hosts.causal_lm.own_passes import OwnPasses
from mmaccel.pipelines.hosts.delay.window import (
    Cells,
    DelayWindow,
    StepDecoder,
    arrange,
    list_cells,
)
from mmaccel.pipelines.hosts.generate_call import GenerateCall, Task, find_in_call
from mmaccel.pipelines.hosts.logits.processor_chain import LogitsChain, take_warpers
from mmaccel.pipelines.hosts.transformers_release import CACHE
from mmaccel.results import Generation
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.frames import CodeFrames

OTHER_PATTERNS = "rows with different patterns"
NEVER = 2**31  # a step that no sound reaches
_ATTENTIONS = ("eager", "sdpa")  # that take masks of numbers


class CodeDecoder(OwnPasses):
    """A kind of model whose `generate` makes K codes a step, in K rows of `_sample` each."""

    name: ClassVar[str] = "delay"
    decoder_config: ClassVar[attrgetter[Any]]  # of the part of a model that makes codes
    n_books: ClassVar[attrgetter[int]]  # K of a model
    vocab_size: ClassVar[attrgetter[int]]  # V of a model

    @abstractmethod
    def example(self, model: Any) -> tuple[StepDecoder, Tensor, Tensor]:
        """A decoder of steps, codes `[R, S, K]`, and the model's own logits `[R, S, K, V]`."""

    def facts(self, model: Any) -> ModelFacts:
        config = self.decoder_config(model)
        rope = vars(config).get("rope_parameters") or {}
        attention = config._attn_implementation
        if rope.get("rope_type") in ("dynamic", "longrope"):
            rotation = rope["rope_type"]
            self.refuse(model, f"one whose rotations change with the length ({rotation})")
        if attention not in _ATTENTIONS:
            self.refuse(model, f"one with {attention}; load it with attn_implementation='sdpa'")
        return ModelFacts(config, (None,) * config.num_hidden_layers, self.vocab_size(model))

    def compared(self, model: Any) -> tuple[Tensor, Tensor]:
        """Passes over steps, some of which were wrong before."""
        steps, codes, expected = self.example(model)
        rows, n_steps, _ = codes.shape
        steps.reserve(rows, n_steps)
        at = torch.arange(n_steps, device=codes.device).expand(rows, -1)
        steps.forward(codes.roll(1, 2)[:, :3], at[:, :3])
        begin = steps.forward(codes[:, :2], at[:, :2])
        rest = steps.forward(codes[:, 2:], at[:, 2:])
        received = torch.cat([begin, rest], 1)
        return expected.flatten(1, 2).float(), received.flatten(1, 2).float()

    def layout(self, model: Any) -> Layout:
        return CodeFrames(self.n_books(model))

    def wrap(self, model: Any) -> Any:
        steps, codes, _ = self.example(model)
        cells = Cells(torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        return DelayWindow(model, steps, cells, codes)

    def sample_loop(self, call: GenerateCall) -> Task | None:
        reasons = [*find_in_call(call), *self._find_in_call(call)]
        return Task(reasons) if reasons else self.read(call)

    @abstractmethod
    def read(self, call: GenerateCall) -> Task:
        """The task of a call whose arguments can be served, or why it cannot be."""

    def pattern(self, call: GenerateCall, mask: Tensor, empty: int) -> tuple[Tensor, Cells | None]:
        """Given codes of all cells `[B, S, K]`, and the free cells; None if patterns differ."""
        assert call.length is not None
        prompt = call.ids.unflatten(0, (-1, self.n_books(call.model))).mT  # [B, T, K]
        n_prompt = prompt.shape[1]
        prompt = pad(prompt, (0, 0, 0, call.length), value=empty)  # [B, S, K]
        # [B, S', K], codes of the pattern; `empty` in cells that it does not give
        mask = mask[:, : prompt.shape[1]]
        mask = pad(mask, (0, 0, 0, prompt.shape[1] - mask.shape[1]), value=empty)
        free = mask == empty
        given = torch.where(free, prompt, mask)
        free[:, :n_prompt] = False
        is_one_pattern = torch.equal(free, free[:1].expand_as(free))
        return given, list_cells(free[0]) if is_one_pattern else None

    def _find_in_call(self, call: GenerateCall) -> Iterator[str]:
        if call.has_callers_cache or CACHE in call.given["refuse"]:
            yield "a cache given by the caller"
        yield from (f"output_{name}" for name in sorted(call.records))
        if call.needs_streamer:
            yield "a streamer or a stopping criterion that reads rows of single codebooks"


def find_unflat(kinds: list[tuple[Any, str]]) -> Iterator[str]:
    """Reasons against processors that read more than the scores of one code."""
    for processor, kind in kinds:
        if kind in ("window", "prefix"):
            yield f"a {type(processor).__name__}, which reads the codes of a book before a step"
        elif kind != "flat":
            yield kind


def read_warpers(
    call: GenerateCall, kinds: list[tuple[Any, str]]
) -> tuple[LogitsChain | None, dict[str, Any]]:
    """Flat processors of a call as a logits chain and as settings."""
    samples = call.config.do_sample
    rest, warpers = take_warpers(kinds, samples)
    chain = LogitsChain(rest, call.ids[:, :0], 1) if rest else None
    return chain, {"temperature": 1.0 if samples else 0.0} | warpers


def hand_rows(call: GenerateCall, grid: Tensor) -> Any:
    """What `_sample` returns of a grid `[B, S, K]`: a row of S codes for each book of each row."""
    from transformers.generation import utils

    sequences: Any = grid.mT.reshape(-1, grid.shape[1])
    if not call.config.return_dict_in_generate:
        return sequences
    if call.model.config.is_encoder_decoder:
        return utils.GenerateEncoderDecoderOutput(sequences=sequences)
    return utils.GenerateDecoderOnlyOutput(sequences=sequences)


def draw_codes(model: Any, n_books: int, n_codes: int) -> Tensor:
    """Codes `[2, 5, K]` for a self-check, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(n_codes, (2, 5, n_books), generator=generator).to(model.device)


def make_task(
    call: GenerateCall,
    steps: StepDecoder,
    cells: Cells,
    given: Tensor,  # [B, S, K], of all cells but the stream's
    hand_over: Callable[[Generation], Any],  # makes what `_sample` returns
    *,
    params: SamplingParams,
    branches: int = 1,  # G
    end: int | None = None,  # code that ends a row, as in `DelayWindow`
) -> Task:
    """The task of a stream of codes, whose prompt is one token a row."""
    model = DelayWindow(call.model, steps, cells, given.repeat(branches, 1, 1), end)
    n_rows = len(given) * branches
    tokens = torch.zeros(n_rows, 1, dtype=torch.int64, device=given.device)
    return Task(
        model=model,
        prompt=Prompt(
            tokens,
            torch.ones_like(tokens[:, 0]),
            branches,
            stop_tokens=None if end is None else tokens.new_tensor([steps.vocab_size]),
            layout=CodeFrames(given.shape[2]),
        ),
        length=len(cells.step),
        params=params,
        samples=call.config.do_sample,
        hand_over=hand_over,
    )


def read_ended(
    stream: Generation, cells: Cells, given: Tensor, *, stop: int, end: int, padding: int
) -> Tensor:
    """The grid `[B, S', K]` of a stream whose rows end, up to the last step of the longest: `end`,
    which ends a book, for the stream's `stop`, and `padding` behind it.
    """
    index = torch.arange(stream.tokens.shape[1], device=given.device)
    tokens = torch.where(index < stream.lengths[:, None], stream.tokens, padding)
    tokens = torch.where(tokens == stop, end, tokens)
    decoded = Cells(cells.step[: len(index)], cells.book[: len(index)])
    grid = arrange(tokens, decoded, given)
    last_step = int(cells.step[int(stream.lengths.max()) - 1])
    return grid[:, : last_step + 1]


def find_first(is_end: Tensor, step: Tensor, n_before: Tensor) -> Tensor:
    """The step `[B, W]` int64 of the first end among a row's first slots; `NEVER` without.

    Of slots at steps `[n]`, `is_end` `[B, n]`, the first `n_before` `[B, W]` are looked at.
    """
    first = torch.where(is_end, step, NEVER).cummin(1).values
    return pad(first, (1, 0), value=NEVER).gather(1, n_before)  # column n: among the first n
