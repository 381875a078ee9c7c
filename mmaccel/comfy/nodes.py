"""The table of nodes: a new node is one more entry here."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

from mmaccel.catalog import POLICIES
from mmaccel.comfy import host, media
from mmaccel.comfy.loading import (
    LOAD_IMAGES,
    LOAD_SPEECH,
    LOAD_TEXT_TO_VIDEO,
    LOAD_VIDEO,
    LOAD_VISION,
)
from mmaccel.comfy.methods import LAYER_INPUTS, METHOD_NODES, REDUCE, id_of
from mmaccel.comfy.ports import (
    Node,
    Port,
    advanced,
    choice,
    lines,
    number,
    reads,
    stripped,
    text,
    to_sentence,
    unset_number,
)
from mmaccel.limits import SEEDS
from mmaccel.options import SAMPLING_FIELDS, SamplingOptions
from mmaccel.pipelines.hosts.loading.placement import AUTO
from mmaccel.pipelines.image_to_text.pipeline import DEFAULT_TOKENS
from mmaccel.pipelines.text_to_image.model import choose_params
from mmaccel.samplers.noise import choose_one_seed, draw_new_seed
from mmaccel.samplers.sampling_params import SamplingParams

_OWN = "None takes what the model's authors recommend."
_SAMPLING = {  # field -> most, step
    "guidance_scale": (100, 0.1),
    "temperature": (100, 0.05),
    "top_k": (2**31 - 1, 1),
    "top_h": (1, 0.01),
    "eta_cutoff": (1, 0.0001),
    **dict.fromkeys(("top_p", "min_p"), (1, 0.01)),
}
_LATER = {"top_n_sigma", "top_h", "eta_cutoff", "entropy_temperature", "divergence_temperature"}
_STATS = Port("stats", "MMACCEL_STATS", "For MMAccel Stats.")
_POLICY = Port(
    "policy", "MMACCEL_POLICY", "How to decode; without one, an exact policy.", is_optional=True
)
_METHODS = (_POLICY, *LAYER_INPUTS)


def _sampling(*without: str, unset: str = _OWN) -> list[Port]:
    """A widget for each field of `SamplingOptions`; -1 is what `unset` says of None."""
    ports = []
    for each in fields(SamplingOptions):
        name = each.name
        if not each.metadata.get("help") or name in without:
            continue
        most, step = _SAMPLING.get(name, (1e6, 0.01))
        note = f"{to_sentence(each.metadata['help'])} {unset}"
        port = unset_number(name, None, note, -1 if step == 1 else -1.0, most, step)
        port = port if name == "guidance_scale" else advanced(port)
        ports.append(replace(port, is_optional=name in _LATER))
    return ports


def _seed(note: str) -> Port:
    note += " -1 draws one at every run. A browser counts exactly up to 9007199254740992; larger "
    note += "ones come out rounded."
    port = number("seed", 0, note, -1, SEEDS - 1)
    options = {**port.options, "control_after_generate": True}
    return replace(port, options=options, read=lambda seed: choose_one_seed(seed, draw_new_seed))


def _batch(note: str) -> Port:
    note += " at a time at most: more take more memory, and less time each."
    return number("batch_size", 1, note, 1, 256)


def _check(**values: Any) -> None:
    """Refuse sampling parameters that no model takes, before any model is loaded."""
    given = {name: values[name] for name in SAMPLING_FIELDS if name in values}
    choose_params(SamplingParams(), **given)


def _image_inputs(most: int) -> list[Port]:
    """The inputs of both nodes, for up to `most` images; a graph needs a model and a prompt."""
    optional = (
        lines(
            "negative_prompt",
            "",
            "What to steer away from, in all images; empty is the model's own. Needs a "
            "guidance_scale other than 1, and a model that takes it.",
            read=stripped,
        ),
        _seed("Of the first image; the second has seed + 1, and so on, as with mmaccel generate."),
        number(
            "num_images",
            1,
            "Images of each prompt; 0 is one too.",
            0,
            most,
            read=reads({0: None}),
        ),
        advanced(
            number(
                "batch_size",
                1,
                "Images decoded together: more take more memory, and less time each.",
                1,
                most,
            )
        ),
        *_sampling(),
    )
    return [
        Port("model", "MMACCEL_MODEL", "From MMAccel Load Model."),
        *_METHODS,
        lines(
            "prompt",
            "a red circle above a small blue square on grass",
            "What to draw. One prompt a line: several lines make a batch.",
        ),
        *(replace(each, is_optional=True) for each in optional),
    ]


GENERATE = Node(
    "MMAccelGenerateImage",
    "MMAccel Generate Image",
    "mmaccel",
    "Generates images from prompts under a decoding policy.",
    _image_inputs(4096),
    (Port("images", "IMAGE", "One image per prompt and count."), _STATS),
    media.runs(media.draw, "model"),
    _check,
)
COMPARE = Node(
    "MMAccelCompare",
    "MMAccel Compare",
    "mmaccel",
    "Generates the same images token by token and under a policy, and draws them side by "
    "side with what both cost, as mmaccel generate --compare does.",
    _image_inputs(64),  # that can be seen on one sheet
    (
        Port("sheet", "IMAGE", "Both, side by side, with the verdict."),
        Port("token_by_token", "IMAGE", "The images generated one token a pass."),
        Port("accelerated", "IMAGE", "The images generated under the policy."),
        replace(_STATS, tooltip="Of the accelerated run, for MMAccel Stats."),
    ),
    media.runs(partial(media.draw, is_compared=True), "model"),
    _check,
)
SPEAK = Node(
    "MMAccelGenerateSpeech",
    "MMAccel Generate Speech",
    "mmaccel/speech",
    "Says texts under a decoding policy.",
    (
        Port("speech_model", "MMACCEL_SPEECH_MODEL", "From MMAccel Load Speech Model."),
        *_METHODS,
        lines(
            "text",
            "the red bird sings in the garden",
            "What to say. One utterance a line: several lines make a batch, the shorter ones "
            "followed by silence.",
        ),
        text("voice", "", "For models that know several; empty is the usual one.", read=stripped),
        _seed("Of the first line; the second has seed + 1, and so on, as with mmaccel speak."),
        number(
            "max_seconds",
            0.0,
            "Cut longer ones; 0 is 30, or less where the model's context is shorter.",
            0,
            3600,
            0.5,
            read=reads({0: None}),
        ),
        _batch("Utterances decoded"),
        *_sampling("guidance_scale", "divergence_temperature"),
        advanced(
            unset_number(
                "repetition_penalty",
                None,
                f"Makes tokens that occurred less likely; 1 is none. {_OWN}",
                -1.0,
                10,
                0.05,
            )
        ),
    ),
    (Port("audio", "AUDIO", "One sound per line."), _STATS),
    media.runs(media.speak, "speech_model"),
    _check,
)
_CLIP = (
    Port("video", "VIDEO", "The clip, the given frames first."),
    Port("frames", "IMAGE", "The same, frame by frame."),
    _STATS,
)
PROMPTED = Node(
    "MMAccelTextToVideo",
    "MMAccel Text to Video",
    "mmaccel/video",
    "Makes a clip from a prompt under a decoding policy.",
    (
        Port(
            "text_to_video_model",
            "MMACCEL_TEXT_TO_VIDEO_MODEL",
            "From MMAccel Load Text-to-Video Model.",
        ),
        Port(
            "start",
            "IMAGE",
            "What the clip begins with, if anything: one image, or frames in a row.",
            is_optional=True,
        ),
        *_METHODS,
        lines(
            "prompt",
            "a red circle moves left over grass",
            "What the clip shows.",
        ),
        lines(
            "negative_prompt",
            "",
            "What it should not show; empty for the model's own unconditional prompt.",
            read=stripped,
        ),
        _seed("The same as with mmaccel animate."),
        *_sampling("divergence_temperature"),
    ),
    _CLIP,
    media.runs(media.animate, "text_to_video_model"),
    _check,
)
ANIMATE = Node(
    "MMAccelGenerateVideo",
    "MMAccel Generate Video",
    "mmaccel/video",
    "Continues an image or a clip under a decoding policy, as a prompt says if the model "
    "reads one.",
    (
        Port("video_model", "MMACCEL_VIDEO_MODEL", "From MMAccel Load Video Model."),
        Port(
            "start",
            "IMAGE",
            "What the clip begins with: one image, or frames in a row, of which the last nine "
            "count. They are made to fit, and cut where they are too wide or too high.",
        ),
        *_METHODS,
        _seed("The same as with mmaccel animate."),
        *_sampling("guidance_scale", "divergence_temperature"),
        lines(
            "prompt",
            "",
            "What happens in the clip, for a model that reads a prompt; empty for others.",
            read=stripped,
            is_optional=True,
        ),
    ),
    _CLIP,
    media.runs(media.animate, "video_model"),
    _check,
)
ANSWER = Node(
    "MMAccelAnswerQuestion",
    "MMAccel Answer Question",
    "mmaccel/vision",
    "Answers questions about images under a decoding policy, with all visual tokens or "
    "with fewer, and draws which patches stay.",
    (
        Port("vision_model", "MMACCEL_VISION_MODEL", "From MMAccel Load Vision-Language Model."),
        Port("image", "IMAGE", "What is asked about; several images belong to one question."),
        _POLICY,
        Port(
            "visual_tokens",
            "MMACCEL_VISUAL_TOKENS",
            "Which visual tokens stay; without one, all.",
            is_optional=True,
        ),
        *LAYER_INPUTS,
        lines(
            "question",
            "how many objects are there?",
            "What to ask. One question a line: several lines make a batch. An image goes before "
            "the question, or where <image> stands in it.",
        ),
        _seed("Of the first question; the second has seed + 1, and so on."),
        number("max_tokens", DEFAULT_TOKENS, "Cut longer answers.", 1, 2**16),
        _batch("Questions answered"),
        *_sampling(
            "guidance_scale",
            "divergence_temperature",
            unset="None is greedy for temperature, and keeps all tokens for the others.",
        ),
    ),
    (
        Port("text", "STRING", "One answer a line."),
        Port(
            "kept",
            "IMAGE",
            "The patches that stay, one picture a question; the image itself where all stay.",
        ),
        _STATS,
    ),
    media.runs(media.answer, "vision_model"),
    _check,
)
SHOW = Node(
    "MMAccelStats",
    "MMAccel Stats",
    "mmaccel",
    "Shows what a run guaranteed and what it cost: tokens, forward passes, seconds, seeds.",
    (replace(_STATS, tooltip="From Generate or Compare."),),
    (Port("text", "STRING", "The same as text."),),
    run=lambda stats: host.output(stats, ui={"text": (stats,)}),
    is_output=True,
)


def _generate_in_a_graph(*, policy: str, **values: Any) -> Any:
    """The graph of Load Model, the policy's node and Generate Image. ComfyUI keeps what these
    return, the loaded model above all, and shows their progress, previews and errors at this node.
    """

    def begin(node: Node, **links: Any) -> Any:
        known = [each.name for each in node.widgets]
        own = {n: value for n, value in values.items() if n in known and value is not None}
        return graph.node(node.id, **own, **links)

    graph = host.graph()
    made = begin(GENERATE, model=begin(LOAD_IMAGES).out(0))
    if policy != AUTO:
        made.set_input("policy", graph.node(id_of(policy, "Policy")).out(0))
    outputs = [made.out(k) for k in range(len(GENERATE.outputs))]
    return host.output(*outputs, expand=graph.finalize())


_INNER = {
    each.name: replace(each, is_optional=False)
    for each in (*LOAD_IMAGES.widgets, *GENERATE.widgets)
}
_OPTIONAL = ("negative_prompt", "num_images", "guidance_scale", "width", "height")

TEXT_TO_IMAGE = Node(
    "MMAccelTextToImage",
    "MMAccel Text to Image",
    "mmaccel",
    "Generates images from prompts in one node, which loads the model as well; the model "
    "stays loaded between runs.",
    (
        *(_INNER[name] for name in ("model", "prompt", "seed")),
        choice(
            "policy",
            AUTO,
            "How to decode, with the policy's own defaults; auto is exact and suits the model.",
            (AUTO, *POLICIES),
        ),
        *(replace(advanced(_INNER[name]), is_optional=True) for name in _OPTIONAL),
    ),
    GENERATE.outputs,
    _generate_in_a_graph,
    LOAD_IMAGES.check,
    fingerprint=LOAD_IMAGES.fingerprint,
    is_graph=True,
)
NODES: dict[str, Node] = {
    node.id: node
    for node in (
        TEXT_TO_IMAGE,
        LOAD_IMAGES,
        GENERATE,
        COMPARE,
        LOAD_SPEECH,
        SPEAK,
        LOAD_TEXT_TO_VIDEO,
        PROMPTED,
        LOAD_VIDEO,
        ANIMATE,
        LOAD_VISION,
        REDUCE,
        ANSWER,
        SHOW,
        *METHOD_NODES,
    )
}
