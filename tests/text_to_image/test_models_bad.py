"""Checkpoints, options and prompts that are refused before any pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.loading.sources import content_hash
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.pipelines.text_to_image.registry import find_image_family, find_source

Builder = Callable[[str], Path]


@pytest.fixture
def copy(built: Builder, tmp_path: Path) -> Builder:
    """Copies the folder of a family's checkpoint."""

    def make(family: str) -> Path:
        source = built(family)
        return shutil.copytree(source if source.is_dir() else source.parent, tmp_path / family)

    return make


def _edit_weights(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Edit the weights of a folder."""
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def _add(folder: Path, *names: str) -> None:
    """Add tensors to the weights of a folder."""
    _edit_weights(folder, lambda weights: weights.update({n: torch.zeros(2) for n in names}))


def test_causal_masks_of_older_files_are_not_surplus(copy: Builder) -> None:
    folder = copy("imagegpt")
    _add(folder, "transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias")
    assert TextToImage.from_pretrained(folder)("").tokens.shape == (1, 64)


def test_chameleons_decoder_may_be_in_the_checkpoint_or_named(
    copy: Builder, tmp_path: Path
) -> None:
    folder = copy("chameleon")
    sibling = TextToImage.from_pretrained(folder)("blue cat", seed=0).images[0]
    file = (folder / "vqgan.ckpt").rename(tmp_path / "elsewhere.ckpt")
    named = TextToImage.from_pretrained(folder, decoder=file)("blue cat", seed=0).images[0]
    weights = torch.load(file)["state_dict"]
    inside = {f"model.vqmodel.{k}": v for k, v in weights.items() if not k.startswith("loss")}
    _edit_weights(folder, lambda own: own.update(inside))
    own = TextToImage.from_pretrained(folder)("blue cat", seed=0).images[0]
    assert sibling.tobytes() == named.tobytes() == own.tobytes()


def test_other_weights_are_other_images(copy: Builder) -> None:
    """Whatever an image depends on is in its hash: decoders and parts included."""
    folder = copy("chameleon")
    hashes = [content_hash(folder)]
    _edit_checkpoint(folder / "vqgan.ckpt")
    hashes += [content_hash(folder), content_hash(folder, folder / "config.json")]
    classes = copy("llamagen-c2i")
    for file in ("c2i_B_64.pt", "vq_ds16_c2i.pt"):
        hashes.append(content_hash(classes))
        _edit_checkpoint(classes / file)
    hashes.append(content_hash(classes))
    words = copy("llamagen-t2i")
    hashes.append(content_hash(words / "t2i_B_64.pt"))
    _add(words / "flan-t5-tiny", "extra")
    hashes.append(content_hash(words / "t2i_B_64.pt"))
    glm = copy("glm-image")
    hashes.append(content_hash(glm))
    _add(glm / "vision_language_encoder", "extra")
    assert len({*hashes, content_hash(glm)}) == len(hashes) + 1


def _edit_checkpoint(file: Path) -> None:
    content = torch.load(file)
    content["added"] = torch.ones(1)
    torch.save(content, file)


def test_two_transformers_or_two_tokenizers_are_a_question(copy: Builder) -> None:
    folder = copy("llamagen-c2i")
    shutil.copy(folder / "c2i_B_64.pt", folder / "c2i_L_64.pt")
    with pytest.raises(OptionError, match=r"one file .*transformer .*\['c2i_B_64.pt', 'c2i_L_64"):
        TextToImage.from_pretrained(folder, size=(64, 64))
    shutil.copy(folder / "vq_ds16_c2i.pt", folder / "vq_ds16_t2i.pt")
    with pytest.raises(OptionError, match="one file .*--decoder"):
        TextToImage.from_pretrained(folder / "c2i_B_64.pt", size=(64, 64))
    named = folder / "vq_ds16_c2i.pt"
    pipe = TextToImage.from_pretrained(folder / "c2i_B_64.pt", size=(64, 64), decoder=named)
    assert pipe("3").images[0].size == (64, 64)


def test_lumina_is_distinguished_from_chameleon(copy: Builder, tmp_path: Path) -> None:
    folder = copy("chameleon").rename(tmp_path / "some-model")
    assert find_image_family(folder, folder) == "chameleon"
    assert find_image_family(folder, "Alpha-VLLM/Lumina-mGPT-7B-768") == "lumina-mgpt"
    config = json.loads((folder / "config.json").read_text())
    for change in (
        {"architectures": ["ChameleonXLLMXForConditionalGeneration"]},
        {"model_type": "chameleon_xllmx"},
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        assert find_image_family(folder, folder) == "lumina-mgpt"


def test_an_id_of_the_hub_is_found_in_its_cache(
    built: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "models--owner--tiny"
    shutil.copytree(built("imagegpt"), home / "snapshots" / "abc")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_source("owner/tiny") == home / "snapshots" / "abc"
    assert TextToImage.from_pretrained("owner/tiny")("").tokens.shape == (1, 64)
    with pytest.raises(OptionError, match=r"received 'owner/other', which is in no cache"):
        find_source("owner/other")
