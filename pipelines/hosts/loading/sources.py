"""Model sources: a model by its name, and the files that determine its results."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from mmaccel.checks import suggest
from mmaccel.errors import OptionError
from mmaccel.options import LoadOptions
from mmaccel.pipelines.hosts.loading.hub import USUAL, download, is_hub_id
from mmaccel.pipelines.models.scenes_vocabulary import tokenizer_folder


def find_model(
    name: str | Path,
    shipped: Mapping[str, Path],
    option: str = "model",
    hub: LoadOptions = USUAL,
) -> Path:
    """Find the folder or file of a model.

    `name` is a path, a name in `shipped`, or an id of the hub, which is downloaded to its cache;
    messages name `option`.
    """
    if isinstance(name, str | Path) and str(name).strip():
        for path in [*([shipped[str(name)]] if str(name) in shipped else []), Path(name)]:
            if os.path.exists(path):  # False for a name that is too long, unlike Path.exists
                return path
        if is_hub_id(str(name)):
            return download(str(name), hub, option)
    known = f", or one of: {', '.join(shipped)}" if shipped else ""
    raise OptionError(
        f"{option}: expected a folder, a file, an id of the Hugging Face hub such as owner/name"
        f"{known}; received {name if name is None else str(name)!r}; "
        f"{suggest(name, shipped, 'check the spelling')}"
    )


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
_TOKENIZERS = ("vq", "vae", "infinity_vae")  # of LlamaGen, VAR, Infinity
_COARSE = "coarse.safetensors"  # drafts with it are no part of what a model's results are
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".jit")


def content_files(source: Path, decoder: Path | None = None) -> list[Path]:
    """The files that determine the results of a model.

    Of a folder its weights and configurations, subfolders' too, and a sibling's image tokenizer; of
    a file of weights also the image tokenizer and T5 next to it.
    """
    if source.is_file():
        folder = source.parent
        files = [source, *(f for f in _own_files(folder) if f.name.startswith(_TOKENIZERS))]
        folders = [path for path in folder.iterdir() if path.is_dir() and "t5" in path.name]
    else:
        files = _own_files(source)
        folders = [path for path in source.iterdir() if path.is_dir()]
        sibling = tokenizer_folder(source)
        if sibling != source:
            files += [path for path in _own_files(sibling) if path.stem == "tokenizer"]
    for inner in sorted(folders):
        files += _own_files(inner)
    return [*files, *([] if decoder is None else [decoder])]


def content_hash(source: Path, decoder: Path | None = None) -> str:
    """SHA-256 of `content_files`, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for file in content_files(source, decoder):
        with file.open("rb") as opened:
            digest.update(file.name.encode("utf-8"))
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _own_files(folder: Path) -> list[Path]:
    """Weights and configurations of a folder, without its subfolders and its coarse model."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != _COARSE]
    return [path for path in files if path.suffix in _WEIGHTS or path.name in _CONFIGURING]
