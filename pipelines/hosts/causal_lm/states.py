"""What drafts ask of a causal LM: the states that its head or its layers read, and its matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.contracts import TokenModel
from mmaccel.pipelines.hosts.causal_lm.compatibility import ModelFacts, read_weight
from mmaccel.samplers.drafting.states import LayerStates, PromptReader


class KeptStates(TokenModel, LayerStates):
    """A mix-in of `CausalLMWindow`, which has the facts of its model."""

    own_vocabulary = False  # whether its tokens are others than the model's
    facts: ModelFacts
    keeps_states = False
    kept_layers: tuple[int, ...] = ()
    read_prompt: PromptReader | None = None

    @property
    def n_layers(self) -> int:
        return len(self.facts.windows)

    def keep_states(
        self,
        wanted: bool,
        layers: tuple[int, ...] = (),
        read_prompt: PromptReader | None = None,
    ) -> None:
        self.keeps_states = wanted
        self.kept_layers = layers
        self.read_prompt = read_prompt
        self.last_states = None

    def output_head(self) -> Any:
        return self.model.get_output_embeddings()

    def output_matrix(self) -> Tensor:
        return read_weight(self.output_head()).to(self.device)[: self.vocab_size]

    def input_matrix(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.to(self.device)[: self.vocab_size]

    @contextmanager
    def keeping_states(self, is_prompt: bool) -> Iterator[None]:
        """Inside the block the model's own forward leaves its states in `last_states`, all of a
        prompt's, of which the head reads fewer.
        """
        kept: dict[int, Tensor] = {}

        def keep_input(layer: int) -> Callable[..., None]:
            def keep(module: Any, args: tuple[Tensor, ...], options: dict[str, Tensor]) -> None:
                kept[layer] = args[0] if args else options["hidden_states"]

            return keep

        def keep_output(decoder: Any, args: Any, output: Any) -> None:
            kept[self.n_layers] = output.last_hidden_state

        decoder = self.model.get_decoder()
        layers = self.kept_layers
        if not layers and is_prompt and self.read_prompt is not None:
            layers = (self.n_layers,)
        hooks = []
        for layer in layers:
            if layer == self.n_layers:
                hooks.append(decoder.register_forward_hook(keep_output))
                continue
            reader = decoder.layers[layer]
            hooks.append(reader.register_forward_pre_hook(keep_input(layer), with_kwargs=True))
        if not hooks:  # what the head reads
            hooks.append(
                self.output_head().register_forward_pre_hook(keep_input(0), with_kwargs=True)
            )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if kept:
            device = kept[min(kept)].device
            states = [kept[layer].to(device) for layer in layers or (0,)]
            self.last_states = torch.cat(states, -1)

    def lack_of_states(self) -> str:
        """Why it hands out no states of layers; empty where it does."""
        if self.own_vocabulary:
            return "its tokens have embeddings and a head of their own"
        layers = getattr(self.model.get_decoder(), "layers", None)
        is_known = isinstance(layers, nn.ModuleList) and len(layers) == self.n_layers
        return "" if is_known else "its decoder has no list of its layers"
