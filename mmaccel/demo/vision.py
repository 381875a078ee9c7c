"""Opens the embedded vision-language models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmaccel.checks import check_choice
from mmaccel.errors import OptionError

if TYPE_CHECKING:
    from transformers import LlavaNextForConditionalGeneration, LlavaNextProcessor

WEIGHTS = Path(__file__).parent / "weights"
NAMES = ("scenes-vqa",)


def load_demo(
    name: str, folder: str | Path | None = None
) -> tuple[LlavaNextForConditionalGeneration, LlavaNextProcessor]:
    """Opens an embedded vision-language model and its processor.

    >>> model, processor = mmaccel.load_demo("scenes-vqa")
    >>> inputs = processor(images=[image], text=["<image> what is here?"], return_tensors="pt")
    >>> answer = model.generate(**inputs, max_new_tokens=4)[:, inputs["input_ids"].shape[1] :]
    >>> processor.batch_decode(answer, skip_special_tokens=True)

    Args:
        name: "scenes-vqa".
        folder: other weights of the same kind, such as `full/generator` of a work folder.

    Returns:
        The model, float32, in evaluation mode, on the CPU; and its processor, which pads on the
        left. Token ids are [B, T]; see `mmaccel.demo.scenes_vqa.processor`.

    Raises:
        OptionError: another name, or a folder without weights.
        UnsupportedModelError: files that no library should open; see `check_folder`.
    """
    check_choice("name", name, NAMES)
    source = WEIGHTS / name if folder is None else Path(folder)
    if not (source / "model.safetensors").is_file():
        raise OptionError(
            f"folder: expected config.json and model.safetensors in {source}, received none; "
            "`python -m scripts.training vqa` trains them, `vqa-export` writes them there"
        )
    import torch
    from transformers import LlavaNextForConditionalGeneration

    from mmaccel.demo.scenes_vqa.processor import make_processor
    from mmaccel.pipelines.loading.headers import check_folder

    check_folder(source, "folder")
    model = LlavaNextForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
    return model.eval(), make_processor()
