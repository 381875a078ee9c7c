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

    Attributes:
        given: the argument of its `generate` that a frame is scored with, besides the ids.
        n_before: P.
        has_ids: whether the beginning of a frame has ids.
    """

    name: ClassVar[str] = "depth"
    repeats_calls: ClassVar[bool] = True
    cause: ClassVar[str] = "; a sliding window shorter than a frame does that"
    given: ClassVar[str]
    n_before: ClassVar[int]
    has_ids: ClassVar[bool] = True

    def vocab_size(self, model: Any) -> int:
        """V."""
        return int(model.vocab_size)

    def n_entries(self, model: Any) -> int:
        """The most entries of a pass: P and the codes but the last one."""
        return int(model.config.num_codebooks)

    @abstractmethod
    def shape(self, model: Any) -> tuple[int, ...]:
        """That of what `given` has for a row."""

    @abstractmethod
    def run(self, window: DepthWindow, entries: Tensor, first: int, inputs: Any) -> Tensor:
        """Logits `[R, n, V]` of a pass over entries `[R, n]` from the first one on; those of the
        first P - 1 of a frame mean nothing.

        Args:
            inputs: what else the decoder's own forward takes.
        """

    def facts(self, model: Any) -> ModelFacts:
        """See `OwnPasses.facts`."""
        return ModelFacts(
            model.config,
            (None,) * model.config.num_hidden_layers,
            self.vocab_size(model),
            max_positions=self.n_entries(model),
        )

    def compared(self, model: Any) -> tuple[Tensor, Tensor]:
        """See `OwnPasses.compared`: a frame by the model's own loop; one pass over it, and passes
        of three entries.
        """
        length = self.layout(model).frame
        states = draw_states(model, 2, *self.shape(model))
        ids = torch.zeros(2, self.n_before, dtype=torch.int64, device=model.device)
        given = {self.given: states} | ({"input_ids": ids} if self.has_ids else {})
        made = original(model, "generate")(
            **given,
            max_length=None,
            max_new_tokens=length,
            min_length=None,
            min_new_tokens=length,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        entries = torch.cat([ids, made.sequences[:, -length:-1]], 1)
        window = DepthWindow(self, model, states)
        found = []
        for width in (entries.shape[1], 3):
            window.reserve(*entries.shape)
            parts = entries.split(width, 1)
            starts = range(0, entries.shape[1], width)
            passes = [Pass(part, ids.new_full((2,), at)) for part, at in zip(parts, starts)]
            found.append(torch.cat([window.forward(each) for each in passes], 1))
        received = torch.stack(found)[:, :, self.n_before - 1 :]
        return torch.stack(made.logits, 1).expand_as(received), received

    def layout(self, model: Any) -> CodeFrames:
        """See `CausalLM.layout`."""
        return CodeFrames(self.n_entries(model) + 1 - self.n_before)

    def obstacles(self, call: GenerateCall) -> Iterator[str]:
        """See `CausalLM.obstacles`."""
        if call.guidance is not None:
            yield "guidance of a frame's codes"
        if call.n_columns != self.n_before:
            yield f"a frame that does not begin with {self.n_before} entries"
        if not bool(call.mask.all()):
            yield "an attention mask that hides the beginning of a frame"
        if self.given not in call.given["read"]:
            yield f"no {self.given}"

    def wrap(self, model: Any) -> Any:
        return DepthWindow(self, model)

    def open(self, call: GenerateCall) -> Any:
        states = call.others[self.given]
        if call.window is None:
            return DepthWindow(self, call.model, states)
        call.window.begin_frame(states)
        return call.window

    def prompt(self, call: GenerateCall) -> Prompt:
        """See `CausalLM.prompt`: the frame's beginning, then the codes of the frame before."""
        own = call.prompt()
        layout = self.layout(call.model) if own.layout is None else own.layout
        earlier = call.earlier
        if earlier is None or [*earlier.shape] != [len(call.ids), call.length]:
            return replace(own, layout=layout)
        tokens = torch.cat([own.tokens, earlier.to(own.tokens.device)], 1)
        return replace(
            own,
            tokens=tokens,
            lengths=torch.full_like(own.lengths, tokens.shape[1]),
            layout=layout,
            n_shown=int(earlier.shape[1]),
        )


class SharedLayers(DepthDecoder):
    """A kind whose books have embeddings and heads of their own, and all of them the same layers,
    which the fused decoder may run.
    """

    @abstractmethod
    def embed(self, model: Any, entries: Tensor, first: int, states: Tensor) -> Tensor:
        """What the decoder reads, `[R, n, D]`, of entries `[R, n]` from the first one on."""

    def enter(self, model: Any, embedded: Tensor) -> Tensor:
        """What its layers read of that."""
        return embedded

    def run_body(self, model: Any, **inputs: Any) -> Any:
        """The output of the decoder's own forward, without heads."""
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
