"""The nodes that load a speech model and speak texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.catalog import SPEECH_MODELS
from mmaccel.comfy.load_model import LoadedModel
from mmaccel.comfy.media import generate, load_node
from mmaccel.comfy.policies import NamedPolicy
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
    AUTO,
    NO_FLOAT,
    OWN,
    POLICY_INPUT,
    SEEDS,
    STATS_OUTPUT,
    read_prompts,
    sampling_widgets,
    seed_widget,
)
from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech
from mmaccel.pipelines.text_to_speech.plan import check_call
from mmaccel.pipelines.text_to_speech.registry import CODECS
from mmaccel.pipelines.text_to_speech.types import Speech, Utterance

LOAD_SPEAKER = load_node(
    "LoadSpeechModel",
    "Load Speech Model",
    "Loads a model that speaks token by token, with its codec, and keeps both while they are in "
    "use.",
    model="HKUSTAudio/Llasa-1B",
    codec="What turns codes into sound: a folder or an id of the hub. Empty takes the one its "
    f"authors published ({', '.join(CODECS.values())}).",
    part="language model",
    output=Output("speech_model", SPEAKER, "The loaded model."),
    pipeline=TextToSpeech,
    folder="speech",
    extra=(
        Widget(
            "family", "choice", AUTO, "How the checkpoint is read; auto finds out.",
            choices=(AUTO, *SPEECH_MODELS), stands_for=((AUTO, None),), is_advanced=True,
        ),
    ),
)  # fmt: skip


def generate_speech(
    host: Host, *, speech_model: LoadedModel, policy: NamedPolicy | None, text: str, voice: str,
    seed: int, **options: Any,
) -> NodeResult:  # fmt: skip
    """Speak texts, as `mmaccel speak` does with these settings.

    Raises:
        OptionError: a text the model cannot say, or a policy of another kind; before any pass.
    """
    texts = read_prompts(text)
    speech, record = generate(
        host, speech_model, policy, texts, len(texts), _describe,
        seed=[(seed + k) % SEEDS for k in range(len(texts))], voice=voice.strip() or None,
        **options,
    )  # fmt: skip
    sample_rate = speech_model.pipe.speech.sample_rate
    return NodeResult(({"waveform": pad_sounds(speech), "sample_rate": sample_rate}, record))


def _describe(made: Utterance) -> str:
    end = "" if made.is_finished else " (cut)"
    n = len(made.tokens)
    return f"seed {made.seed}: {made.seconds:.2f} s{end}, {n} tokens in {made.passes} forward " \
           f"passes: {made.text}"  # fmt: skip


def pad_sounds(speech: Speech) -> Tensor:
    """Utterances as ComfyUI's `[B, 1, samples]` float32, the shorter ones padded with silence."""
    longest = max(1, *(len(made.waveform) for made in speech.utterances))
    padded = torch.zeros(len(speech), 1, longest)
    for row, made in zip(padded, speech.utterances):
        row[0, : len(made.waveform)] = made.waveform
    return padded


def check_speech(*, text: str, seed: int, repetition_penalty: float | None, **values: Any) -> None:
    """Check what can be checked before a model is loaded.

    Raises:
        OptionError: no text, or a number outside its domain.
    """
    names = ("max_seconds", "temperature", "top_k", "top_p", "min_p")
    own = {name: values[name] for name in names}
    check_call(read_prompts(text), seed, repetition_penalty=repetition_penalty, **own)


SPEAK = NodeSpec(
    id=f"{PREFIX}GenerateSpeech",
    title="MMAccel Generate Speech",
    summary="Says texts under a decoding policy.",
    inputs=(
        Socket("speech_model", SPEAKER, "From MMAccel Load Speech Model."),
        POLICY_INPUT,
        Widget(
            "text", "text", "Dealing with family secrets is never easy.",
            "What to say. One utterance a line: several lines make a batch, the shorter ones "
            "followed by silence.", is_multiline=True,
        ),
        Widget("voice", "text", "", "For models that know several; empty is the usual one."),
        seed_widget(
            "Of the first line; the second has seed + 1, and so on, as with mmaccel speak."
        ),
        Widget(
            "max_seconds", "float", 0.0,
            "Cut longer ones; 0 is 30, or less where the model's context is shorter.",
            0, 3600, 0.5, stands_for=((0.0, None),),
        ),
        Widget(
            "batch_size", "int", 1,
            "Utterances decoded at a time at most: more take more memory, and less time each.",
            1, 256, 1,
        ),
        *sampling_widgets(),
        Widget(
            "repetition_penalty", "float", -1.0,
            f"Makes tokens that occurred less likely; 1 is none. {OWN}",
            -1, 10, 0.05, stands_for=NO_FLOAT, is_advanced=True,
        ),
    ),
    outputs=(
        Output("audio", AUDIO, "One sound per line."),
        STATS_OUTPUT,
    ),
    run=generate_speech,
    check=check_speech,
    folder="speech",
)  # fmt: skip
