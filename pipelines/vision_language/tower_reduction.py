"""What all changes of a vision tower's calls have in common: hooks, and a pause."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from mmaccel.pipelines.vision_language.tokens import Places
from mmaccel.pipelines.vision_language.visuals import Visual


class TowerReduction(ABC):
    """The encoding of one `generate` call, in which the vision tower computes less."""

    _is_paused = False

    @property
    @abstractmethod
    def ran(self) -> bool:
        """Whether the tower was called."""

    @property
    @abstractmethod
    def changed(self) -> bool:
        """Whether it computed less."""

    @property
    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """Tokens or patches of all images, and those that the tower computed last; zeros where they
        are not counted.
        """

    @abstractmethod
    def hook(self) -> Sequence[Any]:
        """Register the hooks of the tower; torch's handles of them."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block, the tower's calls compute less."""
        hooks = self.hook()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block, the tower computes everything."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @abstractmethod
    def find_left(
        self, visuals: Sequence[Visual], places: Sequence[Places]
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Which features are left in the prompt, and how many each stands for.

        Args:
            visuals: images, or videos, of one modality.

        Returns:
            `[n]` bool, True for features that are nothing of the tower's, and `[n]` float32, of
            each image; None where all features stay.

        Raises:
            UnsupportedModelError: features that were pooled or resized after the tower, if the
                method asks to drop some.
        """
