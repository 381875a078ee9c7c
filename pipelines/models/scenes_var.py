"""`scenes-var`: the words and images of `scenes`, drawn scale by scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, check_size, refuse_device_map
from mmaccel.pipelines.hosts.next_scale.folder import FOLDER
from mmaccel.pipelines.hosts.next_scale.model import NextScaleModel
from mmaccel.pipelines.hosts.next_scale.network import NextScaleTransformer
from mmaccel.pipelines.models.scenes import WordImages
from mmaccel.pipelines.models.scenes_vocabulary import CaptionWords
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.multi_scale import MultiScaleTokenizer, Scales, load_multi_scale
from mmaccel.weight_folders import open_folder


class ScaleWordImages(WordImages):
    """A next-scale model whose prompts are words of a closed list."""

    params = SamplingParams(guidance_scale=4.0, top_p=0.9)

    def make_layout(self, tokenizer: Any) -> Scales:
        return Scales(tokenizer.config.sides, tokenizer.vocab_size)


def load_scale_words(folder: Path, load_config: LoadConfig) -> ScaleWordImages:
    """Load a folder of `config.json`, `model.safetensors`, `words.json`, and its image
    tokenizer in float32, `tokenizer.json` and `tokenizer.safetensors`.
    """
    refuse_device_map(load_config, "scenes-var")
    tokenizer = load_multi_scale(folder).to(load_config.device)
    check_size(load_config.size, (tokenizer.size, tokenizer.size))
    words = CaptionWords.load(folder, tokenizer.vocab_size)
    window = NextScaleModel(open_network(folder, tokenizer, load_config), tokenizer.quantizer)
    if window.model.config.n_conditions != words.vocab_size - words.n_image_tokens:
        raise UnsupportedModelError(
            f"model: expected {words.vocab_size - words.n_image_tokens} conditions, as many as "
            f"words.json has, received {window.model.config.n_conditions}; the files do not belong "
            "together"
        )
    return ScaleWordImages(window, tokenizer, words)


def open_network(
    folder: Path, tokenizer: MultiScaleTokenizer, load_config: LoadConfig
) -> NextScaleTransformer:
    opened = open_folder(FOLDER, folder)
    config = opened.settings
    if config.condition != "text":
        raise UnsupportedModelError(
            f"model: expected a network of texts, as its prompts are words, received condition "
            f"{config.condition!r} in {FOLDER.config}; leave the family out"
        )
    asked = (config.sides, config.n_codes, config.code_width)
    given = tokenizer.config
    has = (given.sides, given.n_codes, given.code_width)
    if asked != has:
        raise UnsupportedModelError(
            f"model: expected a tokenizer of scales {list(asked[0])} with {asked[1]} codes of "
            f"width {asked[2]}, as {FOLDER.config} says, received {list(has[0])}, {has[1]} and "
            f"{has[2]}; the files do not belong together"
        )
    return opened.build(NextScaleTransformer).to(load_config.device, load_config.dtype)
