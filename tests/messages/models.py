"""Checkpoints of speech, video and image models that are not what they should be; coarse models."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import mmaccel
from mmaccel import ImageToVideo, Jacobi, OptionError, TextToImage, TextToSpeech
from mmaccel.errors import AttachError, MissingBackendError, UnsupportedModelError
from mmaccel.pipelines.models import speech_tokens
from mmaccel.pipelines.transformers_release import CACHE
from tests.fixtures.checkpoints import make_tokenizer
from tests.fixtures.media import image
from tests.fixtures.shared import media_folders, new_folder
from tests.fixtures.video import SHAPE
from tests.fixtures.windows import build_janus, build_model, janus_prompts, prompts
from tests.messages.case import Refused
from tests.models.test_coarse_folders import open_llamagen, save_random

Change = Callable[[Path], object]


def _copy(folder: Path, change: Change | None = None) -> Path:
    """A copy that a case may change."""
    made: Path = shutil.copytree(folder, new_folder("copy") / folder.name)
    if change is not None:
        change(made)
    return made


# ------------------------------------------------------------------------------ speech


def _speech(model: str, codec: str, change: Change | None = None, **options: Any) -> Any:
    """Opening a speech model with a codec of the same family or of the other."""

    def call() -> Any:
        source, own = media_folders(model)[0], media_folders(codec)[1]
        folder = source if change is None else _copy(source, change)
        with mock.patch.object(speech_tokens, "check_windows"):  # what is refused, is before it
            return TextToSpeech.from_pretrained(folder, codec=own, **options)

    return call


def _codec(family: str, change: Change) -> Any:
    """Opening a speech model with a changed codec."""

    def call() -> Any:
        model, codec = media_folders(family)
        return TextToSpeech.from_pretrained(model, codec=_copy(codec, change))

    return call


def _snac_weights(folder: Path) -> None:
    """The weights of the other family's codec in place of its own."""
    (folder / "model.safetensors").unlink()
    shutil.copy(media_folders("orpheus")[1] / "pytorch_model.bin", folder)


def _more_codes(folder: Path) -> None:
    from transformers import Xcodec2Config, Xcodec2Model

    config = Xcodec2Config.from_pretrained(folder)
    config.quantization_levels = [2, 2, 2, 4]
    Xcodec2Model(config).save_pretrained(folder)


def _four_levels(folder: Path) -> None:
    from snac import SNAC

    file = folder / "config.json"
    shape = json.loads(file.read_text(encoding="utf-8")) | {"vq_strides": [8, 4, 2, 1]}
    file.write_text(json.dumps(shape), encoding="utf-8")
    torch.save(SNAC(**shape).state_dict(), folder / "pytorch_model.bin")


def _without_snac() -> Any:
    model, codec = media_folders("orpheus")
    with mock.patch.dict(sys.modules, {"snac": None}):
        return TextToSpeech.from_pretrained(model, codec=codec)


def _without_codes() -> Any:
    folder = new_folder("a tokenizer without codes")
    make_tokenizer({"<pad>": 0, "<unk>": 1}, 2, 30).save_pretrained(folder)
    return TextToSpeech.from_pretrained(folder, codec=media_folders("llasa")[1])


