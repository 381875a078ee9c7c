"""What `train_generator` trains, unless told otherwise: the next-token model `scenes`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mmaccel.demo.scenes_generator import build_generator, picture_loss, validation_loss
from mmaccel.demo.scenes_words import CaptionWords
from mmaccel.demo.token_pool import TokenPool
from mmaccel.tokenizers_vq.load import load_tokenizer


class Task(Protocol):
    """A model to train: its weights, its batches, its loss.

    Attributes:
        options: what the log should say of it.
    """

    options: dict[str, Any]

    def build(self, start: str | None) -> Any:
        """A new model, float32; from the weights in the folder `start` where given."""
        ...

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """ids and labels [size, T] of batch `step`, the same whenever it is asked for."""
        ...

    def distinct(self, steps: int, size: int) -> int:
        """How many different examples the first `steps` batches hold."""
        ...

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        """Scalar to descend, nats."""
        ...

    def validate(self, model: Any, device: str) -> float:
        """Nats per token on examples that training never draws."""
        ...


class Scenes:
    """Captions and pictures of a work folder, read token by token.

    Args:
        work: holds `tokenizer/`, the pools `train` and `validation` with their tokens.
        emphasis: see `TokenPool`.
        one_shape: every batch as wide as the widest (a compiled model is compiled once).
    """

    def __init__(self, work: str | Path, emphasis: int = 1, one_shape: bool = False) -> None:
        self.options: dict[str, Any] = {}
        self.words = CaptionWords(load_tokenizer(Path(work) / "tokenizer").vocab_size)
        self.data = TokenPool(work, "train", self.words, emphasis=emphasis)
        self.width = self.data.width if one_shape else None
        held_out = TokenPool(work, "validation", self.words, drop=0.0)
        self.checks = [held_out.batch(k, 50) for k in range(10)]

    def build(self, start: str | None) -> Any:
        """See `Task`."""
        model = build_generator(self.words)
        if start is not None:
            model.load_state_dict(read_weights(start))
        return model

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """See `Task`."""
        return self.data.batch(step, size, self.width)

    def distinct(self, steps: int, size: int) -> int:
        """See `Task`."""
        return self.data.distinct(steps, size)

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        """See `Task`."""
        return picture_loss(model, ids, labels)

    def validate(self, model: Any, device: str) -> float:
        """See `Task`."""
        return validation_loss(model, self.checks, device)


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """Weights of a generator that `save_half` wrote, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
