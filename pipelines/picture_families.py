"""Which family of picture models a checkpoint belongs to, by its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.caption_words import read_masked

PICTURES = {  # family -> "module:function" of (path, place) to a `PictureModel`
    "words": "mmaccel.pipelines.model_folder:load_words",
    "masked-words": "mmaccel.pipelines.masked_words:load_masked_words",
    "janus": "mmaccel.pipelines.janus_pictures:load_janus",
    "emu3": "mmaccel.pipelines.emu3_pictures:load_emu3",
    "chameleon": "mmaccel.pipelines.chameleon_pictures:load_chameleon",
    "lumina-mgpt": "mmaccel.pipelines.lumina_pictures:load_lumina",
    "glm-image": "mmaccel.pipelines.glm_image_pictures:load_glm_image",
    "imagegpt": "mmaccel.pipelines.imagegpt_pictures:load_imagegpt",
    "llamagen": "mmaccel.pipelines.llamagen_pictures:load_llamagen",
}
_BY_TYPE = {"janus": "janus", "emu3": "emu3", "imagegpt": "imagegpt", "chameleon": "chameleon"}
_LUMINA = "chameleon_xllmx"  # the model_type of some Lumina-mGPT checkpoints
_FILES = (".pt", ".pth", ".safetensors")


def find_picture_family(source: Path, name: str | Path) -> str:
    """The family of a model, one of `PICTURES`.

    Args:
        source: where it lies.
        name: as it was asked for; Lumina-mGPT is told from Chameleon by it where the files do not.

    Raises:
        UnsupportedModelError: none of ours, with what was looked for.
    """
    is_file = source.is_file() and source.suffix in _FILES
    if is_file or any("c2i" in n or "t2i" in n for n in _list(source) if n.endswith(_FILES)):
        return "llamagen"
    if (source / "words.json").is_file():
        return "words" if read_masked(source) is None else "masked-words"
    kind = _read(source / "model_index.json").get("_class_name")
    if kind == "GlmImagePipeline":
        return "glm-image"
    config = _read(source / "config.json")
    own = str(config.get("model_type"))
    says = f"{config.get('architectures')} {Path(name).name} {config.get('_name_or_path')}".lower()
    if own == _LUMINA or (own == "chameleon" and ("lumina" in says or "xllmx" in says)):
        return "lumina-mgpt"
    if own in _BY_TYPE:
        return _BY_TYPE[own]
    found = kind or config.get("model_type") or f"files {sorted(_list(source))[:5]}"
    raise UnsupportedModelError(
        f"model: expected words.json, config.json of {', '.join(_BY_TYPE)}, model_index.json of "
        f"GlmImagePipeline, or a file of LlamaGen's, received {found} in {source}; name --family "
        "if it is one of these, or write a PictureModel (docs/models.md)"
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise UnsupportedModelError(
            f"model: expected JSON in {file}, received {error}; copy it again"
        ) from error
    return content if isinstance(content, dict) else {}


def _list(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()] if folder.is_dir() else [folder.name]
