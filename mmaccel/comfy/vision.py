"""The nodes that load a vision-language model, choose its visual tokens and ask about images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmaccel.catalog import REDUCERS, find_policy, make
from mmaccel.comfy.images import to_tensor
from mmaccel.comfy.load_model import LoadedModel, check_engine, describe_files, load_pipeline
from mmaccel.comfy.policies import NamedPolicy
from mmaccel.comfy.stats import RunRecord
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
    CUDA_GRAPHS,
    FUSED,
    POLICY_INPUT,
    SEEDS,
    STATS_OUTPUT,
    device_widgets,
    read_prompts,
    sampling_widgets,
    seed_widget,
)
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.image_to_text.loading import DEMO, check_model, find_vision_source
from mmaccel.pipelines.image_to_text.pipeline import DEFAULT_TOKENS, ImageToText, choose_sampling
from mmaccel.pipelines.image_to_text.prompts import check_questions
from mmaccel.pipelines.image_to_text.types import Answer
from mmaccel.pipelines.loading.hub import is_hub_id
from mmaccel.pipelines.loading.sources import content_files
from mmaccel.pipelines.runner.engine import UseGraphs
from mmaccel.reduction.visual_tokens.contract import TokenReducer, check_reducers
from mmaccel.samplers.window.jacobi import Jacobi

if TYPE_CHECKING:
    from PIL.Image import Image

_FOLDER = "vision"
_MOST_TOKENS = 2**16


def load_vision(host: Host, *, model: str, **options: Any) -> NodeResult:
    """Load a model with its processor, or return it from the cache.

    Raises:
        OptionError: no such model or device.
        UnsupportedModelError: a model that reads no images.
    """
    return load_pipeline(host, ImageToText, _files(model), model=model, **options)


def _files(model: str) -> list[Path]:
    source = find_vision_source(model)
    return content_files(source) if source.is_dir() else []


def check_load(
    *, model: str, device: str, dtype: str, cuda_graphs: UseGraphs, **others: Any
) -> None:
    """Check what can be checked before anything is loaded.

    Raises:
        OptionError: no such folder or device.
        UnsupportedModelError: a folder with another kind of model.
        MissingBackendError: CUDA graphs on a CPU.
    """
    if not is_hub_id(model):
        check_model(model)
    check_engine(device, dtype, cuda_graphs)


def describe_model_files(*, model: str, **others: Any) -> str:
    """A text that changes when the files of a model change; empty where they are on the hub."""
    if is_hub_id(model) and not Path(model).exists():
        return ""
    return describe_files(_files(model))


LOAD_VISION = NodeSpec(
    id=f"{PREFIX}LoadVisionModel",
    title="MMAccel Load Vision-Language Model",
    summary="Loads a model that answers questions about images, with its processor, and keeps both "
    "while they are in use.",
    inputs=(
        Widget(
            "model", "path", DEMO,
            f"{DEMO}, which ships with mmaccel, a folder with model and processor, or an id of the "
            "Hugging Face hub such as owner/name, which is downloaded.",
        ),
        *device_widgets("model"),
        CUDA_GRAPHS,
        FUSED,
    ),
    outputs=(Output("vision_model", VISION, "The loaded model."),),
    run=load_vision,
    check=check_load,
    fingerprint=describe_model_files,
    folder=_FOLDER,
)  # fmt: skip


@dataclass(frozen=True)
class Reducers:
    """Methods for visual tokens of different stages."""

    methods: tuple[TokenReducer, ...]


def choose_reducer(
    host: Host, *, visual_tokens: Reducers | None = None, **values: Any
) -> NodeResult:
    """A method, after those of another node.

    Raises:
        OptionError: a bad value, or two methods of one stage.
    """
    before = () if visual_tokens is None else visual_tokens.methods
    return NodeResult((Reducers(check_reducers([*before, _make(**values)])),))


def _make(*, method: str, keep: float, n_keep: int | None) -> Any:
    """The method of a node's widgets; a number comes before a fraction."""
    how_many: dict[str, Any] = {"keep": keep} if n_keep is None else {"n_keep": n_keep}
    return make("visual_tokens", method, **how_many)


