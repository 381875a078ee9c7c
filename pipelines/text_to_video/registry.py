"""Opens text-to-video models: clips from prompts in a closed list of words."""

from __future__ import annotations

from pathlib import Path

from mmaccel.catalog import CLIP_MODELS, DEMO_WEIGHTS
from mmaccel.checks import check_choice
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.options import LoadOptions
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig
from mmaccel.pipelines.hosts.loading.hub import USUAL
from mmaccel.pipelines.hosts.loading.refusal import refusing
from mmaccel.pipelines.hosts.loading.sources import find_model
from mmaccel.pipelines.hosts.loading.tasks import PROMPTED_CLIPS, check_task, find_demos
from mmaccel.pipelines.models.scenes_vocabulary import read_clips
from mmaccel.pipelines.text_to_image.model import check_example
from mmaccel.pipelines.text_to_video.types import ClipModel
from mmaccel.samplers.drafting.coarse import use_folder

(DEMO,) = CLIP_MODELS
FAMILIES = ("words",)


def reads_prompts(name: str | Path) -> bool:
    """Whether a model's clips begin with a prompt; others continue frames."""
    folder = find_demos().get(str(name), Path(str(name)))
    return str(name) == DEMO or (folder.is_dir() and read_clips(folder) is not None)


def open_clips(name: str | Path, load_config: LoadConfig) -> tuple[ClipModel, Path]:
    """A text-to-video model, and the path of its checkpoint."""
    if load_config.family is not None:
        check_choice("family", load_config.family, FAMILIES, hint="leave it out")
    source = find_clips(name, load_config)
    check_task(source, PROMPTED_CLIPS)
    if read_clips(source) is None:
        raise UnsupportedModelError(
            f"model: expected words.json with n_frames and fps, received none in {source}; models "
            "that continue frames are opened by mmaccel.ImageToVideo"
        )
    from mmaccel.pipelines.models.moving_scenes import load_moving_words

    with refusing(f"a model of clips in {source}", "files that do not fit", "copy it again"):
        loaded = load_moving_words(source, load_config)
        check_example(loaded)
    use_folder(loaded.window, source)
    return loaded, source


def find_clips(name: str | Path, hub: LoadOptions = USUAL) -> Path:
    """The folder of a text-to-video model: of the demo model, a path, or an id of the hub."""
    demos = find_demos()
    if str(name) == DEMO and DEMO not in demos:
        raise OptionError(
            f"model: expected config.json and model.safetensors in {DEMO_WEIGHTS / DEMO}, received "
            f"none; `python -m scripts.training {DEMO}` trains them"
        )
    check_task(name, PROMPTED_CLIPS)
    return find_model(name, demos, hub=hub)
