"""The family of depth decoders: windows along the codebooks of each frame of a speech model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.contracts import Layout, Pass, Prompt
from mmaccel.pipelines.causal_lm.compatibility import ModelFacts
from mmaccel.pipelines.causal_lm.own_passes import OwnPasses
from mmaccel.pipelines.causal_lm.route import run_body
from mmaccel.pipelines.depth.window import DepthWindow
from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.original_methods import original
from mmaccel.tokenizers_vq.frames import CodeFrames


class DepthDecoder(OwnPasses):
    """A kind of depth decoder, each call of whose `generate` makes the codes of one frame.

    Attributes:
        given: the argument of its `generate` that a frame is scored with, besides the ids.
        n_before: P.
    """

    name: ClassVar[str] = "depth"
    repeats_calls: ClassVar[bool] = True
    cause: ClassVar[str] = "; a sliding window shorter than a frame does that"
    given: ClassVar[str]
    n_before: ClassVar[int]

    @abstractmethod
    def vocab_size(self, model: Any) -> int:
        """V."""

    @abstractmethod
    def n_entries(self, model: Any) -> int:
        """The most entries of a pass: P and the codes but the last one."""

    @abstractmethod
    def embed(self, model: Any, entries: Tensor, first: int, states: Tensor) -> Tensor:
        """What the decoder reads, `[R, n, D]`, of entries `[R, n]` from the first one on.

        Args:
            states: of the frame, from the argument `given`.
        """

    def enter(self, model: Any, embedded: Tensor) -> Tensor:
        """What its layers read of that."""
        return embedded

    def run_body(self, model: Any, **inputs: Any) -> Any:
        """The output of the decoder's own forward, without heads."""
        return model.model(**inputs)

    @abstractmethod
    def score(self, model: Any, hidden: Tensor, first: int) -> Tensor:
        """Logits `[R, n, V]` of states `[R, n, D]`, each by the head of its book; those of the
        first P - 1 entries of a frame mean nothing.
        """

    def run(self, window: DepthWindow, entries: Tensor, first: int, inputs: Any) -> Tensor:
        """Logits `[R, n, V]` of a pass over entries `[R, n]` from the first one on.

        Args:
            inputs: what else its own forward takes.
        """
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

    @abstractmethod
    def example(self, model: Any, rows: int) -> dict[str, Any]:
        """Arguments of `generate` for a random frame, without its length."""

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
        length = self.n_entries(model) + 1 - self.n_before
        example = self.example(model, 2)
        made = original(model, "generate")(
            **example,
            max_length=None,
            max_new_tokens=length,
            min_length=None,
            min_new_tokens=length,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        codes = made.sequences[:, -length:]
        before = torch.zeros(2, self.n_before, dtype=torch.int64, device=codes.device)
        entries = torch.cat([example.get("input_ids", before), codes[:, :-1]], 1)
        window = DepthWindow(self, model, example[self.given])
        found = []
        for width in (entries.shape[1], 3):
            window.reserve(*entries.shape)
            parts = entries.split(width, 1)
            starts = range(0, entries.shape[1], width)
            passes = [Pass(part, codes.new_full((2,), at)) for part, at in zip(parts, starts)]
            found.append(torch.cat([window.forward(each) for each in passes], 1))
        received = torch.stack(found)[:, :, self.n_before - 1 :]
        return torch.stack(made.logits, 1).expand_as(received), received

    def layout(self, model: Any) -> Layout:
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
