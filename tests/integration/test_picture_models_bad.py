"""What cannot be a picture model, or cannot be drawn by one: said before anything is made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmaccel.cli import main
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.picture_families import find_picture_family
from mmaccel.pipelines.picture_models import find_source
from mmaccel.pipelines.text_to_image import TextToImage
from tests.checkpoints import build_checkpoint

Builder = Callable[[str], Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Path of a family's tiny checkpoint, built once and not to be changed."""
    made: dict[str, Path] = {}

    def build(family: str) -> Path:
        if family not in made:
            made[family] = build_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return build


def _edit_weights(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: _edit_weights(folder, lambda weights: weights.pop(name))


def _add(folder: Path) -> None:
    _edit_weights(folder, lambda weights: weights.update({"extra.weight": torch.zeros(2)}))


def _add_computed(folder: Path) -> None:
    """Masks that older files of ImageGPT keep."""
    names = ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias")
    more = {name: torch.zeros(2) for name in names}
    _edit_weights(folder, lambda weights: weights.update(more))


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _retype(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))


SPOILT = [
    ("emu3", _drop("text_model.model.norm.weight"), UnsupportedModelError, "1 missing, .*norm"),
    ("emu3", _add, UnsupportedModelError, "1 surplus, such as extra.weight"),
    ("janus", _drop("model.generation_head.proj_out.weight"), UnsupportedModelError, "1 missing"),
    ("janus", _without("chat_template.jinja"), UnsupportedModelError, "expected a chat template"),
    ("janus", _without("processor_config.json"), UnsupportedModelError, "JanusProcessor"),
    ("chameleon", _without("vqgan.ckpt"), OptionError, "decoder: expected weights of VQGAN's"),
    ("chameleon", _retype, UnsupportedModelError, "expected words.json, config.json of janus"),
    ("chameleon", _drop("lm_head.weight"), UnsupportedModelError, "1 missing, such as lm_head"),
    ("imagegpt", _without("preprocessor_config.json"), UnsupportedModelError, "ImageProcessor"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "spoil", "kind", "said"), SPOILT, ids=[f"{s[0]}: {s[3][:30]}" for s in SPOILT]
)
def test_a_spoilt_checkpoint_is_refused_by_name(
    family: str, spoil: Callable[[Path], Any], kind: Any, said: str, built: Builder, tmp_path: Path
) -> None:
    folder = shutil.copytree(built(family), tmp_path / "spoilt")
    spoil(folder)
    with pytest.raises(kind, match=said):
        TextToImage.from_pretrained(folder)


def test_what_older_files_keep_is_no_surplus(built: Builder, tmp_path: Path) -> None:
    folder = shutil.copytree(built("imagegpt"), tmp_path / "older")
    _add_computed(folder)
    assert TextToImage.from_pretrained(folder)("").tokens.shape == (1, 64)


def test_a_palette_of_another_length_is_refused(built: Builder, tmp_path: Path) -> None:
    folder = shutil.copytree(built("imagegpt"), tmp_path / "spoilt")
    file = folder / "preprocessor_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"clusters": content["clusters"][:5]}))
    with pytest.raises(UnsupportedModelError, match=r"palette \[32, 3\].* received \[5, 3\]"):
        TextToImage.from_pretrained(folder)


def test_chameleons_decoder_may_be_in_the_checkpoint_or_named(
    built: Builder, tmp_path: Path
) -> None:
    folder = shutil.copytree(built("chameleon"), tmp_path / "moved")
    beside = TextToImage.from_pretrained(folder)("blue cat").images[0]
    file = (folder / "vqgan.ckpt").rename(tmp_path / "elsewhere.ckpt")
    named = TextToImage.from_pretrained(folder, decoder=file)("blue cat").images[0]
    weights = torch.load(file)["state_dict"]
    inside = {f"model.vqmodel.{k}": v for k, v in weights.items() if not k.startswith("loss")}
    _edit_weights(folder, lambda own: own.update(inside))
    own = TextToImage.from_pretrained(folder)("blue cat").images[0]
    assert beside.tobytes() == named.tobytes() == own.tobytes()


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("janus", {"size": (512, 512)}, "size: expected 16x16, the only one of this model"),
        ("emu3", {"size": (30, 32)}, "size: expected multiples of 8, received 30x32"),
        ("lumina-mgpt", {"size": (64, 48)}, "size: expected multiples of 32"),
        ("glm-image", {"size": (100, 64)}, "size: expected multiples of 32"),
        ("llamagen-c2i", {"size": (64, 32)}, "size: expected a square"),
        ("imagegpt", {"size": (9, 9)}, "size: expected 8x8"),
        ("emu3", {"family": "janos"}, "family: expected one of words, janus"),
        ("llamagen-c2i", {"decoder": "/no/such.pt", "size": (64, 64)}, "weights: expected a file"),
    ],
    ids=str,
)
def test_options_a_model_cannot_serve(
    family: str, options: dict[str, Any], said: str, built: Builder
) -> None:
    with pytest.raises(OptionError, match=said):
        TextToImage.from_pretrained(built(family), **options)


