"""Pictures by LlamaGen checkpoints, as `mmaccel generate` and `TextToImage` make them.

Model: P. Sun et al., 2024 (arXiv 2406.06525). The authors draw classes with guidance 4 and top-k
2000, captions with guidance 7.5 and top-k 1000.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.checkpoint import Place
from mmaccel.pipelines.encoded_captions import NoNegatives
from mmaccel.pipelines.llamagen import resize
from mmaccel.pipelines.llamagen_captions import UNGUIDED, CaptionPictures, count_side, load_t5
from mmaccel.pipelines.llamagen_files import load_tokenizer, load_transformer
from mmaccel.pipelines.llamagen_window import LlamaGenWindow
from mmaccel.pipelines.pictures import to_images
from mmaccel.pipelines.weights_file import read_weights
from mmaccel.samplers.filters import Filters
from mmaccel.tokenizers_vq.grid import Grid
from mmaccel.tokenizers_vq.vqgan import VQGAN

if TYPE_CHECKING:
    from PIL.Image import Image

_STEP = 16  # pixels a token
_FILES = (".pt", ".pth", ".safetensors")


class ClassPictures(NoNegatives):
    """A `PictureModel` whose captions are class labels.

    Args:
        window: of a class-conditional transformer.
        tokenizer: VQ-16.
    """

    family, instead = "LlamaGen", UNGUIDED
    examples: tuple[str, ...] = ("207", "360", "387", "974", "88", "979", "417", "279")
    filters = Filters(guidance_scale=4.0, top_k=2000)

    def __init__(self, window: LlamaGenWindow, tokenizer: VQGAN) -> None:
        self.window, self.tokenizer = window, tokenizer
        self.layout = Grid(*tokenizer.grid, window.vocab_size)

    @property
    def size(self) -> tuple[int, int]:
        """See `PictureModel.size`."""
        rows, columns = self.tokenizer.grid
        return columns * self.tokenizer.step, rows * self.tokenizer.step

    def resize(self, size: tuple[int, int]) -> ClassPictures:
        """See `PictureModel.resize`: a square whose sides are multiples of 16 pixels."""
        side = count_side(size, self.tokenizer.step)
        model = resize(self.window.model, side**2)
        window = LlamaGenWindow(model, self.window.attention)
        return ClassPictures(window, self.tokenizer.resize((side, side)))

    def encode(self, caption: str) -> int:
        """The label's number.

        Raises:
            OptionError: no number, or no label.
        """
        text, n_classes = str(caption).strip(), self.window.model.config.num_classes
        if not text.isdecimal() or int(text) >= n_classes:
            raise OptionError(
                f"prompt: expected the number of a class, 0..{n_classes - 1} (ImageNet's order), "
                f"received {caption!r}; write for example 207"
            )
        return int(text)

    def prompt(
        self,
        encoded: Sequence[int],
        guided: bool,
        negatives: Sequence[int | None] | None = None,
    ) -> Prompt:
        """See `PictureModel.prompt`."""
        self.refuse_negatives(negatives)
        labels = torch.tensor(list(encoded), device=self.window.device)
        return replace(self.window.condition(labels, guided), layout=self.layout)

    def render(self, tokens: Tensor, captions: Sequence[str], seeds: Sequence[int]) -> list[Image]:
        """See `PictureModel.render`."""
        return to_images(self.tokenizer.decode(tokens))


def load_llamagen(source: Path, place: Place) -> ClassPictures | CaptionPictures:
    """Load a transformer of LlamaGen's authors, with the tokenizer (and T5) beside it.

    Args:
        source: a file such as `c2i_L_256.pt`, or a folder with one.
        place: where it goes; `decoder` names the tokenizer's file, such as `vq_ds16_c2i.pt`.

    Raises:
        OptionError: no such file, several, or a size that is no square.
        UnsupportedModelError: tensors that are missing, surplus or of another shape.
    """
    folder = source if source.is_dir() else source.parent
    file = _only(folder, r"[ct]2i", "transformer", "c2i_L_256.pt") if source.is_dir() else source
    decoder = place.decoder or _only(folder, r"^vq", "tokenizer (--decoder)", "vq_ds16_c2i.pt")
    named = re.search(r"_(256|384|512)\b", file.stem)
    side = int(named[1]) if named else 256
    rows = count_side(place.size or (side, side), _STEP)
    model = load_transformer(
        read_weights(file), block_size=rows**2, dtype=place.dtype, device=place.device
    )
    tokenizer = load_tokenizer(read_weights(decoder), (rows, rows)).to(place.device)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise UnsupportedModelError(
            f"model: expected a tokenizer of {model.config.vocab_size} codes, received "
            f"{tokenizer.vocab_size} in {decoder}; give the one of the same size"
        )
    window = LlamaGenWindow(model)
    if not model.config.caption_dim:
        return ClassPictures(window, tokenizer)
    return CaptionPictures(window, tokenizer, *load_t5(folder, place))


def _only(folder: Path, pattern: str, what: str, example: str) -> Path:
    """The file of a folder whose name begins with or has a pattern."""
    files = [f for f in sorted(folder.iterdir()) if f.suffix in _FILES]
    found = [f for f in files if re.search(pattern, f.stem)]
    found = [f for f in found if pattern.startswith("^") or not f.stem.startswith("vq")]
    if len(found) != 1:
        raise OptionError(
            f"model: expected one file with LlamaGen's {what} in {folder}, such as {example}, "
            f"received {[f.name for f in found] or 'none'}; name the file itself"
        )
    return found[0]
