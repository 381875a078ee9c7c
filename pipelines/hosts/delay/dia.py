"""Dia: a decoder over text states, with delays of its own for each codebook and an end.

Nari Labs, "Dia-1.6B", 2025; transformers 5.24, `dia`. Three of its logits processors read more than
the scores of one code. Here they are functions of a code's cell and of what was generated before:

- *guidance* chooses the k likeliest codes by the guided scores, and keeps the conditional ones;
- only the first book ends a sound, and only where the end is its likeliest id (*filter*);
- when it has, book k is certain of the end ``delays[k]`` steps later, and padded behind it.

A row is over with the end of the book delayed the most: an id of its own, the stream's stop token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.contracts import Layout
from mmaccel.pipelines.hosts.delay.attention import StepCaches, mask_encoder
from mmaccel.pipelines.hosts.delay.family import (
    OTHER_PATTERNS,
    CodeDecoder,
    draw_codes,
    find_first,
    find_unflat,
    hand_rows,
    make_task,
    read_ended,
    read_warpers,
)
from mmaccel.pipelines.hosts.delay.window import Cells, StepDecoder
from mmaccel.pipelines.hosts.depth.window import draw_states
from mmaccel.pipelines.hosts.generate_call import IGNORED, READ, GenerateCall, Table, Task
from mmaccel.pipelines.hosts.logits.processor_chain import take_warpers
from mmaccel.pipelines.hosts.logits.processor_support import is_own
from mmaccel.pipelines.hosts.transformers_release import CACHE
from mmaccel.results import Generation
from mmaccel.samplers.sampling_params import Processor, SamplingParams

_GUIDANCE = "DiaClassifierFreeGuidanceLogitsProcessor"
_FILTER = "DiaEOSChannelFilterLogitsProcessor"
_END = "DiaEOSDelayPatternLogitsProcessor"


@dataclass(frozen=True)
class DiaGuidance(SamplingParams):
    """Guidance of Dia: scores of the k codes that ``c + s (c - u)`` chooses; no k: that itself."""

    guidance_top_k: int | None = None

    def to_model_scores(
        self, logits: Tensor, branches: int, slots: Tensor, layout: Layout | None
    ) -> Tensor:
        """Raw logits `[2 B, W, V + 1]` to scores `[B, W, V + 1]` float32; the last is the end's."""
        conditional, unconditional = logits[..., :-1].float().chunk(2)
        guided = conditional + (conditional - unconditional) * self.guidance_scale
        if self.guidance_top_k is not None:
            chosen = guided.topk(self.guidance_top_k, dim=-1).indices
            is_left_out = torch.ones_like(guided, dtype=torch.bool).scatter(-1, chosen, False)
            guided = conditional.masked_fill(is_left_out, -math.inf)
        return pad(guided, (0, 1), value=-math.inf)


