"""The family of depth decoders: windows along the codebooks of each frame of a speech model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.contracts import Pass, Prompt
from mmaccel.pipelines.hosts.causal_lm.compatibility import ModelFacts
from mmaccel.pipelines.hosts.causal_lm.own_passes import OwnPasses
from mmaccel.pipelines.hosts.causal_lm.route import run_body
from mmaccel.pipelines.hosts.depth.window import DepthWindow, draw_states
from mmaccel.pipelines.hosts.generate_call import GenerateCall
from mmaccel.pipelines.hosts.original_methods import original
from mmaccel.tokenizers_vq.frames import CodeFrames


class DepthDecoder(OwnPasses):
    """A kind of depth decoder, each call of whose `generate` makes the codes of one frame.

    Shapes: **R** rows, **P** entries of a frame before the codes that are generated, **n** entries
    of a pass, **V** codes of a codebook, **D** width.
    """

    name: ClassVar[str] = "depth"
    repeats_calls: ClassVar[bool] = True
    cause: ClassVar[str] = "; a sliding window shorter than a frame does that"
    state_argument: ClassVar[str]  # of its `generate`: what a frame is scored with
    n_before: ClassVar[int]  # P
    has_ids: ClassVar[bool] = True  # whether the beginning of a frame has ids

    def vocab_size(self, model: Any) -> int:
        return int(model.vocab_size)

    def n_entries(self, model: Any) -> int:
        """The most entries of a pass: P and the codes but the last one."""
        return int(model.config.num_codebooks)

    @abstractmethod
    def shape(self, model: Any) -> tuple[int, ...]:
        """Of the `state_argument`, without the rows."""

    @abstractmethod
    def run(self, window: DepthWindow, entries: Tensor, first: int, inputs: Any) -> Tensor:
        """Logits `[R, n, V]` of entries `[R, n]` from the first on; the first P - 1 are noise."""

    def facts(self, model: Any) -> ModelFacts:
        return ModelFacts(
            model.config,
            (None,) * model.config.num_hidden_layers,
            self.vocab_size(model),
            max_positions=self.n_entries(model),
        )

    def compared(self, model: Any) -> tuple[Tensor, Tensor]:
        """A frame by the model's own loop; one pass over it, and passes of three entries."""
        length = self.layout(model).frame
        states = draw_states(model, 2, *self.shape(model))
        ids = torch.zeros(2, self.n_before, dtype=torch.int64, device=model.device)
        frame = {self.state_argument: states}
        if self.has_ids:
            frame["input_ids"] = ids
        generated = original(model, "generate")(
            **frame,
            max_length=None,
            max_new_tokens=length,
            min_length=None,
            min_new_tokens=length,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        entries = torch.cat([ids, generated.sequences[:, -length:-1]], 1)
        window = DepthWindow(self, model, states)
        by_width = []
        for width in (entries.shape[1], 3):
            window.reserve(*entries.shape)
            logits = []
            for first in range(0, entries.shape[1], width):
                tokens = entries[:, first : first + width]
                logits.append(window.forward(Pass(tokens, ids.new_full((2,), first))))
            by_width.append(torch.cat(logits, 1))
        received = torch.stack(by_width)[:, :, self.n_before - 1 :]
        return torch.stack(generated.logits, 1).expand_as(received), received

    def layout(self, model: Any) -> CodeFrames:
        return CodeFrames(self.n_entries(model) + 1 - self.n_before)

    def obstacles(self, call: GenerateCall) -> Iterator[str]:
        if call.guidance is not None:
            yield "guidance of a frame's codes"
        if call.n_columns != self.n_before:
            yield f"a frame that does not begin with {self.n_before} entries"
        if not bool(call.mask.all()):
            yield "an attention mask that hides the beginning of a frame"
        if self.state_argument not in call.given["read"]:
            yield f"no {self.state_argument}"

    def wrap(self, model: Any) -> Any:
        return DepthWindow(self, model)

    def open(self, call: GenerateCall) -> Any:
        states = call.others[self.state_argument]
        if call.window is None:
            return DepthWindow(self, call.model, states)
        call.window.begin_frame(states)
        return call.window

    def prompt(self, call: GenerateCall) -> Prompt:
        """The frame's beginning, then the codes of the frame before, which are shown to drafts."""
        prompt = call.prompt()
        if prompt.layout is None:
            prompt = replace(prompt, layout=self.layout(call.model))
        earlier = call.earlier
        if earlier is None or [*earlier.shape] != [len(call.ids), call.length]:
            return prompt
        tokens = torch.cat([prompt.tokens, earlier.to(prompt.tokens.device)], 1)
        return replace(
            prompt,
            tokens=tokens,
            lengths=torch.full_like(prompt.lengths, tokens.shape[1]),
            n_shown=int(earlier.shape[1]),
        )


class SharedLayers(DepthDecoder):
    """A kind whose books share their layers, which the fused decoder may run."""

    @abstractmethod
    def embed(self, model: Any, entries: Tensor, first: int, states: Tensor) -> Tensor:
        """What the decoder reads, `[R, n, D]`, of entries `[R, n]` from the first one on."""

    def enter(self, model: Any, embedded: Tensor) -> Tensor:
        """What its layers read of that."""
        return embedded

    def run_body(self, model: Any, **inputs: Any) -> Any:
        return model.model(**inputs)

    @abstractmethod
    def score(self, model: Any, hidden: Tensor, first: int) -> Tensor:
        """Logits `[R, n, V]` of states `[R, n, D]`, each by the head of its book."""

    def run(self, window: DepthWindow, entries: Tensor, first: int, inputs: Any) -> Tensor:
        model = window.model
        assert window.states is not None
        embedded = self.embed(model, entries, first, window.states)
        if window.forwards.decoder is not None:
            embedded = self.enter(model, embedded)
        inputs["inputs_embeds"] = embedded
        hidden = run_body(window, partial(self.run_body, model), inputs)
        if window.keeps_states:
            window.last_states = hidden
        return self.score(model, hidden, first)
