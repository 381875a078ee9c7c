"""Registry of speech models: the family of a checkpoint, its loader and its codec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mmaccel.catalog import DEMO_WEIGHTS, SPEECH_MODELS, SPOKEN_MODELS, load
from mmaccel.checks import check_choice
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.options import LoadOptions
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, load_processor
from mmaccel.pipelines.hosts.loading.hub import USUAL
from mmaccel.pipelines.hosts.loading.refusal import refusing
from mmaccel.pipelines.hosts.loading.sources import find_model
from mmaccel.pipelines.hosts.loading.tasks import check_task
from mmaccel.pipelines.text_to_speech.types import SpeechModel

DEMO = "voices"
CODEC_FOLDER = "audio_tokenizer"  # where OmniVoice has its codec
CODECS = {
    "llasa": "HKUSTAudio/xcodec2-hf",
    "omnivoice": "eustlb/higgs-audio-v2-tokenizer",
    "orpheus": "hubertsiuzdak/snac_24khz",
}
"""Codecs that families' authors published; that of another family is in the model's folder."""
_MARKER_TOKENS = {  # of one family only
    "llasa": "<|s_0|>",
    "omnivoice": "<|text_start|>",
    "orpheus": "<custom_token_10>",
    "voices": "<|voice_0|>",
    "voices-masked": "<|say|>",
}


def open_speech(
    name: str | Path, codec: str | Path | None, load_config: LoadConfig
) -> tuple[SpeechModel, Path, Path]:
    """A speech model, the path of its checkpoint, and the path of its codec."""
    from transformers import AutoTokenizer

    from mmaccel.samplers.drafting.coarse import use_folder

    if load_config.family is not None:
        check_choice("family", load_config.family, SPEECH_MODELS, hint="leave it out")
    check_task(name, "speak")
    source = find_source(name, load_config)
    check_task(source, "speak")
    tokenizer = load_processor(AutoTokenizer, source, load_config)
    family = load_config.family or _find_family(source, tokenizer)
    parts = replace(load_config, revision=None, variant=None)
    usual = _find_codec(family, source)
    codec_source = find_model(usual if codec is None else codec, {}, "codec", parts)
    load_family = load(SPEECH_MODELS[family])
    with refusing(
        f"a checkpoint of {family} in {source} and its codec in {codec_source}",
        "files that do not fit",
        "copy both folders again",
    ):
        loaded: SpeechModel = load_family(source, tokenizer, codec_source, load_config)
        loaded.encode("a", None)
    use_folder(loaded.window, source)
    return loaded, source, codec_source


def find_source(name: str | Path, hub: LoadOptions = USUAL) -> Path:
    """The folder of a speech model: of one that ships, of a path, or of an id of the hub."""
    shipped = {demo: DEMO_WEIGHTS / demo for demo in SPOKEN_MODELS}
    folder = shipped.get(str(name))
    if folder is not None and not (folder / "model.safetensors").is_file():
        raise OptionError(
            f"model: expected the weights of {name} in {folder}, received none; give another "
            f"model, or train it: python -m scripts.training {name}"
        )
    return find_model(name, shipped, hub=hub)


def _find_codec(family: str, source: Path) -> str | Path:
    """The codec of a family whose caller names none."""
    if (source / CODEC_FOLDER).is_dir():
        return source / CODEC_FOLDER
    if family == "voices-masked" and not (source / "codec.json").is_file():
        return DEMO_WEIGHTS / DEMO
    return CODECS.get(family, source)


def _find_family(source: Path, tokenizer: Any) -> str:
    known = tokenizer.get_vocab()
    for family, token in _MARKER_TOKENS.items():
        if token in known:
            return family
    raise UnsupportedModelError(
        f"model: expected a tokenizer with {' or '.join(_MARKER_TOKENS.values())} "
        f"({', '.join(SPEECH_MODELS)}), received one of {len(known)} tokens without in {source}; "
        "attach a policy to the model itself (docs/attach.md), or write a SpeechModel "
        "(docs/speech.md)"
    )
