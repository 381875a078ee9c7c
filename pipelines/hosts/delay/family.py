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
    """A kind of model whose `generate` makes K codes a step, in K rows of `_sample` each.

    Attributes:
        arguments: of its forward that calls may have, whatever `read` finds in them; with `CACHE`,
            its `generate` makes a cache for every call.
        decoder_config: of the part of a model that makes codes.
        n_books, vocab_size: K and V of a model.
    """

    name: ClassVar[str] = "delay"
    decoder_config: ClassVar[attrgetter[Any]]
    n_books: ClassVar[attrgetter[int]]
    vocab_size: ClassVar[attrgetter[int]]

    @abstractmethod
    def example(self, model: Any) -> tuple[StepDecoder, Tensor, Tensor]:
        """For a self-check: a decoder of steps, codes `[R, S, K]`, and the logits `[R, S, K, V]`
        of one pass of the model's own over them.
        """

    def facts(self, model: Any) -> ModelFacts:
        """See `OwnPasses.facts`."""
        config = self.decoder_config(model)
        rope = vars(config).get("rope_parameters") or {}
        attention = config._attn_implementation
        if rope.get("rope_type") in ("dynamic", "longrope"):
            kind = rope["rope_type"]
            self.refuse(model, f"one whose rotations change with the length ({kind})")
        if attention not in _ATTENTIONS:
            self.refuse(model, f"one with {attention}; load it with attn_implementation='sdpa'")
        return ModelFacts(config, (None,) * config.num_hidden_layers, self.vocab_size(model))

    def compared(self, model: Any) -> tuple[Tensor, Tensor]:
        """See `OwnPasses.compared`: passes over steps, some of which were wrong before."""
        steps, codes, expected = self.example(model)
        rows, n_steps, _ = codes.shape
        steps.reserve(rows, n_steps)
        at = torch.arange(n_steps, device=codes.device).expand(rows, -1)
        steps.forward(codes.roll(1, 2)[:, :3], at[:, :3])
        parts = [steps.forward(codes[:, part], at[:, part]) for part in (slice(2), slice(2, None))]
        return expected.flatten(1, 2).float(), torch.cat(parts, 1).flatten(1, 2).float()

    def layout(self, model: Any) -> Layout:
        """See `CausalLM.layout`."""
        return CodeFrames(self.n_books(model))

    def wrap(self, model: Any) -> Any:
        steps, codes, _ = self.example(model)
        cells = Cells(torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        return DelayWindow(model, steps, cells, codes)

    def sample_loop(self, call: GenerateCall) -> Task | None:
        """See `CausalLM.sample_loop`."""
        reasons = [*find_in_call(call), *self._find_in_call(call)]
        return Task(reasons) if reasons else self.read(call)

    @abstractmethod
    def read(self, call: GenerateCall) -> Task:
        """The task of a call whose arguments can be served, or why it cannot be."""

    def pattern(self, call: GenerateCall, mask: Tensor, empty: int) -> tuple[Tensor, Cells | None]:
        """Codes of all cells `[B, S, K]` as far as they are given, and the free cells of every row.

        The second is None where rows have different patterns.

        Args:
            call: whose ids `[B * K, T]` are rows of single books.
            mask: `[B, S', K]`, codes of the pattern.
            empty: its value in cells that it does not give.
        """
        assert call.length is not None
        own = call.ids.unflatten(0, (-1, self.n_books(call.model))).mT  # [B, T, K]
        n_prompt = own.shape[1]
        own = pad(own, (0, 0, 0, call.length), value=empty)
        mask = mask[:, : own.shape[1]]
        mask = pad(mask, (0, 0, 0, own.shape[1] - mask.shape[1]), value=empty)
        free = mask == empty
        given = torch.where(free, own, mask)
        free[:, :n_prompt] = False
        is_one = torch.equal(free, free[:1].expand_as(free))
        return given, list_cells(free[0]) if is_one else None

    def _find_in_call(self, call: GenerateCall) -> Iterator[str]:
        if call.has_callers_cache or CACHE in call.given["refuse"]:
            yield "a cache given by the caller"
        yield from (f"output_{name}" for name in sorted(call.records))
        if call.needs_streamer:
            yield "a streamer or a stopping criterion that reads rows of single codebooks"


def find_unflat(kinds: list[tuple[Any, str]]) -> Iterator[str]:
    """Reasons against processors that read more than the scores of one code.

    In a row of a book they would read what was drawn in cells that the pattern overwrites.
    """
    for processor, kind in kinds:
        if kind in ("window", "prefix"):
            yield f"a {type(processor).__name__}, which reads the codes of a book before a step"
        elif kind != "flat":
            yield kind


def read_warpers(
    call: GenerateCall, kinds: list[tuple[Any, str]]
) -> tuple[LogitsChain | None, dict[str, Any]]:
    """Flat processors of a call as a logits chain (None: there are none) and as settings."""
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
    given: Tensor,
    hand_over: Callable[[Generation], Any],
    *,
    params: SamplingParams,
    branches: int = 1,
    end: int | None = None,
) -> Task:
    """The task of a stream of codes, whose prompt is one token a row.

    Args:
        call: the call.
        steps: of the model.
        cells: the stream's.
        given: `[B, S, K]`, codes of all other cells.
        hand_over: makes what `_sample` returns.
        params: of the stream.
        branches: G.
        end: see `DelayWindow`; its id ends a row. None: only the length does.
    """
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
    made: Generation, cells: Cells, given: Tensor, *, stop: int, end: int, padding: int
) -> Tensor:
    """The grid `[B, S', K]` of a stream whose rows end, up to the last step of the longest.

    Args:
        made: the stream.
        cells: its slots' cells.
        given: as in `make_task`.
        stop: id of the stream in place of an `end`.
        end: code that ends a book.
        padding: code behind a row's end.
    """
    index = torch.arange(made.tokens.shape[1], device=given.device)
    tokens = torch.where(index < made.lengths[:, None], made.tokens, padding)
    tokens = torch.where(tokens == stop, end, tokens)
    grid = arrange(tokens, Cells(*(axis[: len(index)] for axis in cells)), given)
    return grid[:, : int(cells.step[int(made.lengths.max()) - 1]) + 1]


def find_first(is_end: Tensor, step: Tensor, n_before: Tensor) -> Tensor:
    """The step of the first end of a row among its first slots, `[B, W]` int64; `NEVER` without.

    Args:
        is_end: `[B, n]` bool, of some slots of a row.
        step: `[n]` int64, theirs.
        n_before: `[B, W]` int64, how many of them are looked at.
    """
    first = torch.where(is_end, step, NEVER).cummin(1).values
    return pad(first, (1, 0), value=NEVER).gather(1, n_before)
