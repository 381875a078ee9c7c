"""The family of depth decoders: windows along the codebooks of each frame of a speech model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.contracts import Layout, Prompt
from mmaccel.pipelines.causal_lm.compatibility import ModelFacts
from mmaccel.pipelines.causal_lm.own_passes import OwnPasses
from mmaccel.pipelines.depth.window import DepthWindow
from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.original_methods import original
from mmaccel.tokenizers_vq.frames import CodeFrames


class DepthDecoder(OwnPasses):
    """A kind of depth decoder, each call of whose `generate` makes the codes of one frame.

    Attributes:
        given: arguments of its `generate` that a frame is scored with, besides the ids.
        n_before: P.
    """

    name: ClassVar[str] = "depth"
    repeats_calls: ClassVar[bool] = True
    cause: ClassVar[str] = "; a sliding window shorter than a frame does that"
    given: ClassVar[tuple[str, ...]]
    n_before: ClassVar[int]

    @abstractmethod
    def vocab_size(self, model: Any) -> int:
        """V."""

    @abstractmethod
    def n_entries(self, model: Any) -> int:
        """The most entries of a pass: P and the codes but the last one."""

    @abstractmethod
    def score(
        self, model: Any, entries: Tensor, given: Mapping[str, Any], cache: Any = None
    ) -> Tensor:
        """One teacher-forced pass over entries of a frame, by the decoder's own forward.

        Args:
            model: the decoder.
            entries: `[R, n]` int64, P entries of the frame's beginning, then codes; those behind
                what the cache holds.
            given: by name, what the frame is scored with.
            cache: transformers', which takes the entries up; None: none does.

        Returns:
            Logits `[R, n, V]` of the codes that follow; those of the first P - 1 of a frame mean
            nothing.
        """

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
        of three entries over a cache.
        """
        from transformers import DynamicCache

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
        given = {name: example[name] for name in self.given}
        whole = self.score(model, entries, given)
        cache = DynamicCache()
        parts = [self.score(model, part, given, cache) for part in entries.split(3, 1)]
        received = torch.stack([whole, torch.cat(parts, 1)])[:, :, self.n_before - 1 :]
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
        yield from (f"no {name}" for name in self.given if name not in call.given["read"])

    def wrap(self, model: Any) -> Any:
        return DepthWindow(self, model)

    def open(self, call: GenerateCall) -> Any:
        given = {name: call.others[name] for name in self.given}
        return DepthWindow(self, call.model, given)

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
