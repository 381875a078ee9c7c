"""Features of images, clips and speech of the demo models, by small networks that were trained to
name what is in them. A Fréchet or kernel distance needs an extractor that knows its items; these
know the items of this package alone, and no distance over them compares with a published one.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mmaccel.catalog import DEMO_WEIGHTS
from mmaccel.errors import ShapeError


class Features(nn.Module):
    """A network whose features have mean 0 and deviation 1 over the training items.

    Attributes:
        folder: name of the folder of its weights.
        shape: of an item.
        width: D, how many features.
        batch: items extracted together.
    """

    folder: ClassVar[str]
    shape: ClassVar[tuple[int, ...]]
    width: ClassVar[int]
    batch: ClassVar[int]
    mean: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(self.width, dtype=torch.float32))
        self.register_buffer("scale", torch.ones(self.width, dtype=torch.float32))

    def raw(self, items: Tensor) -> Tensor:
        """Features `[N, D]` before they are made standard, of float items."""
        raise NotImplementedError

    def forward(self, items: Tensor) -> Tensor:
        """Features `[N, D]` float32 of N items, float, or uint8 for 0..1.

        Raises:
            ShapeError: items of another size.
        """
        if items.shape[1:] != self.shape:
            wanted = ", ".join(map(str, ("B", *self.shape)))
            raise ShapeError(
                f"items: expected [{wanted}], received {list(items.shape)}; {self.folder} knows "
                "items of this package alone; give an extractor that knows yours"
            )
        whole = items if items.is_floating_point() else items.float() / 255
        return (self.raw(whole) - self.mean) / self.scale

    @classmethod
    def load(cls) -> Self:
        """The trained network, float32, in evaluation mode, without the heads it was trained by."""
        model = cls()
        state = load_file(DEMO_WEIGHTS / cls.folder / "model.safetensors")
        model.load_state_dict({name: state[name] for name in model.state_dict()})
        return model.eval()

    @torch.no_grad()
    def extract(self, items: Tensor) -> Tensor:
        """Features `[N, D]` of many items."""
        return torch.cat([self(part) for part in items.split(self.batch)])
