"""Models of ours on disk: causal LM, picture tokenizer and word list in one folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from mmaccel.errors import MMAccelError, OptionError, UnsupportedModelError
from mmaccel.pipelines.caption_words import CaptionWords, tokenizer_folder
from mmaccel.pipelines.checkpoint import Place, check_size, load_model, unreadable
from mmaccel.pipelines.window_model import CausalLMWindow
from mmaccel.pipelines.window_trial import check_windows
from mmaccel.pipelines.word_pictures import WordPictures
from mmaccel.tokenizers_vq.load import load_tokenizer

_CONFIGURING = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "words.json",
    "model_index.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".jit")


def content_files(source: Path, decoder: Path | None = None) -> list[Path]:
    """The files of a model that decide what it computes.

    Args:
        source: a folder, of which the weights count and the JSON files that say how they are used,
            in the order of their names, those of the folders in it, and a picture tokenizer that
            lies beside it; or a file of weights, with LlamaGen's tokenizer and T5 beside it.
        decoder: a further file.
    """
    if source.is_file():
        folder = source.parent
        files = [source, *(f for f in _own_files(folder) if f.name.startswith("vq"))]
        folders = [path for path in folder.iterdir() if path.is_dir() and "t5" in path.name]
    else:
        files, folders = _own_files(source), [path for path in source.iterdir() if path.is_dir()]
        shelf = tokenizer_folder(source)
        if shelf != source:
            files += [path for path in _own_files(shelf) if path.stem == "tokenizer"]
    for inner in sorted(folders):
        files += _own_files(inner)
    return [*files, *([] if decoder is None else [decoder])]


def content_hash(source: Path, decoder: Path | None = None) -> str:
    """SHA-256 of what a model computes with, as 64 hexadecimal digits; see `content_files`."""
    digest = hashlib.sha256()
    for file in content_files(source, decoder):
        with file.open("rb") as opened:
            digest.update(file.name.encode("utf-8"))
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _own_files(folder: Path) -> list[Path]:
    """Weights and configurations that lie in a folder itself."""
    names = [path for path in sorted(folder.iterdir()) if path.is_file()]
    return [path for path in names if path.suffix in _WEIGHTS or path.name in _CONFIGURING]


def check_place(device: Any, dtype: Any) -> None:
    """Refuse a device that holds no numbers here, and a dtype no model computes in.

    Raises:
        OptionError: with what the machine says.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise OptionError(
            f"dtype: expected torch.float32, torch.bfloat16, torch.float16 or torch.float64, "
            f"received {dtype!r}; float32 keeps every promise"
        )
    try:
        float(torch.zeros(1, device=device, dtype=dtype))
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(
            f"device: expected a device of this machine, received {device!r} ({reason}); use cpu"
        ) from error


def load_words(folder: Path, place: Place) -> WordPictures:
    """Load a model of ours. Nothing is downloaded.

    Args:
        folder: holds `config.json` and `model.safetensors` (the causal LM), `tokenizer.json` and
            `tokenizer.safetensors` (the picture tokenizer), and `words.json`.
        place: where to run; the tokenizer stays in float32.

    Raises:
        OptionError: a file is missing, or such a device, dtype or size.
        UnsupportedModelError: no causal LM, or one of another vocabulary.
    """
    tokenizer, words = load_vocabulary(folder, folder, place)
    check_size(place, (tokenizer.size, tokenizer.size))
    model = load_decoder(folder, place, words.vocab_size)
    check_windows(model, CausalLMWindow(model))
    window = CausalLMWindow(model, vocab_size=tokenizer.vocab_size)
    return WordPictures(window, tokenizer, words)


def load_vocabulary(shelf: Path, folder: Path, place: Place) -> tuple[Any, CaptionWords]:
    """The picture tokenizer of one folder and the words of another.

    Raises:
        OptionError, UnsupportedModelError: as `load_words`.
    """
    try:
        tokenizer = load_tokenizer(shelf).to(place.device)
        words = CaptionWords.load(folder, tokenizer.vocab_size)
    except unreadable() as error:
        if isinstance(error, MMAccelError):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise UnsupportedModelError(
            f"model: expected tokenizer.json, tokenizer.safetensors and words.json in {shelf} as "
            f"they were written, received files that cannot be read ({reason}); copy them again"
        ) from error
    return tokenizer, words


def load_decoder(folder: Path, place: Place, n_ids: int) -> Any:
    """A decoder of `n_ids` ids.

    Raises:
        OptionError, UnsupportedModelError: as `load_words`.
    """
    from transformers import AutoModelForCausalLM

    model = load_model(AutoModelForCausalLM, folder, place)
    if model.config.vocab_size != n_ids:
        raise UnsupportedModelError(
            f"model: expected a vocabulary of {n_ids} ids (picture tokens, special ids and words), "
            f"received {model.config.vocab_size}; the files do not belong together"
        )
    return model
