"""Higgs Audio v2: a decoder whose text goes over into steps of codes, book k delayed by k.

Boson AI, "Higgs Audio V2", 2025; transformers 5.24, `higgs_audio_v2`, whose `_sample` is its own.
The first steps begin the books one after the other; the step behind an end in any book ends the
first, and each later one the next. Both follow from a code's cell and what was generated before.

The prompt is a row of ids, sounds in it included; the model's own forward processes it once, and
its last id scores the first step. A row is over with a step of ends alone, the last of them an id
of its own in the stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.pipelines.hosts.delay.attention import StepCaches
from mmaccel.pipelines.hosts.delay.family import (
    CodeDecoder,
    draw_codes,
    find_first,
    make_task,
    read_ended,
    read_warpers,
)
from mmaccel.pipelines.hosts.delay.window import Cells, StepDecoder, list_cells
from mmaccel.pipelines.hosts.generate_call import (
    IGNORED,
    READ,
    GenerateCall,
    Table,
    Task,
    is_left_padded,
)
from mmaccel.pipelines.hosts.transformers_release import CACHE
from mmaccel.results import Generation
from mmaccel.samplers.sampling_params import SamplingParams

_DELAY = "HiggsAudioV2DelayPatternLogitsProcessor"


@dataclass(frozen=True)
class HiggsRules:
    """What Higgs allows in each cell, as a `Processor` (`mmaccel.samplers.sampling_params`)."""

    is_capturable: ClassVar[bool] = True
    cells: Cells
    n_books: int  # K
    end: int  # id that ends a book
    stop: int  # V, which the stream has in place of an end behind K - 1 others of its step

    def __call__(self, scores: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
        slots = columns - 1  # the prompt is one column
        at = slots.clamp(max=len(self.cells.step) - 1)
        step = self.cells.step[at]  # [B, W]
        book = self.cells.book[at]
        index = torch.arange(scores.shape[-1], device=scores.device)
        # behind an end at step s, book k has ends from step s + k + 1 on
        is_due = step > self.find_ends(tokens, step) + book
        allowed = torch.where(is_due[..., None], index == self.end, index != self.stop)
        kept = scores.masked_fill(~allowed, -math.inf)
        # the last of K ends in a step ends the row: its score is that of the id `stop`
        is_last = self._ends_before(tokens, slots) == self.n_books - 1
        last = kept.clone()
        last[..., self.stop] = kept[..., self.end]
        last[..., self.end] = -math.inf
        return torch.where((is_last & (book == self.n_books - 1))[..., None], last, kept)

    def find_ends(self, tokens: Tensor, step: Tensor) -> Tensor:
        """The first step before `step` `[B, W]` that has an end, `[B, W]` int64."""
        n_slots = len(self.cells.step)
        is_end = tokens[:, 1 : 1 + n_slots] == self.end
        step_of_slot = self.cells.step[: is_end.shape[1]]
        n_before = torch.searchsorted(step_of_slot, step.contiguous())  # slots of the steps before
        return find_first(is_end, step_of_slot, n_before)

    def _ends_before(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """How many of the K - 1 slots before each of `[B, W]` are ends."""
        is_end = (tokens[:, 1:] == self.end).long()
        total = pad(is_end.cumsum(1), (1, 0))  # [B, N], ends before each slot
        last = slots.clamp(max=total.shape[1] - 1)
        first = (last - self.n_books + 1).clamp(min=0)
        return total.gather(1, last) - total.gather(1, first)


class HiggsSteps(StepDecoder):
    """`HiggsAudioV2ForConditionalGeneration` as a decoder of steps; step 0 is the prompt's end.

    `prompt` are arguments of the model's own forward, `mask` `[R, T]` is False on its padding.
    """

    def __init__(self, model: Any, mask: Tensor, prompt: dict[str, Any]) -> None:
        self.vocab_size = int(model.config.codebook_size)
        self._model = model
        self._mask = mask
        self._prompt = prompt
        self._lengths = mask.sum(1)

    @torch.no_grad()
    def reserve(self, rows: int, n_steps: int) -> None:
        body = self._model.model
        n_prompt = self._mask.shape[1]
        dtype = self._model.dtype
        padding = None if bool(self._mask.all()) else ~self._mask
        self._n_before = n_prompt - 1  # cache indices before that of step 0
        self._scratch = self._n_before + n_steps
        self._caches = StepCaches(
            len(body.layers),
            rows,
            self._scratch,
            dtype,
            padding=padding,
            reads_back=self.reads_back,
        )
        index = torch.arange(n_prompt, device=self._mask.device).expand(rows, -1)
        positions = (self._mask.long().cumsum(1) - 1).clamp(min=0)
        self._first = self._run(index, positions, **self._prompt)[:, -1:]  # [R, 1, K, V]

    def forward(self, codes: Tensor, at: Tensor) -> Tensor:
        is_prompt = at == 0
        # the prompt's last entry is cached, and its logits are known
        index = torch.where(is_prompt, self._scratch, at + self._n_before)
        positions = at + self._lengths[:, None] - 1
        logits = self._run(index.clamp(max=self._scratch), positions, audio_input_ids=codes)
        return torch.where(is_prompt[..., None, None], self._first, logits)

    def _run(self, at: Tensor, positions: Tensor, **inputs: Any) -> Tensor:
        """Logits `[R, n, K, V]` of entries at cache indices and positions `[R, n]`."""
        hidden = self._model.model(
            **inputs,
            attention_mask=self._caches.prepare(at),
            position_ids=positions,
            **{CACHE: self._caches.own},
            use_cache=True,
            return_dict=True,
        ).last_hidden_state
        logits: Tensor = self._model.audio_lm_head(hidden)
        return logits.unflatten(-1, (-1, self.vocab_size))


class Higgs(CodeDecoder):
    """`HiggsAudioV2ForConditionalGeneration`."""

    arguments: ClassVar[Table] = {
        **dict.fromkeys(("attention_mask", "audio_input_ids", "audio_input_ids_mask"), READ),
        **dict.fromkeys(("use_cache", CACHE), READ),
        **dict.fromkeys(("logits_to_keep", "position_ids", "tokenizer"), IGNORED),
    }

    decoder_config = attrgetter("config")
    n_books = attrgetter("config.num_codebooks")
    vocab_size = attrgetter("config.codebook_size")

    def example(self, model: Any) -> tuple[StepDecoder, Tensor, Tensor]:
        codes = draw_codes(model, self.n_books(model), self.vocab_size(model))
        rows, n_steps, _ = codes.shape
        text = torch.arange(2, device=model.device).expand(rows, -1)
        sound = codes.new_full((rows, n_steps - 1), model.config.audio_token_id)
        with torch.no_grad():
            logits = model(
                input_ids=torch.cat([text, sound], 1), audio_input_ids=codes[:, 1:], use_cache=False
            ).logits
        logits = logits[:, -n_steps:].unflatten(-1, (-1, self.vocab_size(model)))
        steps = HiggsSteps(model, torch.ones_like(text, dtype=torch.bool), {"input_ids": text})
        return steps, codes, logits

    def read(self, call: GenerateCall) -> Task:
        model = call.model
        config = model.config
        n_books = self.n_books(model)
        rest, chosen = read_warpers(call, call.kinds[1:])
        names = [type(processor).__name__ for processor in call.processors]
        ends = {end for stop in call.stops for end in stop.flatten().tolist()}
        flat = {config.audio_token_id, config.audio_delay_token_id}
        sound = call.others.get("audio_input_ids_mask")
        is_begin = call.ids[:, -n_books:] == config.audio_bos_token_id
        # how many ids ago the begin of a sound stands, of the last K; 0 without one
        begins = (is_begin.shape[1] - is_begin.long().argmax(1)).where(is_begin.any(1), 0)
        assert call.length is not None
        checks = (
            (names[:1] != [_DELAY] or rest is not None,
             "logits processors other than temperature, top-k and top-p"),
            (config.eos_token_id not in ends or bool(ends & flat),
             f"end tokens without {config.eos_token_id}, or among those of sounds"),
            (call.is_uncached,
             "use_cache=False, under which the model has no sound to go on from"),
            (not is_left_padded(call.mask) or call.mask.shape != call.ids.shape,
             "an attention mask that does more than hide padding on the left"),
            (vars(call.config).get("ras_win_len") is not None, "repetition-aware sampling"),
            (sound is None and "audio_input_ids" in call.given["read"], "sound without its mask"),
            (sound is not None and not bool(sound[:, :-1].any()),
             "a prompt with less than two frames of sound"),
            (bool((call.ids[:, -n_books:] == config.audio_delay_token_id).any()),
             "a sound that has begun to end"),
            (call.length < 2, "a length in which nothing is generated"),
            (call.ids.shape[1] < n_books and bool(begins.any()),
             "a prompt with fewer ids than codebooks, from which the model counts a delay"),
            (not torch.equal(begins, begins[:1].expand_as(begins)),
             "rows whose sounds have begun at different steps"),
        )  # fmt: skip
        reasons = [text for is_refused, text in checks if is_refused]
        if reasons:
            return Task(reasons)
        device = call.ids.device
        begun = int(begins[0])
        book = torch.arange(n_books, device=device)
        # the last step of each book that begins it, counted from 1
        last_begin = book + 2 - begun if begun else torch.ones_like(book)
        step = torch.arange(call.length + 1, device=device)[:, None]
        free = (step > last_begin) & (step > 0)
        shape = (len(call.ids), call.length + 1, n_books)
        given = call.ids.new_full(shape, config.audio_stream_bos_id)
        cells = list_cells(free)
        end = config.audio_stream_eos_id
        rules = HiggsRules(cells, n_books, end=end, stop=self.vocab_size(model))

        def hand_over(stream: Generation) -> Any:
            grid = read_ended(stream, cells, given, stop=rules.stop, end=end, padding=end)
            return self._hand_sound(call, grid[:, 1:])

        prompt = {"input_ids": call.ids}
        for name in ("audio_input_ids", "audio_input_ids_mask"):
            if name in call.given["read"]:
                prompt[name] = call.others[name]
        steps = HiggsSteps(model, call.mask, prompt)
        params = SamplingParams(processor=rules, **chosen)
        return make_task(call, steps, cells, given, hand_over, params=params, end=end)

    @staticmethod
    def _hand_sound(call: GenerateCall, codes: Tensor) -> Any:
        """What `_sample` returns of codes `[B, S, K]`, which follow those of the prompt."""
        config = call.model.config
        before = call.others.get("audio_input_ids")
        sound: Any = codes if before is None else torch.cat([before, codes], 1)
        if not call.config.return_dict_in_generate:
            return sound
        from transformers.models.higgs_audio_v2.generation_higgs_audio_v2 import (
            HiggsAudioV2GenerationOutput,
        )

        is_end = codes == config.audio_stream_eos_id
        ids = torch.full_like(codes[..., 0], config.audio_token_id)
        ids[is_end.any(2).long().cummax(1).values.bool()] = config.audio_delay_token_id
        ids[is_end.all(2)] = config.eos_token_id
        sequences: Any = torch.cat([call.ids, ids], 1)
        return HiggsAudioV2GenerationOutput(sequences=sequences, audio_sequences=sound)
