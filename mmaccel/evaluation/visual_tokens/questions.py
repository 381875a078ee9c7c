"""Questions about images: where they come from, what a model is asked, and which answer is right.

An answer is right if it is the expected one after `normalize`: case, runs of blanks and punctuation
at the end do not count, everything else does (exact match).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import show
from mmaccel.errors import OptionError
from mmaccel.limits import parse_json, read_lines
from mmaccel.pipelines.image_to_text.loading import open_vision_language
from mmaccel.pipelines.image_to_text.prompts import make_inputs, read_image
from mmaccel.pipelines.loading.checkpoint import LoadConfig
from mmaccel.pipelines.loading.sources import find_model

DEMO = "scenes-vqa"
ALL = "all"  # questions of all kinds together
_FIELDS = ("image", "question", "answer", "kind")


@dataclass(frozen=True)
class ImageQuestion:
    """A question about one image.

    Attributes:
        kind: accuracy is told for each.
        text: the question, without a placeholder for the image.
        answer: the right one.
        image: a file, a PIL image, or `[3, H, W]` uint8.
    """

    kind: str
    text: str
    answer: str
    image: Any


@dataclass(frozen=True)
class VisionModel:
    """A model with its processor.

    Attributes:
        model: of transformers, for images and text.
        processor: its own; pads on the left.
        is_demo: whether it is `scenes-vqa`, or other weights of it.
    """

    model: Any
    processor: Any
    is_demo: bool

    def encode(self, questions: Sequence[ImageQuestion]) -> dict[str, Any]:
        """Arguments of `generate` for a batch of questions, on the model's device."""
        images = [[_open(question.image)] for question in questions]
        inputs = make_inputs(self.processor, [question.text for question in questions], images)
        return dict(inputs.to(self.model.device))

    def decode(self, tokens: Any) -> list[str]:
        """The answers in generated tokens `[B, T]`."""
        texts: list[str] = self.processor.batch_decode(tokens, skip_special_tokens=True)
        return texts


def _open(image: Any) -> Any:
    """An image as a processor takes it; scenes are tensors."""
    return image if isinstance(image, Tensor) else read_image(image)


def open_model(name: str, device: Any, dtype: torch.dtype) -> VisionModel:
    """A model by its name.

    Args:
        name: "scenes-vqa"; a folder with weights of it, which has no tokenizer; or a folder or hub
            id of a vision-language model of transformers with its processor.
        device, dtype: of the model.

    Raises:
        OptionError: no such folder.
        UnsupportedModelError: a model or processor that transformers does not open.
        MissingBackendError: a package that its processor needs is not installed.
    """
    from mmaccel.demo.loading import load_demo

    folder = None if name == DEMO else find_model(name, {})
    if folder is None or (folder.is_dir() and not any(folder.glob("*token*"))):
        model, processor = load_demo(DEMO, folder)
        return VisionModel(model.to(device, dtype), processor, True)
    load_config = LoadConfig(device=device, dtype=dtype)
    return VisionModel(*open_vision_language(name, load_config)[:2], False)


def draw_questions(per_kind: int) -> list[ImageQuestion]:
    """Questions about scenes that no training saw, `per_kind` of each kind."""
    from mmaccel.demo.scenes_vqa.data import list_questions

    asked = list_questions(per_kind)
    return [ImageQuestion(q.kind, q.text, q.answer, image) for image, q in asked]


def read_questions(file: Path, per_kind: int) -> list[ImageQuestion]:
    """The first questions of each kind in a file.

    Args:
        file: a JSON object a line, with texts `image` (a path, relative to the file), `question`,
            `answer` and `kind`.
        per_kind: most questions of a kind.

    Raises:
        OptionError: no such file, a line that is none of this, or no line; with its number.
    """
    left: Counter[str] = Counter()
    found = []
    for number, line in enumerate(read_lines(file, "--data"), 1):
        if not line.strip():
            continue
        question = _read_line(file, number, line)
        left[question.kind] += 1
        if left[question.kind] <= per_kind:
            found.append(question)
    if not found:
        raise OptionError(f"--data: expected a question a line, received none in {str(file)!r}")
    return found


def _read_line(file: Path, number: int, line: str) -> ImageQuestion:
    try:
        facts = parse_json(line)
    except ValueError:
        facts = None
    is_told = isinstance(facts, dict) and all(isinstance(facts.get(f), str) for f in _FIELDS)
    if not is_told or facts["kind"] == ALL:
        raise OptionError(
            f"--data: expected an object with texts {', '.join(_FIELDS)} on each line, received "
            f'{show(line[:60])} on line {number}; kinds may have any name but "{ALL}"'
        )
    image = file.parent / facts["image"]
    if not image.is_file():
        raise OptionError(
            f"--data: expected an image file, received {str(image)!r} on line {number}; paths are "
            "relative to the folder of the file"
        )
    return ImageQuestion(facts["kind"], facts["question"], facts["answer"], image)


def normalize(text: str) -> str:
    """A text in lower case, with single blanks, without punctuation at its end."""
    return " ".join(text.casefold().split()).rstrip(" .,;:!?")


def is_right(given: str, question: ImageQuestion) -> bool:
    """Whether an answer is the expected one after `normalize`."""
    return normalize(given) == normalize(question.answer)


def digest_questions(questions: Iterable[ImageQuestion]) -> str:
    """Tells one list of questions from another; images are told apart by name alone."""
    rows = [
        [q.kind, q.text, q.answer, q.image.name if isinstance(q.image, Path) else ""]
        for q in questions
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def digest_weights(model: Any) -> str:
    """Tells one model from another: by names, shapes and some numbers of its parameters."""
    found = hashlib.sha256()
    for name, weight in model.named_parameters():
        some = weight.detach().flatten()[:: max(1, weight.numel() // 16)].float().cpu()
        found.update(f"{name}{tuple(weight.shape)}".encode() + some.numpy().tobytes())
    return found.hexdigest()[:16]
