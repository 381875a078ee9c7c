"""MusicGen: a decoder over text states whose codebooks stand in a delay pattern.

J. Copet et al., "Simple and Controllable Music Generation", NeurIPS 2023 (arXiv 2306.05284);
transformers 5.24, `musicgen` and `musicgen_melody`. Its own `generate` builds the pattern's mask,
which also has prompts of sound and stereo, and calls `_sample` with a row for each book of each
sound. The decoder counts positions from its cache; `MusicgenSteps` runs its layers by itself, with
the decoder's own sinusoidal table at each row's steps.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.delay.attention import StepCaches, mask_encoder
from mmaccel.pipelines.hosts.delay.family import (
    OTHER_PATTERNS,
    CodeDecoder,
    draw_codes,
    find_unflat,
    hand_rows,
    make_task,
    read_warpers,
)
from mmaccel.pipelines.hosts.delay.window import StepDecoder, arrange
from mmaccel.pipelines.hosts.depth.window import draw_states
from mmaccel.pipelines.hosts.generate_call import IGNORED, READ, GenerateCall, Table, Task
from mmaccel.pipelines.hosts.logits.processor_support import is_own
from mmaccel.pipelines.hosts.transformers_release import CACHE
from mmaccel.results import Generation
from mmaccel.samplers.sampling_params import SamplingParams

_GUIDANCE = "ClassifierFreeGuidanceLogitsProcessor"
_PATTERN = "decoder_delay_pattern_mask"
_BOTH: Table = {
    **dict.fromkeys((_PATTERN, "guidance_scale"), READ),
    **dict.fromkeys((
        "audio_scales", "input_values", "padding_mask", "prefill_outputs", "tokenizer", "use_cache",
    ), IGNORED),
}  # fmt: skip


class MusicgenSteps(StepDecoder):
    """`MusicgenForCausalLM` as a decoder of steps over states `[R, T, D]` of the mask `[R, T]`."""

    def __init__(self, model: Any, states: Tensor, mask: Tensor | None = None) -> None:
        self.vocab_size = int(model.config.vocab_size)
        self._model = model
        self._body = model.model.decoder
        self._states = states
        self._mask = mask_encoder(mask, states.dtype)

    def reserve(self, rows: int, n_steps: int) -> None:
        body = self._body
        states = self._states
        self._caches = StepCaches(
            len(body.layers), rows, n_steps, states.dtype, reads_back=self.reads_back
        )
        every = torch.zeros(1, 1, n_steps + 1, dtype=torch.int64, device=states.device)
        self._positions = body.embed_positions(every)  # [S + 1, D]

    def forward(self, codes: Tensor, at: Tensor) -> Tensor:
        tables = self._body.embed_tokens
        embedded = sum(table(codes[..., book]) for book, table in enumerate(tables))
        assert isinstance(embedded, Tensor)  # of one book at least
        hidden = self._body.layer_norm(self._run(embedded, at))
        return torch.stack([head(hidden) for head in self._model.lm_heads], 2)

    def _run(self, embedded: Tensor, at: Tensor) -> Tensor:
        """The layers over entries `[R, n, D]` at positions `[R, n]`."""
        mask = self._caches.prepare(at)
        positions = self._positions[at.clamp(max=len(self._positions) - 1)]
        hidden = embedded + positions.to(embedded.device)
        for layer in self._body.layers:
            hidden = self._run_layer(layer, hidden, mask)
        return hidden

    def _run_layer(self, layer: Any, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = layer(
            hidden,
            attention_mask=mask,
            encoder_hidden_states=self._states,
            encoder_attention_mask=self._mask,
            **{CACHE: self._caches.both},
        )
        return hidden


class MelodySteps(MusicgenSteps):
    """`MusicgenMelodyForCausalLM`, whose steps follow the states of the encoders in its cache."""

    def reserve(self, rows: int, n_steps: int) -> None:
        body = self._body
        states = self._states
        n_before = states.shape[1]
        length = n_before + n_steps
        self._caches = StepCaches(
            len(body.layers), rows, length, states.dtype, reads_back=self.reads_back
        )
        self._positions = body.embed_positions(states.new_zeros(1, length + 1, 1))
        index = torch.arange(n_before, device=states.device)
        with torch.no_grad():
            self._run(states, index.expand(rows, -1))

    def forward(self, codes: Tensor, at: Tensor) -> Tensor:
        return super().forward(codes, at + self._states.shape[1])

    def _run_layer(self, layer: Any, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = layer(hidden, attention_mask=mask, **{CACHE: self._caches.own})[0]
        return hidden


class Musicgen(CodeDecoder):
    """`MusicgenForConditionalGeneration`."""

    arguments: ClassVar[Table] = _BOTH | dict.fromkeys(("attention_mask", "encoder_outputs"), READ)

    decoder_config = attrgetter("decoder.config")
    n_books = attrgetter("decoder.num_codebooks")
    vocab_size = attrgetter("decoder.config.vocab_size")

    def example(self, model: Any) -> tuple[StepDecoder, Tensor, Tensor]:
        config = model.decoder.config
        codes = draw_codes(model, self.n_books(model), self.vocab_size(model))
        width = config.cross_attention_hidden_size or config.hidden_size
        states = draw_states(model, 3 * len(codes), width).unflatten(0, (len(codes), 3))
        mask = codes.new_tensor([[1, 1, 1], [1, 1, 0]])
        logits = self._score(model, codes, states, encoder_attention_mask=mask)
        return MusicgenSteps(model.decoder, states, mask), codes, logits

    @torch.no_grad()
    def _score(self, model: Any, codes: Tensor, states: Tensor, **options: Any) -> Tensor:
        """Logits `[R, S, K, V]` of the decoder's own pass over codes `[R, S, K]`."""
        rows, n_steps, n_books = codes.shape
        logits = model.decoder(
            input_ids=codes.mT.reshape(rows * n_books, n_steps),
            encoder_hidden_states=states,
            use_cache=False,
            **options,
        ).logits
        by_book: Tensor = logits[:, -n_steps:].unflatten(0, (rows, n_books))
        return by_book.transpose(1, 2)

    def read(self, call: GenerateCall) -> Task:
        model = call.model
        n_books = self.n_books(model)
        assert call.length is not None
        n_steps = call.ids.shape[1] + call.length
        is_guided = len(call.processors) > 0 and is_own(call.processors[0], _GUIDANCE)
        kinds = call.kinds[1:] if is_guided else call.kinds
        reasons = [*find_unflat(kinds)]
        if call.stops:
            reasons.append("an end token, which MusicGen has none of")
        if not is_guided and call.others.get("guidance_scale") not in (None, 1):
            reasons.append("guidance after another processor")
        mask = call.others.get(_PATTERN)
        if call.config.num_return_sequences > 1:
            reasons.append("num_return_sequences, which takes the books of a sound apart")
        elif mask is None or len(mask) != len(call.ids) or mask.shape[1] < n_steps:
            reasons.append("a pattern of another length than the call")
        if reasons:
            return Task(reasons)
        assert mask is not None
        pattern = mask.unflatten(0, (-1, n_books)).mT
        given, cells = self.pattern(call, pattern, -1)
        if cells is None:
            return Task([OTHER_PATTERNS])
        if not len(cells.step):
            return Task(["a pattern in which nothing is generated"])
        branches = 2 if is_guided else 1
        chain, chosen = read_warpers(call, kinds)
        scale = float(call.processors[0].guidance_scale) if is_guided else 1.0

        def hand_over(stream: Generation) -> Any:
            return hand_rows(call, arrange(stream.tokens, cells, given))

        params = SamplingParams(guidance_scale=scale, processor=chain, **chosen)
        steps = self.open_steps(call)
        return make_task(call, steps, cells, given, hand_over, params=params, branches=branches)

    def open_steps(self, call: GenerateCall) -> StepDecoder:
        """The decoder, over what it attends to as the model's own forward makes it."""
        model = call.model
        states = call.others["encoder_outputs"][0]
        mask = call.others.get("attention_mask")
        config = model.decoder.config
        has_other_width = model.text_encoder.config.hidden_size != config.hidden_size
        if has_other_width and config.cross_attention_hidden_size is None:
            with torch.no_grad():
                states = model.enc_to_dec_proj(states)
        if mask is not None:
            states = states * mask[..., None]
        return MusicgenSteps(model.decoder, states, mask)


class Melody(Musicgen):
    """`MusicgenMelodyForConditionalGeneration`, which has the states of its encoders in front."""

    arguments: ClassVar[Table] = _BOTH | {
        "encoder_hidden_states": READ,
        "input_features": IGNORED,
        CACHE: READ,
    }

    def example(self, model: Any) -> tuple[StepDecoder, Tensor, Tensor]:
        codes = draw_codes(model, self.n_books(model), self.vocab_size(model))
        width = model.decoder.config.hidden_size
        states = draw_states(model, 3 * len(codes), width).unflatten(0, (len(codes), 3))
        return MelodySteps(model.decoder, states), codes, self._score(model, codes, states)

    def open_steps(self, call: GenerateCall) -> StepDecoder:
        return MelodySteps(call.model.decoder, call.others["encoder_hidden_states"])
