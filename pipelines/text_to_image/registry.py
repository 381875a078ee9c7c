"""Registry of text-to-image models: the family of a checkpoint, and its loader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mmaccel.catalog import IMAGE_MODELS, load
from mmaccel.checks import check_choice
from mmaccel.config_files import read_json
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.options import LoadOptions
from mmaccel.pipelines.hosts.loading.hub import USUAL
from mmaccel.pipelines.hosts.loading.lookalikes import refuse_lookalike
from mmaccel.pipelines.hosts.loading.refusal import refusing
from mmaccel.pipelines.hosts.loading.sources import find_model
from mmaccel.pipelines.hosts.loading.tasks import check_task, find_demos
from mmaccel.pipelines.models.scenes_vocabulary import read_masked

if TYPE_CHECKING:  # both need torch, which a listing of families does not
    from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig
    from mmaccel.pipelines.text_to_image.model import ImageModel

_BY_TYPE = {"janus": "janus", "emu3": "emu3", "imagegpt": "imagegpt", "chameleon": "chameleon"}
_BY_TYPE |= {"hart_transformer_t2i": "hart"}
_LUMINA = "chameleon_xllmx"  # the model_type of some Lumina-mGPT checkpoints
_FILES = (".pt", ".pth", ".safetensors")
_WITH_DECODER = ("chameleon", "lumina-mgpt", "llamagen", "var", "infinity")


def open_images(name: str | Path, load_config: LoadConfig) -> tuple[ImageModel, Path]:
    """A text-to-image model, and the path of its checkpoint."""
    if load_config.family is not None:
        check_choice("family", load_config.family, IMAGE_MODELS, hint="leave it out")
    check_task(name, "generate")
    source = find_source(name, load_config)
    check_task(source, "generate")
    family = load_config.family or find_image_family(source, name)
    if load_config.decoder is not None and family not in _WITH_DECODER:
        raise OptionError(
            f"decoder: expected none for {family}, whose checkpoints contain one, received "
            f"{str(load_config.decoder)!r}; leave it out"
        )
    load_family = load(IMAGE_MODELS[family])
    from mmaccel.pipelines.text_to_image.model import check_example
    from mmaccel.samplers.drafting.coarse import use_folder

    with refusing(
        f"a checkpoint of {family} in {source}", "files that do not fit", "copy the folder again"
    ):
        loaded: ImageModel = load_family(source, load_config)
        check_example(loaded)
    use_folder(loaded.window, source)
    return loaded, source


def find_source(name: str | Path, hub: LoadOptions = USUAL) -> Path:
    """The folder or file of a model: of a demo model, a path, or an id of the hub."""
    return find_model(name, find_demos(), hub=hub)


def find_image_family(source: Path, name: str | Path) -> str:
    """The family of a model, where files say it; else by `name`, which the user gave."""
    files = [name for name in _list(source) if name.endswith(_FILES)]
    if any(name.startswith("infinity_") for name in (source.name, *files)):
        return "infinity"
    if any(re.match(r"var_d\d", name) for name in files):
        return "var"
    is_file = source.is_file() and bool(files)
    if is_file or any("c2i" in name or "t2i" in name for name in files):
        return "llamagen"
    if (source / "words.json").exists():
        config = read_json(source / "config.json", may_lack=True)
        if config.get("class") == "NextScaleTransformer":
            return "scale-words"
        return "words" if read_masked(source) is None else "masked-words"
    pipeline = read_json(source / "model_index.json", may_lack=True).get("_class_name")
    if pipeline == "GlmImagePipeline":
        return "glm-image"
    config = read_json(source / "config.json", may_lack=True)
    config = config or read_json(source / "llm" / "config.json", may_lack=True)  # HART's
    model_type = str(config.get("model_type"))
    names = f"{config.get('architectures')} {Path(name).name} {config.get('_name_or_path')}".lower()
    is_lumina = "lumina" in names or "xllmx" in names
    if model_type == _LUMINA or (model_type == "chameleon" and is_lumina):
        return "lumina-mgpt"
    if model_type in _BY_TYPE:
        return _BY_TYPE[model_type]
    refuse_lookalike(str(name), source)
    received = pipeline or config.get("model_type") or f"files {sorted(_list(source))[:5]}"
    raise UnsupportedModelError(
        f"model: expected words.json, config.json of {', '.join(_BY_TYPE)}, model_index.json of "
        f"GlmImagePipeline, or a file of LlamaGen, VAR or Infinity, received {received} in "
        f"{source}; "
        f"{_advise(source, model_type)}"
    )


def _advise(source: Path, model_type: str) -> str:
    """What helps somebody who gives a folder or file that draws no images."""
    if source.suffix == ".gguf":
        return (
            "a GGUF file is read by transformers: AutoModelForCausalLM.from_pretrained(folder, "
            "gguf_file=...), then mmaccel.attach(model, policy)"
        )
    if (source / "config.json").is_file():
        return (
            f"if {model_type} generates text, load it with transformers and call mmaccel.attach("
            "model, policy); name --family if it is one of those above"
        )
    return "give the folder with its config.json, or name --family if it is one of these"


def _list(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()] if folder.is_dir() else [folder.name]