def check_reducer(**values: Any) -> None:
    """Refuse a fraction outside its domain.

    Raises:
        OptionError: such a value.
    """
    _make(**values)


REDUCE = NodeSpec(
    id=f"{PREFIX}VisualTokens",
    title="MMAccel Visual Tokens",
    summary="Chooses which visual tokens a vision-language model computes. All methods are "
    "relaxed: the answer may differ from that of all tokens.",
    inputs=(
        Socket(
            "visual_tokens", VISUAL_TOKENS,
            "A method of another stage, to use both: one at the exit of the encoder, one inside "
            "the language model.",
            is_optional=True,
        ),
        Widget(
            "method", "choice", "dart",
            f"How the tokens that stay are chosen. {', '.join(list(REDUCERS)[:3])} are controls "
            "that look at nothing in the image.",
            choices=tuple(REDUCERS),
        ),
        Widget("keep", "float", 0.22, "The fraction of visual tokens that stays.", 0, 1, 0.01),
        Widget(
            "n_keep", "int", 0, "The number that stays, instead of keep; 0 takes keep.",
            0, 2**20, 1, stands_for=((0, None),),
        ),
    ),
    outputs=(
        Output("visual_tokens", VISUAL_TOKENS, "For Answer Question, or another Visual Tokens."),
    ),
    run=choose_reducer,
    check=check_reducer,
    folder=_FOLDER,
)  # fmt: skip


def answer_questions(
    host: Host, *, vision_model: LoadedModel, image: Tensor, policy: NamedPolicy | None,
    visual_tokens: Reducers | None, question: str, seed: int, max_tokens: int, batch_size: int,
    **params: Any,
) -> NodeResult:  # fmt: skip
    """Answer questions about images, as `mmaccel answer` does with these settings.

    Args:
        image: `[B, height, width, 3]` float in 0..1; every question is about all B images.

    Raises:
        OptionError: a policy of another kind, or more positions than the model has.
        UnsupportedModelError: a method that the model cannot use; before any pass.
    """
    chosen = policy or NamedPolicy("jacobi", Jacobi())
    find_policy(chosen.name, "window")
    loaded, questions, images = vision_model.pipe, read_prompts(question), to_images(image)
    pipe = ImageToText(
        loaded.model, loaded.processor, policy=chosen.policy, cuda_graphs=loaded.cuda_graphs,
        fused=loaded.fused, compile=loaded.compile,
        visual_tokens=None if visual_tokens is None else visual_tokens.methods,
    )  # fmt: skip
    host.check_interrupt()
    total, done = len(questions) * max_tokens, 0

    def report(n_rows: int) -> None:
        nonlocal done
        host.check_interrupt()
        done += n_rows
        host.report(min(done, total - 1), total, None)

    made = pipe(
        images, questions, max_new_tokens=max_tokens, batch_size=batch_size,
        seed=[(seed + k) % SEEDS for k in range(len(questions))], on_token=report, **params,
    )  # fmt: skip
    host.report(total, total, None)
    record = RunRecord(vision_model, chosen, made.stats, list(map(_describe, made.answers)))
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
            "visual_tokens", VISUAL_TOKENS, "Which visual tokens stay; without one, all.",
            is_optional=True,
        ),
        Widget(
            "question", "text", "how many objects are there?",
            "What to ask. One question a line: several lines make a batch. An image goes before "
            "the question, or where <image> stands in it.", is_multiline=True,
        ),
        seed_widget("Of the first question; the second has seed + 1, and so on."),
        Widget(
            "max_tokens", "int", DEFAULT_TOKENS, "Cut longer answers.", 1, _MOST_TOKENS, 1,
        ),
        Widget(
            "batch_size", "int", 1,
            "Questions answered at a time at most: more take more memory, and less time each.",
            1, 256, 1,
        ),
        *sampling_widgets("-1 is greedy for temperature, and keeps all tokens for the others."),
    ),
    outputs=(
        Output("text", TEXT, "One answer a line."),
        Output(
            "kept", IMAGE,
            "The patches that stay, one picture a question; the image itself where all stay.",
        ),
        STATS_OUTPUT,
    ),
    run=answer_questions,
    check=check_answer,
    folder=_FOLDER,
)  # fmt: skip