@pytest.mark.parametrize(
    ("family", "size", "arguments", "code", "said"),
    [
        ("imagegpt", None, ["a fox"], 2, "prompt: expected none, as ImageGPT takes no captions"),
        ("imagegpt", None, ["--guidance", "2"], 2, "guidance_scale: expected 1"),
        ("glm-image", "64", ["a fox", "--guidance", "2"], 2, "guidance_scale: expected 1"),
        ("llamagen-c2i", "64", ["a fox"], 2, "prompt: expected the number of a class, 0..4"),
        ("llamagen-c2i", "64", ["5"], 2, "prompt: expected the number of a class, 0..4"),
        ("llamagen-t2i", "64", ["a " * 9], 2, "prompt: expected at most 8 tokens, received 9"),
        ("janus", None, ["red " * 120], 2, "positions: expected at most 128"),
        ("chameleon", None, [" "], 2, "prompt: expected a caption"),
        ("emu3", "64x", ["a fox"], 2, "--size: expected pixels such as 768 or 1024x768"),
        ("emu3", "a", ["a fox"], 2, "--size: expected pixels"),
    ],
    ids=str,
)
def test_what_the_command_line_refuses(
    family: str, size: str | None, arguments: list[str], code: int, said: str, built: Builder,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fixed = ["--model", str(built(family)), "--out", str(tmp_path / "out")]
    fixed += [] if size is None else ["--size", size]
    assert main(["generate", *arguments, *fixed]) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if said in line]
    assert len(lines) == 1 and not list(tmp_path.glob("out/*.png"))


def test_two_transformers_or_two_tokenizers_are_a_question(built: Builder, tmp_path: Path) -> None:
    folder = shutil.copytree(built("llamagen-c2i").parent, tmp_path / "two")
    shutil.copy(folder / "c2i_B_64.pt", folder / "c2i_L_64.pt")
    with pytest.raises(OptionError, match=r"one file .*transformer .*\['c2i_B_64.pt', 'c2i_L_64"):
        TextToImage.from_pretrained(folder, size=(64, 64))
    shutil.copy(folder / "vq_ds16_c2i.pt", folder / "vq_ds16_t2i.pt")
    with pytest.raises(OptionError, match="one file .*--decoder"):
        TextToImage.from_pretrained(folder / "c2i_B_64.pt", size=(64, 64))
    named = folder / "vq_ds16_c2i.pt"
    pipe = TextToImage.from_pretrained(folder / "c2i_B_64.pt", size=(64, 64), decoder=named)
    assert pipe("3").images[0].size == (64, 64)


def test_lumina_is_told_from_chameleon(built: Builder, tmp_path: Path) -> None:
    folder = shutil.copytree(built("chameleon"), tmp_path / "some-model")
    assert find_picture_family(folder, folder) == "chameleon"
    assert find_picture_family(folder, "Alpha-VLLM/Lumina-mGPT-7B-768") == "lumina-mgpt"
    config = json.loads((folder / "config.json").read_text())
    for change in (
        {"architectures": ["ChameleonXLLMXForConditionalGeneration"]},
        {"model_type": "chameleon_xllmx"},
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        assert find_picture_family(folder, folder) == "lumina-mgpt"


def test_doctor_says_what_draws(built: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    for family, said in (
        ("emu3", "generate draws with it as emu3"),
        ("glm-image", "tokens a picture"),
    ):
        wanted = ["--model", str(built(family))]
        assert main(["doctor", *wanted]) == 0
        assert said in " ".join(capsys.readouterr().out.split())


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
    with pytest.raises(OptionError, match=r"received 'owner/other' \(.*; check the spelling"):
        find_source("owner/other")
