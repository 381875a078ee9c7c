"""The node that asks questions about images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmaccel.comfy.images import to_tensor
from mmaccel.comfy.loading import LoadedModel
from mmaccel.comfy.methods import LAYER_INPUTS, NamedPolicy, Reducers
from mmaccel.comfy.progress import AnswerProgress
from mmaccel.comfy.runs import run_pipeline
from mmaccel.comfy.table import (
    IMAGE,
    PREFIX,
    TEXT,
    VISION,
    VISUAL_TOKENS,
    Host,
    NodeResult,
    NodeSpec,
    Output,
    Socket,
    Widget,
)
from mmaccel.comfy.widgets import (
    POLICY_INPUT,
    STATS_OUTPUT,
    batch_widget,
    read_prompts,
    sampling_widgets,
    seed_widget,
)
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.image_to_text.pipeline import DEFAULT_TOKENS, choose_sampling
from mmaccel.pipelines.image_to_text.prompts import check_questions
from mmaccel.pipelines.image_to_text.types import Answer
from mmaccel.samplers.noise import spread_seeds

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_TOKENS = 2**16
_GREEDY = "None is greedy for temperature, and keeps all tokens for the others."


def answer_questions(
    host: Host,
    *,
    vision_model: LoadedModel,
    image: Tensor,
    policy: NamedPolicy | None,
    visual_tokens: Reducers | None,
    kv_cache: Any = None,
    attention: Any = None,
    question: str,
    **options: Any,
) -> NodeResult:
    """Answer questions about images, as `mmaccel answer` does with these settings.

    Args:
        image: `[B, height, width, 3]` float in 0..1; every question is about all B images.

    Raises:
        OptionError: a policy of another kind, or more positions than the model has.
        UnsupportedModelError: a method that the model cannot use; before any pass.
    """
    questions = read_prompts(question)
    images = to_images(image)
    most = options.pop("max_tokens")
    seeds = spread_seeds(options.pop("seed"), len(questions))
    progress = AnswerProgress(host, len(questions) * most)
    loaded = vision_model.pipe

    def call(chosen: Any) -> tuple[Any, list[str]]:
        pipe = loaded.with_methods(
            policy=chosen,
            visual_tokens=None if visual_tokens is None else visual_tokens.methods,
            kv_cache=kv_cache,
            attention=attention,
        )
        made = pipe(
            images, questions, max_new_tokens=most, seed=seeds, on_token=progress, **options
        )
        return made, [_describe(answer) for answer in made.answers]

    made, record = run_pipeline(host, vision_model, policy, call)
    progress.finish()
    text = "\n".join(answer.text for answer in made.answers)
    return NodeResult((text, draw_answers(made.answers, images), record))


def to_images(image: Tensor) -> list[Image]:
    """ComfyUI's `[B, height, width, 3]` float in 0..1 as images."""
    from PIL import Image

    pixels = image[..., :3].clamp(0, 1).mul(255).round().byte().cpu()
    return [Image.fromarray(each.numpy()) for each in pixels]


def draw_answers(answers: Sequence[Answer], images: Sequence[Image]) -> Tensor:
    """`[A, height, width, 3]` float, the patches that stay for each answer; the `images` themselves
    where all stay, or where the tokens have no known places.
    """
    try:
        return to_tensor([answer.draw_kept() for answer in answers])
    except UnsupportedModelError:
        return to_tensor(list(images))


def _describe(made: Answer) -> str:
    end = "" if made.is_finished else " (cut)"
    return (
        f"{made.question} {made.text}{end}: {made.n_kept} of {made.n_visual} visual tokens, "
        f"{len(made.tokens)} tokens, {made.passes} forward passes, seed {made.seed}"
    )


def check_answer(
    *, question: str, seed: int, max_tokens: int, batch_size: int, **params: Any
) -> None:
    """Check what can be checked before a model is loaded.

    Raises:
        OptionError: no question, or a sampling parameter outside its domain.
    """
    check_questions(read_prompts(question))
    choose_sampling(**params)


ANSWER = NodeSpec(
    id=f"{PREFIX}AnswerQuestion",
    title="MMAccel Answer Question",
    summary="Answers questions about images under a decoding policy, with all visual tokens or "
    "with fewer, and draws which patches stay.",
    inputs=(
        Socket("vision_model", VISION, "From MMAccel Load Vision-Language Model."),
        Socket("image", IMAGE, "What is asked about; several images belong to one question."),
        POLICY_INPUT,
        Socket(
            "visual_tokens",
            VISUAL_TOKENS,
            "Which visual tokens stay; without one, all.",
            is_optional=True,
        ),
        *LAYER_INPUTS,
        Widget(
            "question",
            "text",
            "how many objects are there?",
            "What to ask. One question a line: several lines make a batch. An image goes before "
            "the question, or where <image> stands in it.",
            is_multiline=True,
        ),
        seed_widget("Of the first question; the second has seed + 1, and so on."),
        Widget(
            "max_tokens",
            "int",
            DEFAULT_TOKENS,
            "Cut longer answers.",
            1,
            _MOST_TOKENS,
            1,
        ),
        batch_widget("Questions answered"),
        *sampling_widgets(_GREEDY, without=("guidance_scale", "divergence_temperature")),
    ),
    outputs=(
        Output("text", TEXT, "One answer a line."),
        Output(
            "kept",
            IMAGE,
            "The patches that stay, one picture a question; the image itself where all stay.",
        ),
        STATS_OUTPUT,
    ),
    run=answer_questions,
    check=check_answer,
    folder="vision",
)
