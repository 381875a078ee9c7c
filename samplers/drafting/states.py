"""What drafts ask of a token model: its hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from mmaccel.contracts import Pass

PromptReader: TypeAlias = Callable[[Pass, Tensor], None]
"""Receives a pass over prompts, and the states `[R, W, F]` of its entries."""


class StateModel(ABC):
    """A token model that hands out the hidden states from which it computes its logits."""

    last_states: Tensor | None = None
    coarse: Path | None = None

    @abstractmethod
    def keep_states(self, wanted: bool) -> None:
        """From now on passes store `last_states`, or do not."""

    @abstractmethod
    def output_matrix(self) -> Tensor:
        """`[V, D]`: a state's logits are its products with these rows, up to a bias."""


class LayerStates(StateModel):
    """A `StateModel` that also hands out states of its layers, and those of prompts."""

    @property
    @abstractmethod
    def n_layers(self) -> int:
        """Of the model."""

    @abstractmethod
    def keep_states(
        self,
        wanted: bool,
        layers: tuple[int, ...] = (),
        read_prompt: PromptReader | None = None,
    ) -> None:
        """As in `StateModel`, of the inputs of `layers`, side by side `[R, W, n D]`; none: the last
        states, which among layers are the input of number `n_layers`. `read_prompt` receives those
        of every pass over prompts, as `prefill` gets them; not where rows read one stored prompt,
        or the model processes the prompt itself.
        """

    @abstractmethod
    def input_matrix(self) -> Tensor:
        """`[V, D]`, embeddings of the tokens."""
