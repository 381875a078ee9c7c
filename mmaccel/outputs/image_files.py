"""Image files: their names, and text chunks that say how they were generated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.options import SAMPLING_FIELDS
from mmaccel.outputs.whole_files import write_whole
from mmaccel.pipelines.models.scenes_vocabulary import split_words
from mmaccel.samplers.drafting.coarse import Coarse
from mmaccel.samplers.drafting.contract import DraftSource
from mmaccel.samplers.trees.contract import TreeShape

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmaccel.samplers.sampling_params import SamplingParams

_LISTED = ("dtype", "device", *(name for name in SAMPLING_FIELDS if name != "guidance_scale"))
_ALWAYS = ("guidance_scale", "temperature", "top_k", "top_p", "min_p")
_MAX_WORD = 20  # characters of a word in a file name
_MAX_BYTES = 60  # of a word, so that three of them, the seed and the rest fit into 255


def short_hash(settings: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits of a hash of settings, equal on every machine."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:8]


def image_name(
    seed: int, prompt: str, policy: str, settings: Mapping[str, Any], suffix: str = ".png"
) -> str:
    """A readable file name that sorts by seed: `0003-a-red-circle-jacobi-1c9f03ab.png`. Another
    prompt or other `settings` give another; of a policy `module:Name` it has the latter.
    """
    words = split_words(prompt)
    digits = short_hash({"words": words, **settings})
    shown = [_shorten("".join(c for c in word if c.isalnum())) for word in words[:3]]
    parts = filter(None, (*shown, policy_word(policy)))
    return "-".join([f"{seed:04d}", *parts, digits]) + suffix


def policy_word(name: str) -> str:
    """A policy's name for a file name: a short name, or what follows the module of another."""
    return _shorten("".join(c for c in name.rpartition(":")[2] if c.isalnum() or c == "-"))


def _shorten(word: str) -> str:
    """The beginning of a word, in whole characters."""
    return word[:_MAX_WORD].encode("utf-8")[:_MAX_BYTES].decode("utf-8", "ignore")


def hash_pixels(images: Sequence[Image]) -> str:
    digest = hashlib.sha256()
    for image in images:
        digest.update(f"{image.mode} {image.size}".encode() + image.tobytes())
    return digest.hexdigest()[:8]


def describe_settings(name: str, policy: Any, params: SamplingParams) -> dict[str, Any]:
    """A policy, by its short name and its fields, and sampling parameters, ready for JSON, without
    later rules that are not in use, so that files keep their names.
    """
    options = {field: _describe_value(value) for field, value in vars(policy).items()}
    given = {field: getattr(params, field) for field in SAMPLING_FIELDS}
    sampling = {field: v for field, v in given.items() if v is not None or field in _ALWAYS}
    return {"policy": name, "policy_options": options, **sampling}


def _describe_value(value: Any) -> Any:
    """A field's value, ready for JSON. Trees, and draft sources but a coarse model's, are shown."""
    if isinstance(value, DraftSource | TreeShape) and not isinstance(value, Coarse):
        return repr(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def human_line(facts: Mapping[str, Any], size: tuple[int, int]) -> str:
    """`facts` as text that Stable Diffusion tools read: the prompt, the negative prompt where there
    is one, and one line of settings.
    """
    policy_options = {name: v for name, v in facts["policy_options"].items() if v is not None}
    options = ", ".join(f"{name}={value}" for name, value in policy_options.items())
    settings = {
        "Steps": facts["tokens"],
        "Sampler": facts["policy"],
        "CFG scale": facts["guidance_scale"],
        "Seed": facts["seed"],
        "Size": f"{size[0]}x{size[1]}",
        "Model hash": facts["weights"][:10],
        "Model": facts["model"],
        "Policy": f"{facts['policy']}({options})",
        "Exactness": facts["exactness"],
        "Forward passes": facts.get("passes"),
        **{name.replace("_", " "): facts.get(name) for name in _LISTED},
        "Version": f"mmaccel {facts['versions']['mmaccel']}",
    }
    parts = [f"{name}: {_quoted(value)}" for name, value in settings.items() if value is not None]
    lines = [" ".join(facts["prompt"].split())]
    if facts.get("negative"):
        lines.append(f"Negative prompt: {' '.join(facts['negative'].split())}")
    return "\n".join([*lines, ", ".join(parts)])


def _quoted(value: Any) -> str:
    """The value of a setting, in quotes where it contains a separator of settings."""
    text = str(value)
    return json.dumps(text) if any(c in text for c in ',:"\n') else text


def write_png(file: Path, image: Image, facts: Mapping[str, Any]) -> None:
    """Write a PNG whose text chunks are `parameters` (for people) and `mmaccel` (JSON)."""
    write_whole(file, lambda path: path.write_bytes(to_png(image, facts)))


def to_png(image: Image, facts: Mapping[str, Any]) -> bytes:
    from PIL.PngImagePlugin import PngInfo

    info, data = PngInfo(), BytesIO()
    info.add_text("parameters", human_line(facts, image.size))
    info.add_text("mmaccel", json.dumps(dict(facts)))
    image.save(data, format="PNG", pnginfo=info)
    return data.getvalue()
