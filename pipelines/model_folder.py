"""Text-to-image models on disk: causal LM, picture tokenizer and word list in one folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

import mmaccel
from mmaccel.contracts import TokenModel, VisualTokenizer
from mmaccel.errors import MMAccelError, OptionError, UnsupportedModelError
from mmaccel.pipelines.caption_words import CaptionWords
from mmaccel.pipelines.window_model import CausalLMWindow
from mmaccel.pipelines.window_trial import check_by_trial
from mmaccel.tokenizers_vq.load import load_tokenizer

_CONFIGURING = ("config.json", "tokenizer.json", "words.json")


def find_folder(name: str | Path) -> Path:
    """The folder of a model: a path, or the name of a model that ships with the package.

    Raises:
        OptionError: neither; with the names that ship.
    """
    shelf = Path(mmaccel.__file__).parent / "demo" / "weights"
    if isinstance(name, str | Path):
        for folder in (shelf / name, Path(name)):
            if (folder / "config.json").is_file():
                return folder
    shipped = sorted(f.parent.name for f in shelf.glob("*/config.json"))
    raise OptionError(
        f"model: expected a folder with config.json, or one of: {', '.join(shipped) or '(none)'}; "
        f"received {name if name is None else str(name)!r}; check the spelling"
    )


def content_hash(folder: Path) -> str:
    """SHA-256 of what a model computes with, as 64 hexadecimal digits.

    Of its weights, and of the JSON files that say how they are used, in the order of their names.
    """
    digest = hashlib.sha256()
    weights = [file for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern)]
    for file in sorted([*weights, *(folder / name for name in _CONFIGURING)]):
        with file.open("rb") as opened:
            digest.update(file.name.encode("utf-8"))
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


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


def load_folder(
    folder: Path, device: torch.device | str, dtype: torch.dtype
) -> tuple[TokenModel, VisualTokenizer, CaptionWords]:
    """Load what `TextToImage` is made of. Nothing is downloaded.

    Args:
        folder: holds `config.json` and `model.safetensors` (the causal LM), `tokenizer.json` and
            `tokenizer.safetensors` (the picture tokenizer), and `words.json`.
        device: where to run.
        dtype: of the causal LM; the tokenizer stays in float32.

    Raises:
        OptionError: a file is missing, or such a device or dtype.
        UnsupportedModelError: no causal LM, or one of another vocabulary.
    """
    check_place(device, dtype)
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        tokenizer = load_tokenizer(folder).to(device)
        words = CaptionWords.load(folder, tokenizer.vocab_size)
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        if isinstance(error, MMAccelError):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise UnsupportedModelError(
            f"model: expected tokenizer.json, tokenizer.safetensors and words.json in {folder} as "
            f"they were written, received files that cannot be read ({reason}); copy them again"
        ) from error
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        model, loaded = found
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UnsupportedModelError(
            f"model: expected a causal LM in {folder}, received one that transformers refuses "
            f"({reason}); give the folder that save_pretrained wrote"
        ) from error
    lacking = sorted(loaded["missing_keys"])
    if lacking:
        raise UnsupportedModelError(
            f"model: expected all weights in {folder}, received none for {lacking[0]}"
            f"{f' and {len(lacking) - 1} more' if lacking[1:] else ''}; copy the folder again"
        )
    if model.config.vocab_size != words.vocab_size:
        raise UnsupportedModelError(
            f"model: expected a vocabulary of {words.vocab_size} ids (picture tokens, special ids "
            f"and words), received {model.config.vocab_size}; the files do not belong together"
        )
    check_by_trial(model.to(device).eval(), CausalLMWindow(model))
    window = CausalLMWindow(model, vocab_size=tokenizer.vocab_size)
    return window, tokenizer, words
