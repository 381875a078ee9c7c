"""Opens the embedded models that are transformers' own classes with tokenizer or processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmaccel.catalog import DEMO_WEIGHTS as WEIGHTS
from mmaccel.checks import check_choice
from mmaccel.errors import OptionError

NAMES = ("scenes-vqa", "recall")


def load_demo(name: str, folder: str | Path | None = None) -> tuple[Any, Any]:
    """Opens an embedded vision-language model and its processor, or a language model of long
    documents and its tokenizer: float32, on the CPU; both pad on the left.

    >>> model, processor = mmaccel.load_demo("scenes-vqa")
    >>> inputs = processor(images=[image], text=["<image> what is here?"], return_tensors="pt")
    >>> answer = model.generate(**inputs, max_new_tokens=4)[:, inputs["input_ids"].shape[1] :]
    >>> processor.batch_decode(answer, skip_special_tokens=True)

    Args:
        name: "scenes-vqa" or "recall".
        folder: other weights of the same kind, such as `full/generator` of a work folder.

    Returns:
        In evaluation mode, a `LlavaNextForConditionalGeneration` and its `LlavaNextProcessor`, or a
        `LlamaForCausalLM` and its tokenizer. Token ids are [B, T].
    """
    check_choice("name", name, NAMES)
    home = WEIGHTS / name
    source = home if folder is None else Path(folder)
    if not (source / "model.safetensors").is_file():
        raise OptionError(
            f"folder: expected config.json and model.safetensors in {source}, received none; "
            f"`python -m scripts.training {name}` trains them"
        )
    import torch
    from transformers import (
        LlamaForCausalLM,
        LlavaNextForConditionalGeneration,
        PreTrainedTokenizerFast,
    )

    from mmaccel.demo.scenes_vqa.processor import make_processor
    from mmaccel.pipelines.hosts.loading.refusal import check_folder

    check_folder(source, "folder")
    model: Any
    if name == "scenes-vqa":
        model = LlavaNextForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
        return model.eval(), make_processor()
    words = source if (source / "tokenizer.json").is_file() else home
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(words)
