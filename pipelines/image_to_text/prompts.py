"""Images and questions as a model's inputs: a processor's template, or `<image> question`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.checks import show
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import check_prompt
from mmaccel.pipelines.hosts.loading.pictures import choose_scale, open_picture
from mmaccel.pipelines.hosts.loading.refusal import refusing
from mmaccel.pipelines.image_to_video.preprocessing import upright_rgb
from mmaccel.pipelines.models.scenes_vocabulary import check_words

if TYPE_CHECKING:
    from PIL.Image import Image

MARK = "<image>"
_FEW_WORDS = 1000  # tokens of a vocabulary that has words and no pieces of others
_EXAMPLE = "how many objects are there?"


def read_image(source: Any, scale: int = 1) -> Image:
    """A PIL image, or the first page of a file's, as RGB, rotated as its file says."""
    from PIL import Image

    if isinstance(source, Image.Image):
        if not source.width or not source.height:
            raise OptionError(
                f"image: expected one with pixels, received {source.width}x{source.height}; give "
                "another"
            )
        return upright_rgb(source, "image")
    if not isinstance(source, str | Path):
        raise OptionError(
            f"image: expected a PIL image or the path of a file, received {show(source)}; open it "
            "with PIL.Image.open"
        )
    with open_picture(source) as opened:
        if scale > 1:
            opened.draft(None, (opened.width // scale, opened.height // scale))
        return upright_rgb(opened, "image")


def read_images(images: Any, n_questions: int) -> list[list[Image]]:
    """The images of each question, of one, a list for all questions, or one list a question."""
    many = list(images) if isinstance(images, list | tuple) else [images]
    are_lists = [isinstance(each, list | tuple) for each in many]
    has_lists = any(are_lists)
    if not many or (has_lists and not (all(are_lists) and all(many))):
        raise OptionError(
            f"images: expected an image, a list of images, or a list of them for each question, "
            f"received {show(images)}; give at least one image"
        )
    if has_lists and len(many) != n_questions:
        raise OptionError(
            f"images: expected {n_questions} lists, one for each question, received {len(many)}; "
            "give one flat list if all questions are about the same images"
        )
    lists = many if has_lists else [many]
    flat = [image for each in lists for image in each]
    scale = choose_scale(image for image in flat if isinstance(image, str | Path))
    read = [[read_image(image, scale) for image in each] for each in lists]
    return read if has_lists else read * n_questions


def check_questions(question: Any, tokenizer: Any = None) -> list[str]:
    """The questions of a call. A tokenizer of few words is asked whether it knows theirs."""
    texts = [question] if isinstance(question, str) else question
    if not isinstance(texts, Sequence) or not texts:
        raise OptionError(
            f"question: expected a text or a list of them, received {show(question)}; write one"
        )
    checked = [check_prompt(text, None, "a question") for text in texts]
    if tokenizer is not None and len(tokenizer) < _FEW_WORDS:
        known = sorted(word for word in tokenizer.get_vocab() if word.isalpha())
        words = re.findall("[a-z]+", " ".join(checked).replace(MARK, " ").lower())
        check_words("question", words, known, f"ask with these, such as {_EXAMPLE!r}")
    return checked


def check_places(question: str, n_images: int) -> None:
    """A question that says where its images go must name as many places."""
    n_places = question.count(MARK)
    if n_places and n_places != n_images:
        raise OptionError(
            f"images: expected {n_places}, one for each {MARK} of the question, received "
            f"{n_images}; leave {MARK} out to have all images before the question"
        )


def make_inputs(processor: Any, questions: Sequence[str], images: Sequence[Sequence[Image]]) -> Any:
    """What `generate` takes for questions and their images: `input_ids` `[B, T]` and others."""
    for question, own in zip(questions, images, strict=True):
        check_places(question, len(own))
    options = {"padding": True, "padding_side": "left"}
    with refusing(
        f"images and questions that a {type(processor).__name__} takes", "others",
        "give fewer images, or another size",
    ):  # fmt: skip
        if getattr(processor, "chat_template", None):
            pairs = zip(questions, images, strict=True)
            return processor.apply_chat_template(
                [_message(text, own) for text, own in pairs],
                add_generation_prompt=True, tokenize=True, return_dict=True,
                return_tensors="pt", processor_kwargs=options,
            )  # fmt: skip
        texts = [_plain_prompt(processor, q, len(own)) for q, own in zip(questions, images)]
        flat = [image for own in images for image in own]
        return processor(images=flat, text=texts, return_tensors="pt", **options)


def _message(question: str, images: Sequence[Image]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    texts = question.split(MARK)
    rest = list(images)
    if len(texts) == 1:
        parts = [{"type": "image", "image": image} for image in images]
        rest = []
    for text in texts:
        if text.strip():
            parts.append({"type": "text", "text": text.strip()})
        if rest:
            parts.append({"type": "image", "image": rest.pop(0)})
    return [{"role": "user", "content": parts}]


def _plain_prompt(processor: Any, question: str, n_images: int) -> str:
    """A prompt for a processor without a chat template."""
    token = getattr(processor, "image_token", None)
    if not isinstance(token, str):
        raise UnsupportedModelError(
            f"processor: expected a chat template, or image_token, received a "
            f"{type(processor).__name__} without; set processor.chat_template"
        )
    if MARK in question:
        return question.replace(MARK, token)
    return " ".join([*[token] * n_images, question])
