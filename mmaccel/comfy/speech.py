"""The node that speaks texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.comfy.fields import Numbers, number
from mmaccel.comfy.loading import LoadedModel
from mmaccel.comfy.methods import LAYER_INPUTS, NamedPolicy
from mmaccel.comfy.runs import run_media
from mmaccel.comfy.table import (
    AUDIO,
    PREFIX,
    SPEAKER,
    Host,
    NodeResult,
    NodeSpec,
    Output,
    Socket,
    Widget,
)
from mmaccel.comfy.widgets import (
    OWN,
    POLICY_INPUT,
    STATS_OUTPUT,
    batch_widget,
    read_prompts,
    sampling_widgets,
    seed_widget,
)
from mmaccel.pipelines.text_to_speech.plan import check_call
from mmaccel.pipelines.text_to_speech.types import Speech, Utterance
from mmaccel.samplers.noise import spread_seeds


def generate_speech(
    host: Host,
    *,
    speech_model: LoadedModel,
    policy: NamedPolicy | None,
    text: str,
    voice: str,
    seed: int,
    **options: Any,
) -> NodeResult:
    """Speak texts, as `mmaccel speak` does with these settings.

    Raises:
        OptionError: a text the model cannot say, or a policy of another kind; before any pass.
    """
    texts = read_prompts(text)
    options["seed"] = spread_seeds(seed, len(texts))
    options["voice"] = voice.strip() or None
    speech, record = run_media(
        host, speech_model, policy, texts, rows=len(texts), describe=_describe, **options
    )
    sample_rate = speech_model.pipe.speech.sample_rate
    return NodeResult(({"waveform": pad_sounds(speech), "sample_rate": sample_rate}, record))


def _describe(made: Utterance) -> str:
    end = "" if made.is_finished else " (cut)"
    cost = f"{len(made.tokens)} tokens in {made.passes} forward passes"
    return f"seed {made.seed}: {made.seconds:.2f} s{end}, {cost}: {made.text}"


def pad_sounds(speech: Speech) -> Tensor:
    """Utterances as ComfyUI's `[B, 1, samples]` float32, the shorter ones padded with silence."""
    longest = max(1, *(len(made.waveform) for made in speech.utterances))
    padded = torch.zeros(len(speech), 1, longest, dtype=torch.float32)
    for row, made in zip(padded, speech.utterances):
        row[0, : len(made.waveform)] = made.waveform
    return padded


def check_speech(*, text: str, voice: str, batch_size: int, **values: Any) -> None:
    """Check what can be checked before a model is loaded.

    Raises:
        OptionError: no text, or a number outside its domain.
    """
    check_call(read_prompts(text), **values)


SPEAK = NodeSpec(
    id=f"{PREFIX}GenerateSpeech",
    title="MMAccel Generate Speech",
    summary="Says texts under a decoding policy.",
    inputs=(
        Socket("speech_model", SPEAKER, "From MMAccel Load Speech Model."),
        POLICY_INPUT,
        *LAYER_INPUTS,
        Widget(
            "text",
            "text",
            "the red bird sings in the garden",
            "What to say. One utterance a line: several lines make a batch, the shorter ones "
            "followed by silence.",
            is_multiline=True,
        ),
        Widget("voice", "text", "", "For models that know several; empty is the usual one."),
        seed_widget(
            "Of the first line; the second has seed + 1, and so on, as with mmaccel speak."
        ),
        Widget(
            "max_seconds",
            "float",
            0.0,
            "Cut longer ones; 0 is 30, or less where the model's context is shorter.",
            0,
            3600,
            0.5,
            stands_for=((0.0, None),),
        ),
        batch_widget("Utterances decoded"),
        *sampling_widgets(without=("guidance_scale", "divergence_temperature")),
        replace(
            number(
                "repetition_penalty",
                "float",
                None,
                f"Makes tokens that occurred less likely; 1 is none. {OWN}",
                Numbers(0.0, 10, 0.05, (-1.0, None)),
            ),
            is_advanced=True,
        ),
    ),
    outputs=(Output("audio", AUDIO, "One sound per line."), STATS_OUTPUT),
    run=generate_speech,
    check=check_speech,
    folder="speech",
)