@dataclass(frozen=True)
class DiaRules:
    """What Dia allows in each cell, as a `Processor` (`mmaccel.samplers.sampling_params`)."""

    cells: Cells  # of the stream's slots
    delays: Tensor  # [K] int64, of the books
    end: int  # id that ends a book; larger ones (begin, padding) are never drawn
    padding: int  # id of a book behind its end
    stop: int  # V, which the stream has where the last book ends
    last_begin: int | None  # step at which the first book ends at the latest
    before: Processor | None = None  # applied before these rules

    @property
    def is_capturable(self) -> bool:
        return self.before is None

    @cached_property
    def _first_book(self) -> Tensor:
        """`[n]` int64, slots of the first book."""
        return (self.cells.book == 0).nonzero()[:, 0]

    @cached_property
    def _last_book(self) -> int:
        """The one that ends last."""
        return len(self.delays) - 1 - int(self.delays.flip(0).argmax())

    def __call__(self, scores: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
        if self.before is not None:
            scores = self.before(scores, tokens, columns)
        slots = columns - 1  # the prompt is one column
        at = slots.clamp(max=len(self.cells.step) - 1)
        step = self.cells.step[at]  # [B, W]
        book = self.cells.book[at]
        filtered = self._filter(scores, book)
        # the end of book k stands delays[k] steps behind that of the first; padding follows it
        due = self.find_ends(tokens, slots) + self.delays[book]
        ends = torch.where(book == self._last_book, self.stop, self.end)
        certain = torch.where(step == due, ends, self.padding)
        known = torch.full_like(scores, -math.inf).scatter_(-1, certain[..., None], 0.0)
        return torch.where((step < due)[..., None], filtered, known)

    def _filter(self, scores: Tensor, book: Tensor) -> Tensor:
        """The first book has the end where it is likeliest, and then alone; the others never."""
        index = torch.arange(scores.shape[-1], device=scores.device)
        is_first = (book == 0)[..., None]
        allowed = (index < self.end) | (is_first & (index == self.end))
        kept = scores.masked_fill(~allowed, -math.inf)
        ends = (kept.argmax(-1) == self.end)[..., None]
        return kept.masked_fill(ends != (index == self.end), -math.inf)

    def find_ends(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """The step of the first book's end before each of slots `[B, W]`, of tokens `[B, N]`."""
        first_book = self._first_book
        n_before = torch.searchsorted(first_book, slots.contiguous())
        is_end = tokens[:, first_book + 1] == self.end  # column 0 is the prompt's
        step = find_first(is_end, self.cells.step[first_book], n_before)
        return step if self.last_begin is None else step.clamp(max=self.last_begin)


class DiaSteps(StepDecoder):
    """`DiaForConditionalGeneration` over states `[R, T, D]`, seen where the mask `[R, T]` is 1."""

    def __init__(self, model: Any, states: Tensor, mask: Tensor | None) -> None:
        self.vocab_size = int(model.vocab_size)
        self._model = model
        self._states = states
        self._mask = mask_encoder(mask, states.dtype)

    def reserve(self, rows: int, n_steps: int) -> None:
        n_layers = len(self._model.model.decoder.layers)
        self._caches = StepCaches(
            n_layers, rows, n_steps, self._states.dtype, reads_back=self.reads_back
        )

    def forward(self, codes: Tensor, at: Tensor) -> Tensor:
        hidden = self._model.model.decoder(
            input_ids=codes,
            position_ids=at,
            attention_mask=self._caches.prepare(at),
            encoder_hidden_states=self._states,
            encoder_attention_mask=self._mask,
            **{CACHE: self._caches.both},
            return_dict=True,
        ).last_hidden_state
        logits: Tensor = self._model.logits_dense(hidden)
        return logits.unflatten(-1, (-1, self.vocab_size))


class Dia(CodeDecoder):
    """`DiaForConditionalGeneration`."""

    arguments: ClassVar[Table] = dict.fromkeys((
        "attention_mask", "decoder_attention_mask", "decoder_delay_mask", "encoder_outputs",
        "use_cache", CACHE,
    ), READ) | {"tokenizer": IGNORED}  # fmt: skip

    decoder_config = attrgetter("model.decoder.config")
    n_books = attrgetter("num_channels")
    vocab_size = attrgetter("vocab_size")

    def example(self, model: Any) -> tuple[StepDecoder, Tensor, Tensor]:
        codes = draw_codes(model, self.n_books(model), self.vocab_size(model))
        rows = len(codes)
        width = model.config.encoder_config.hidden_size
        states = draw_states(model, 3 * rows, width).unflatten(0, (rows, 3))
        mask = codes.new_tensor([[1, 1, 1], [1, 1, 0]])
        with torch.no_grad():
            logits = model(
                encoder_outputs=(states,),
                attention_mask=mask,
                decoder_input_ids=codes,
                use_cache=False,
            ).logits
        logits = logits.unflatten(0, (rows, -1)).transpose(1, 2)  # [R, S, K, V]
        return DiaSteps(model, states, mask), codes, logits

    def read(self, call: GenerateCall) -> Task:
        model = call.model
        config = model.config.decoder_config
        names = [type(processor).__name__ for processor in call.processors]
        guidance = call.processors[0] if names[:1] == [_GUIDANCE] else None
        kinds = []  # of the processors that are not Dia's own
        for processor, kind in call.kinds:
            if not any(is_own(processor, name) for name in (_GUIDANCE, _FILTER, _END)):
                kinds.append((processor, kind))
        reasons = [*find_unflat(kinds)]
        if not names or names[-1] != _END or names.count(_FILTER) != 1:
            reasons.append("logits processors in another order than Dia's")
        else:
            behind = call.kinds[names.index(_FILTER) + 1 : -1]
            if take_warpers(behind, True)[0]:
                reasons.append("processors behind Dia's filter other than top-k, top-p and min-p")
        n_guided = None if guidance is None else guidance.guidance_top_k
        n_never = self.vocab_size(model) - config.eos_token_id
        if n_guided is not None and n_guided <= n_never:
            reasons.append(
                f"guidance of {n_never} codes or fewer, which may all be ids that are never drawn"
            )
        text = call.others.get("attention_mask")
        if text is not None and not bool(text.bool().any(1).all()):
            reasons.append("a row without text")
        if [end for stop in call.stops for end in stop.flatten().tolist()] != [config.eos_token_id]:
            reasons.append(f"end tokens other than {config.eos_token_id}, Dia's own")
        mask = call.others.get("decoder_attention_mask")
        if mask is not None and not bool(mask.all()):
            reasons.append("prompts of sound of different lengths")
        given, cells = self.pattern(call, call.others["decoder_delay_mask"], config.pad_token_id)
        if cells is None:
            reasons.append(OTHER_PATTERNS)
        if reasons or cells is None:
            return Task(reasons)
        chain, chosen = read_warpers(call, kinds)
        delays = torch.tensor(model.config.delay_pattern, device=given.device, dtype=torch.int64)
        last_begin = given.shape[1] - int(delays.max()) - 1
        assert call.pad is not None  # as there is an end token
        padding = int(call.pad)
        rules = DiaRules(
            cells,
            delays,
            end=config.eos_token_id,
            padding=padding,
            stop=self.vocab_size(model),
            last_begin=last_begin if last_begin >= call.ids.shape[1] else None,
            before=chain,
        )
        params = SamplingParams(processor=rules, **chosen)
        if guidance is not None:
            params = DiaGuidance(
                guidance_scale=float(guidance.guidance_scale),
                guidance_top_k=n_guided,
                processor=rules,
                **chosen,
            )
        branches = 1 if guidance is None else 2

        def hand_over(stream: Generation) -> Any:
            ends = {"stop": rules.stop, "end": rules.end, "padding": padding}
            return hand_rows(call, read_ended(stream, cells, given, **ends))

        steps = DiaSteps(model, call.others["encoder_outputs"][0], text)
        return make_task(
            call, steps, cells, given, hand_over, params=params, branches=branches, end=rules.end
        )
