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

from mmaccel.cli import main
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.loading.sources import content_hash
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.pipelines.text_to_image.registry import find_image_family, find_source

Builder = Callable[[str], Path]


def _edit_weights(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Edit the weights of a folder."""
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def _drop(name: str, part: str = ".") -> Callable[[Path], None]:
    return lambda folder: _edit_weights(folder / part, lambda weights: weights.pop(name))


def _set(name: str, shape: list[int], part: str = ".") -> Callable[[Path], None]:
    more = {name: torch.zeros(shape)}
    return lambda folder: _edit_weights(folder / part, lambda weights: weights.update(more))


def _overwrite(name: str, content: bytes, old: str | None = None) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        if old is not None:
            (folder / old).unlink()
        (folder / name).write_bytes(content)

    return spoil


_VLM, _QUERY = "vision_language_encoder", "encoder.block.0.layer.0.SelfAttention.q.weight"
_GLM_LAYER = "transformer_blocks.0.attn1.to_q.weight"


def _add_computed(folder: Path) -> None:
    """Add the causal masks of older files of ImageGPT."""
    names = ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias")
    more = {name: torch.zeros(2) for name in names}
    _edit_weights(folder, lambda weights: weights.update(more))


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _retype(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))


_NO = UnsupportedModelError
SPOILT = [
    ("emu3", _drop("text_model.model.norm.weight"), _NO, "1 missing, .*norm"),
    ("emu3", _set("extra", [2]), _NO, "1 surplus, such as extra"),
    ("emu3", _set("lm_head.weight", [41, 32]), _NO, "1 of another shape, .*lm_head"),
    ("emu3", _overwrite("pytorch_model.bin", b"", "model.safetensors"), _NO, "EOFE"),
    ("emu3", _overwrite("pytorch_model.bin", b"x" * 99, "model.safetensors"), _NO,
     "expected a checkpoint of tensors"),
    ("glm-image", _drop("lm_head.weight", _VLM), _NO, "1 missing, such as lm_head"),
    ("glm-image", _set("extra", [2], _VLM), _NO, "1 surplus, such as extra"),
    ("glm-image", _drop(_GLM_LAYER, "transformer"), _NO, "1 missing, .*to_q"),
    ("glm-image", _drop(_QUERY, "text_encoder"), _NO, "1 missing, .*SelfAttention"),
    ("glm-image", _set("extra", [2], "vae"), _NO, "1 surplus, such as extra"),
    ("chameleon", _overwrite("vqgan.ckpt", b"hello"), _NO, "checkpoint of tensors"),
    ("chameleon", _overwrite("vqgan.safetensors", b"x" * 50, "vqgan.ckpt"), _NO,
     "safetensors cannot read"),
    ("janus", _drop("model.generation_head.proj_out.weight"), _NO, "1 missing"),
    ("janus", _without("chat_template.jinja"), _NO, "expected a chat template"),
    ("janus", _without("processor_config.json"), _NO, "JanusProcessor"),
    ("chameleon", _without("vqgan.ckpt"), OptionError, "decoder: expected weights of VQGAN's"),
    ("chameleon", _retype, _NO, "expected words.json, config.json of janus"),
    ("chameleon", _drop("lm_head.weight"), _NO, "1 missing, such as lm_head"),
    ("imagegpt", _without("preprocessor_config.json"), _NO, "ImageProcessor"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "spoil", "kind", "said"), SPOILT, ids=[f"{s[0]}: {s[3][:40]}" for s in SPOILT]
)
def test_a_spoilt_checkpoint_is_refused_by_name(
    family: str, spoil: Callable[[Path], Any], kind: Any, said: str, built: Builder, tmp_path: Path
) -> None:
    folder = shutil.copytree(built(family), tmp_path / "spoilt")
    spoil(folder)
    with pytest.raises(kind, match=said):
        TextToImage.from_pretrained(folder)


def test_causal_masks_of_older_files_are_not_surplus(built: Builder, tmp_path: Path) -> None:
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
    sibling = TextToImage.from_pretrained(folder)("blue cat", seed=0).images[0]
    file = (folder / "vqgan.ckpt").rename(tmp_path / "elsewhere.ckpt")
    named = TextToImage.from_pretrained(folder, decoder=file)("blue cat", seed=0).images[0]
    weights = torch.load(file)["state_dict"]
    inside = {f"model.vqmodel.{k}": v for k, v in weights.items() if not k.startswith("loss")}
    _edit_weights(folder, lambda own: own.update(inside))
    own = TextToImage.from_pretrained(folder)("blue cat", seed=0).images[0]
    assert sibling.tobytes() == named.tobytes() == own.tobytes()


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("janus", {"size": (512, 512)}, "size: expected 16x16, the only one of this model"),
        ("emu3", {"size": (30, 32)}, "size: expected multiples of 8, received 30x32"),
        ("lumina-mgpt", {"size": (64, 48)}, "size: expected multiples of 32"),
        ("glm-image", {"size": (100, 64)}, "size: expected multiples of 32"),
        ("llamagen-c2i", {"size": (64, 32)}, "size: expected a square"),
        ("imagegpt", {"size": (9, 9)}, "size: expected 8x8"),
        ("emu3", {"family": "janos"}, "family: expected one of words, masked-words, janus"),
        ("llamagen-c2i", {"decoder": "/no/such.pt", "size": (64, 64)}, "decoder: expected a file"),
        ("janus", {"decoder": __file__}, "decoder: expected none for janus"),
        ("emu3", {"size": 64}, r"size: expected \(width, height\) in pixels, received 64"),
        ("emu3", {"size": (64.0, 64)}, "size: expected"),
        ("emu3", {"decoder": 3}, "decoder: expected a file, received '3'"),
        ("lumina-mgpt", {"size": (96, 64)}, "size: expected sides the model has a token for"),
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
        ("imagegpt", None, ["a fox"], 2, "prompt: expected none, as ImageGPT takes no prompts"),
        ("imagegpt", None, ["--guidance", "2"], 2, "guidance_scale: expected 1"),
        ("glm-image", "64", ["a fox", "--guidance", "2"], 2, "guidance_scale: expected 1"),
        ("llamagen-c2i", "64", ["a fox"], 2, "prompt: expected the number of a class, 0..4"),
        ("llamagen-c2i", "64", ["5"], 2, "prompt: expected the number of a class, 0..4"),
        ("llamagen-t2i", "64", ["a " * 9], 2, "prompt: expected at most 8 tokens, received 9"),
        ("janus", None, ["red " * 120], 2, "positions: expected at most 128"),
        ("chameleon", None, [" "], 2, "prompt: expected a prompt"),
        ("janus", None, ["blue cat", "red " * 120], 2, "positions: expected at most 128"),
        ("emu3", "16384", ["a fox"], 2, "positions: expected at most 128"),
        ("emu3", "80000000", ["a fox"], 2, "--size: expected"),
        ("janus", None, ["a <image> fox"], 2, "prompt: expected words, received <image>"),
        ("emu3", "64", ["<boi>"], 2, "prompt: expected words, received <boi>"),
        ("chameleon", None, ["<reserved08706>"], 2, "prompt: expected words, received <reserved"),
        ("janus", None, ["a fox", "--family", "imagegpt"], 1, "transformers refuses"),
        ("emu3", "64", ["a fox", "--family", "chameleon"], 1, "model: expected"),
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


def test_t5_is_checked_too(built: Builder, tmp_path: Path) -> None:
    folder = shutil.copytree(built("llamagen-t2i").parent, tmp_path / "spoilt")
    _drop(_QUERY)(folder / "flan-t5-tiny")
    with pytest.raises(UnsupportedModelError, match="T5EncoderModel .* 1 missing, .*SelfAttention"):
        TextToImage.from_pretrained(folder / "t2i_B_64.pt", size=(64, 64))


@pytest.mark.parametrize("name", ["..", ".", "x" * 300, "a/b/c", "~"])
def test_odd_names_are_no_models(name: str) -> None:
    with pytest.raises((OptionError, UnsupportedModelError), match="model: expected"):
        TextToImage.from_pretrained(name)


def test_other_weights_are_other_images(built: Builder, tmp_path: Path) -> None:
    """Whatever an image depends on is in its hash: decoders and parts included."""
    folder = shutil.copytree(built("chameleon"), tmp_path / "chameleon")
    hashes = [content_hash(folder)]
    _edit_checkpoint(folder / "vqgan.ckpt")
    hashes += [content_hash(folder), content_hash(folder, folder / "config.json")]
    classes = shutil.copytree(built("llamagen-c2i").parent, tmp_path / "classes")
    for file in ("c2i_B_64.pt", "vq_ds16_c2i.pt"):
        hashes.append(content_hash(classes))
        _edit_checkpoint(classes / file)
    hashes.append(content_hash(classes))
    assert content_hash(classes / "c2i_B_64.pt") == hashes[-1]  # the same files
    words = shutil.copytree(built("llamagen-t2i").parent, tmp_path / "words")
    hashes.append(content_hash(words / "t2i_B_64.pt"))
    _set(_QUERY, [16, 16])(words / "flan-t5-tiny")
    hashes.append(content_hash(words / "t2i_B_64.pt"))
    glm = shutil.copytree(built("glm-image"), tmp_path / "glm")
    hashes.append(content_hash(glm))
    _set("extra", [2], _VLM)(glm)
    assert len({*hashes, content_hash(glm)}) == len(hashes) + 1


def _edit_checkpoint(file: Path) -> None:
    content = torch.load(file)
    content["added"] = torch.ones(1)
    torch.save(content, file)


def test_bench_takes_such_models(built: Builder, tmp_path: Path) -> None:
    fixed = ["--count", "1", "--windows", "4", "--policies", "jacobi", "--json"]
    for family, more in (("imagegpt", []), ("emu3", ["--size", "32x24"])):
        file = tmp_path / f"{family}.json"
        assert main(["bench", "--model", str(built(family)), *more, *fixed, str(file)]) == 0
        rows = json.loads(file.read_text())["rows"]
        scales = [1.0] if family == "imagegpt" else [1.0, 3.0]
        assert list(dict.fromkeys(row["guidance"] for row in rows)) == scales
        assert all(row["identical"] == 1 for row in rows)


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


def test_lumina_is_distinguished_from_chameleon(built: Builder, tmp_path: Path) -> None:
    folder = shutil.copytree(built("chameleon"), tmp_path / "some-model")
    assert find_image_family(folder, folder) == "chameleon"
    assert find_image_family(folder, "Alpha-VLLM/Lumina-mGPT-7B-768") == "lumina-mgpt"
    config = json.loads((folder / "config.json").read_text())
    for change in (
        {"architectures": ["ChameleonXLLMXForConditionalGeneration"]},
        {"model_type": "chameleon_xllmx"},
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        assert find_image_family(folder, folder) == "lumina-mgpt"


def test_doctor_reports_image_models(built: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    for family, said in (
        ("emu3", "generate draws with it as emu3"),
        ("glm-image", "tokens an image"),
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
    with pytest.raises(OptionError, match=r"received 'owner/other', which is in no cache"):
        find_source("owner/other")
