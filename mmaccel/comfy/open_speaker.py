"""The node that loads a model that speaks, and what it hands on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmaccel.comfy.coded_model import check_coded, coded_files, coded_state
from mmaccel.comfy.kept_models import KeptModels, state_of
from mmaccel.comfy.open_model import AUTO, CUDA_GRAPHS, place_widgets
from mmaccel.comfy.table import PREFIX, SPEAKER, Host, Made, NodeSpec, Output, Widget
from mmaccel.pipelines.engine import UseGraphs
from mmaccel.pipelines.speech_models import CODECS, SPEECH
from mmaccel.pipelines.text_to_speech import TextToSpeech


@dataclass(frozen=True, eq=False)
class OpenSpeaker:
    """A loaded model that speaks.

    Attributes:
        name: as it was asked for.
        dtype: of the language model.
        pipe: the model.
    """

    name: str
    dtype: str
    pipe: TextToSpeech


_kept: KeptModels[OpenSpeaker] = KeptModels()


def load_speaker(
    host: Host,
    *,
    model: str,
    codec: str,
    device: str,
    dtype: str,
    family: str | None,
    cuda_graphs: UseGraphs,
) -> Made:
    """Load a model that speaks, or hand out the one that is loaded already.

    Raises:
        OptionError: no such model, codec or device.
        UnsupportedModelError: nothing we know.
        MissingBackendError: a package that the codec needs is not installed.
    """
    place = host.device() if device == AUTO else device
    files = coded_files(model, codec)
    key = (model, codec, place, dtype, family, cuda_graphs, state_of(files))

    def load() -> OpenSpeaker:
        pipe = TextToSpeech.from_pretrained(
            model, codec=codec or None, device=place, dtype=getattr(torch, dtype), family=family,
            cuda_graphs=cuda_graphs,
        )  # fmt: skip
        return OpenSpeaker(model, dtype, pipe)

    return Made((_kept.find(key, host, place, files, load),))


LOAD_SPEAKER = NodeSpec(
    id=f"{PREFIX}LoadSpeechModel",
    title="MMAccel Load Speech Model",
    summary="Loads a model that speaks token by token, with its codec, and keeps both while they "
    "are in use.",
    inputs=(
        Widget(
            "model", "path", "HKUSTAudio/Llasa-1B",
            "A folder, or an id of the Hugging Face hub such as owner/name, which is downloaded.",
        ),
        Widget(
            "codec", "path", "",
            "What turns codes into sound: a folder or an id of the hub. Empty takes the one its "
            f"authors published ({', '.join(CODECS.values())}).",
        ),
        *place_widgets("language model"),
        Widget(
            "family", "choice", AUTO, "How the checkpoint is read; auto finds out.",
            choices=(AUTO, *SPEECH), stands_for=((AUTO, None),),
        ),
        CUDA_GRAPHS,
    ),
    outputs=(Output("speech_model", SPEAKER, "The loaded model."),),
    run=load_speaker,
    check=check_coded,
    fingerprint=coded_state,
    folder="speech",
)  # fmt: skip
