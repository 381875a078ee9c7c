"""The family of depth decoders: windows along the codebooks of each frame of a speech model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.contracts import Layout, Prompt
from mmaccel.pipelines.causal_lm.compatibility import ModelFacts
from mmaccel.pipelines.causal_lm.family import CausalLM
from mmaccel.pipelines.depth.decoders import DECODERS
from mmaccel.pipelines.depth.window import DepthFrames, DepthWindow
from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.transformers_release import CACHE
from mmaccel.results import Generation


class DepthDecoderFamily(CausalLM):
    """Depth decoders of `DECODERS`, whose `generate` makes the codes of one frame.

    What the model that holds the decoder generates between two frames is its own affair. The codes
    of a row's last frame are kept as long as frames follow each other, for drafts that copy them.
    """

    name: ClassVar[str] = "depth"
    served: ClassVar[frozenset[str]] = frozenset(
        {"output_hidden_states", *(name for kind in DECODERS.values() for name in kind.given)}
    )
    gives_cache: ClassVar[bool] = False
    repeats_calls: ClassVar[bool] = True

    def __init__(self) -> None:
        self._earlier: Tensor | None = None  # [B, L], codes of the frames before

    def begin_calls(self) -> None:
        """See `CausalLM.begin_calls`."""
        self._earlier = None

    def check(self, model: Any) -> ModelFacts:
        """The facts of a decoder of a known kind; nothing is looked at."""
        decoder = DECODERS[model.config.model_type]
        return ModelFacts(
            model.config,
            (None,) * model.config.num_hidden_layers,
            decoder.vocab_size(model),
            decoder.n_entries(model) + 1,  # the last code is no entry
            frozenset(),
            CACHE,
            {},
        )

    def layout(self, model: Any) -> Layout:
        """See `CausalLM.layout`."""
        decoder = DECODERS[model.config.model_type]
        return DepthFrames(decoder.n_entries(model) + 1)

    def wrap(self, model: Any) -> Any:
        """A window over the model, without a frame."""
        return DepthWindow(model, DECODERS[model.config.model_type], {})

    def open(self, call: GenerateCall) -> Any:
        """See `CausalLM.open`."""
        decoder = DECODERS[call.model.config.model_type]
        given = {name: call.others[name] for name in decoder.given & call.given}
        earlier = self._find_earlier(call)
        n_earlier = 0 if earlier is None else earlier.shape[1]
        return DepthWindow(call.model, decoder, given, n_earlier)

    def prompt(self, call: GenerateCall) -> Prompt:
        """See `CausalLM.prompt`: behind the codes of the frame before, where there was one."""
        own = call.prompt()
        earlier = self._find_earlier(call)
        tokens = own.tokens
        n_shown = 0
        if earlier is not None:
            tokens = torch.cat([earlier.to(tokens.device), tokens], 1)
            n_shown = tokens.shape[1]
        return replace(
            own,
            tokens=tokens,
            lengths=torch.full_like(own.lengths, tokens.shape[1]),
            layout=self.layout(call.model),
            n_shown=n_shown,
        )

    def finish(self, made: Generation) -> None:
        """See `CausalLM.finish`."""
        self._earlier = made.tokens

    def _find_earlier(self, call: GenerateCall) -> Tensor | None:
        """Codes `[B, L]` of the frame before, of a call of as many rows and codes."""
        earlier = self._earlier
        if earlier is None or earlier.shape != (len(call.ids), call.length):
            return None
        return earlier