def _template(text: str | None) -> Change:
    def spoil(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        if text is not None:
            (folder / "chat_template.jinja").write_text(text, encoding="utf-8")

    return spoil


def _split_marker(folder: Path) -> None:
    """Keep the token in the vocabulary, but not among the added tokens."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    added = content["added_tokens"]
    content["added_tokens"] = [t for t in added if t["content"] != "<|SPEECH_GENERATION_START|>"]
    assert len(content["added_tokens"]) == len(added) - 1
    file.write_text(json.dumps(content), encoding="utf-8")


def _swap_codes(folder: Path) -> None:
    """Swap two codes; the first and the last stay."""
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    for old, new in (("<|s_3|>", "<|s_x|>"), ("<|s_5|>", "<|s_3|>"), ("<|s_x|>", "<|s_5|>")):
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")


_SPEECH = (
    Refused("an unknown family of speech", _speech("llasa", "llasa", family="bark"),
            ("family: expected one of llasa, orpheus",)),
    Refused("no package of the codec", _without_snac, ("pip install snac",), MissingBackendError),
    *(
        Refused(name, call, says, UnsupportedModelError)
        for name, call, says in (
            ("another family's tokenizer", _speech("llasa", "orpheus", family="orpheus"),
             ("expected a tokenizer that knows <custom_tok",)),
            ("another family's codec", _codec("llasa", _snac_weights),
             ("codec: expected the tensors of Xcodec2Model in", "missing, such as")),
            (
                "an empty folder for a codec",
                lambda: TextToSpeech.from_pretrained(
                    media_folders("orpheus")[0], codec=new_folder("no codec")
                ),
                ("codec: expected a JSON object in",),
            ),
            ("a tokenizer without a family's codes", _without_codes,
             ("with <|s_0|> or <custom_token_10>",)),
            ("fewer tokens than codes", _codec("llasa", _more_codes),
             ("a tokenizer that knows <|s_16|>",)),
            ("a codec of four levels", _codec("orpheus", _four_levels),
             ("three levels, strides [4, 2, 1]",)),
            ("no chat template", _speech("llasa", "llasa", _template(None)),
             ("chat_template is not set",)),
            ("a chat template that fails",
             _speech("llasa", "llasa", _template("{{ raise_exception('no') }}")),
             ("files that do not fit (",)),
            ("a marker in two tokens", _speech("llasa", "llasa", _split_marker),
             ("received a prompt that ends otherwise",)),
            ("codes in another order", _speech("llasa", "llasa", _swap_codes),
             ("received 24 and, 3 later, 29; give",)),
        )
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------ Cosmos


def _video(change: Change | None = None, codec: Change | None = None, run: bool = False) -> Any:
    """Opening Cosmos with a changed model or codec, and a call of it if it opens."""

    def call() -> Any:
        model, own = media_folders("cosmos")
        model = model if change is None else _copy(model, change)
        own = own if codec is None else _copy(own, codec)
        pipe = ImageToVideo.from_pretrained(model, codec=own)
        return pipe(image()) if run else pipe

    return call


def _weights(change: Callable[[dict[str, Tensor]], object]) -> Change:
    def apply(folder: Path) -> None:
        content = torch.load(folder / "model.pt")
        change(content["model"])
        torch.save(content, folder / "model.pt")

    return apply


def _fewer_tokens(weights: dict[str, Tensor]) -> None:
    for name in ("model.tok_embeddings.weight", "model.output.weight"):
        weights[name] = weights[name][:20].clone()


def _config(config: Any) -> Change:
    text = config if isinstance(config, str) else json.dumps(config)
    return lambda folder: (folder / "config.json").write_text(text, encoding="utf-8")


def _as_emu3(folder: Path) -> None:
    (folder / "model.pt").unlink()
    _config({"model_type": "emu3"})(folder)


def _other_encoder(folder: Path) -> None:
    torch.jit.script(torch.nn.Identity()).save(str(folder / "encoder.jit"))


YARN = {
    "apply_yarn": True, "original_latent_shape": [2, 2, 3],
    "yarn_scale": 2, "yarn_beta_fast": 4, "yarn_beta_slow": 1,
}  # fmt: skip
_KEY = "model.layers.{}.attention.wk.weight"
_NORM = "model.norm.weight"
_TEXT = "model.layers.0.cross_attention.wk.weight"
_COSMOS = tuple(
    Refused(f"Cosmos with {name}", call, says, UnsupportedModelError)
    for name, call, says in (
        ("half of the reading of text",
         _video(_weights(lambda w: w.update({_TEXT: torch.zeros(40, 2)}))),
         ("Missing key", "cross_attention")),
        ("a missing weight", _video(_weights(lambda w: w.pop(_KEY.format(1)))),
         ("Missing key", "layers.1")),
        ("a narrow norm", _video(_weights(lambda w: w.update({_NORM: torch.zeros(3)}))),
         ("size mismatch for model.norm.weight",)),
        ("fewer tokens than the codec", _video(_weights(_fewer_tokens), run=True),
         ("expected tokens [3, 2, 3] in 0..19",)),
        ("the codec for the model",
         lambda: ImageToVideo.from_pretrained(media_folders("cosmos")[1],
                                              codec=media_folders("cosmos")[1]),
         ("model.pt or model.safetensors, received",)),
        ("another model", _video(_as_emu3),
         ("received", "whose config.json names the type 'emu3'; give")),
        ("a decoder that is no TorchScript",
         _video(codec=lambda folder: (folder / "decoder.jit").write_bytes(b"PK\x03\x04")),
         ("expected TorchScript in ", "decoder.jit")),
        ("no decoder", _video(codec=lambda folder: (folder / "decoder.jit").unlink()),
         ("received no decoder.jit; give the folder",)),
        ("an encoder to floats", _video(codec=_other_encoder, run=True),
         ("expected an encoder to whole numbers",)),
        *(
            (f"the shape {shape!r}", _video(_config({"video_latent_shape": shape})),
             ("video_latent_shape",))
            for shape in ([1, 2, 3], [3, 2])
        ),
        *(
            (str(config), _video(_config({"video_latent_shape": SHAPE} | YARN | config)),
             says)
            for config, says in (
                ({"rope_theta": "500000"}, ("rope_theta in", "received '500000'")),
                ({"norm_eps": math.nan}, ("norm_eps in", "received nan")),
                ({"apply_yarn": "false"}, ("apply_yarn in", "received 'false'")),
                ({"yarn_scale": 0}, ("yarn_scale in",)),
                ({"yarn_beta_fast": 1}, ("yarn_beta_fast above yarn_beta_slow", "1 and 1")),
            )
        ),
    )
)  # fmt: skip


# ------------------------------------------------------------------------------ image models


@cache
def _llamagen() -> TextToImage:
    return open_llamagen(new_folder("llamagen with a coarse model"))


def _larger(drafts: Any) -> Any:
    """A grid of 8 columns with the coarse model of 4."""
    return lambda: _llamagen().resize((128, 128))(
        "1", policy=Jacobi(8, drafts() if callable(drafts) else drafts)
    )


def _other_matrix(change: Callable[[Tensor], Tensor]) -> Any:
    """A coarse model made for another output matrix."""

    def call() -> Any:
        pipe = _llamagen()
        matrix = change(pipe.model.output_matrix())
        window = type("Other", (), {"output_matrix": lambda self: matrix})()
        folder = new_folder("coarse")
        source = save_random(window, folder, pipe.image_model.layout)
        return pipe("1", policy=Jacobi(8, source))

    return call


def _janus(rows: Any = ((20, 21), (22, 23, 24)), **options: Any) -> Any:
    """Images of Janus in a call that only the original loop can serve."""

    def call() -> Any:
        model, inputs = build_janus(), janus_prompts([list(row) for row in rows])
        given = {"generation_mode": "image", "guidance_scale": 3.0, "do_sample": False} | options
        with mmaccel.attach(model, "jacobi", strict=True):
            return model.generate(**inputs, **given)

    return call


def _caches() -> Any:
    from transformers import DynamicCache

    return _janus(**{CACHE: DynamicCache()})()


def _training_janus() -> Any:
    model = build_janus()
    with mmaccel.attach(model, "jacobi", strict=True):
        model.model.language_model.layers[0].add_module("drop", torch.nn.Dropout(0.1))
        model.train()
        return model.generate(
            **janus_prompts([[20, 21]]), generation_mode="image", guidance_scale=3.0
        )


def _grids() -> Any:
    model, inputs = build_model("glm_image"), prompts("glm_image", [[26, 27, 28, 29]])
    with mmaccel.attach(model, "jacobi", strict=True):
        model.generate(**inputs, max_new_tokens=22, do_sample=False)
        return model.generate(**inputs, max_new_tokens=23, do_sample=False)


_IMAGES = (
    *(
        Refused(name, call, ("expected", "8 columns", "received", "4", "; make"), OptionError)
        for name, call in (
            ("a coarse model of another grid", _larger("coarse")),
            ("the same, by its folder",
             _larger(lambda: mmaccel.Coarse(str(_llamagen().model.coarse)))),
        )
    ),
    *(
        Refused(name, _other_matrix(change), ("drafts: expected", "; make one"))
        for name, change in (
            ("a coarse model of other weights", lambda matrix: matrix * 2),
            ("a coarse model of other words", lambda matrix: matrix[:-1]),
        )
    ),
    *(
        Refused(name, call, says, AttachError)
        for name, call, says in (
            ("Janus with n-grams before guidance", _janus(no_repeat_ngram_size=40),
             ("guidance that does not come first",)),
            ("scores of Janus", _janus(output_scores=True, return_dict_in_generate=True),
             ("output_scores",)),
            ("a cache for Janus", _caches, ("a cache given by the caller",)),
            ("Janus in training", _training_janus, ("training mode with dropout",)),
            ("more positions than Janus has", _janus([[20] * 115]),
             ("more positions than the model's 128",)),
            ("more tokens than GLM-Image's grids", _grids, ("more tokens than its grids have",)),
        )
    ),
)  # fmt: skip

CASES = (*_SPEECH, *_COSMOS, *_IMAGES)
