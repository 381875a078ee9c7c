"""What image nodes alone do: images of a prompt, comparisons, negative prompts, draft models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel.cli import main
from mmaccel.comfy.hosts import ComfyUI
from mmaccel.comfy.images import to_tensor
from mmaccel.comfy.loading import LOADERS, LoadedModel
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.schemas import node_class
from mmaccel.comfy.widgets import read_prompts
from mmaccel.errors import OptionError
from tests.comfy.fake_comfy import (
    FakeComfy,
    Host,
    Interrupted,
    call,
    passes_of,
    policy,
    run,
)
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS, build_tiny, masked_beside_plain


@pytest.fixture
def begun(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Widths of the passes that began, without those of prompts."""
    widths: list[int] = []
    window: Any = model.pipe.model
    forward = window.forward
    monkeypatch.setattr(
        window,
        "forward",
        lambda entries: widths.append(entries.tokens.shape[1]) or forward(entries),
    )
    return widths


def test_every_byte_survives_the_way_through_a_tensor() -> None:
    ramp = Image.new("RGB", (256, 1))
    ramp.putdata([(k, 255 - k, k // 2) for k in range(256)])
    tensor = to_tensor([ramp])
    assert tensor.shape == (1, 1, 256, 3) and 0 <= float(tensor.min()) and float(tensor.max()) == 1
    assert (255.0 * tensor).to(torch.uint8)[0, 0, :, 0].tolist() == list(range(256))


def test_lines_are_prompts() -> None:
    assert read_prompts(" a b \r\n\n c\n") == ["a b", "c"]
    assert read_prompts("") == read_prompts(" \n\n") == [""]


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        (
            [*CAPTIONS[:2], "--num-images", "2", "--policy", "mc-sjd", "--temperature", "0.9"],
            {"prompt": "\n\n".join(CAPTIONS[:2]), "num_images": 2, "temperature": 0.9},
        ),
        (
            [CAPTIONS[0], "--guidance", "3", "--negative", CAPTIONS[2]],
            {"prompt": CAPTIONS[0], "guidance_scale": 3.0, "negative_prompt": f" {CAPTIONS[2]}\n"},
        ),
    ],
    ids=["several of a prompt", "a negative prompt"],
)
def test_pixels_are_the_command_lines(
    flags: list[str], values: dict[str, Any], model: LoadedModel, tmp_path: Path
) -> None:
    fixed = ["--seed", "7", "--model", model.name, "--out", str(tmp_path)]
    assert main(["generate", *flags, *fixed]) == 0
    chosen = policy("McSjd") if "num_images" in values else None
    images, record = run("GenerateImage", model=model, policy=chosen, seed=7, **values).values
    files = sorted(tmp_path.glob("0*.png"))
    for pixels, file in zip((images * 255).round().to(torch.uint8).numpy(), files, strict=True):
        with Image.open(file) as written:
            assert np.array_equal(pixels, np.asarray(written))
    for k, line in enumerate(record.lines):
        text = CAPTIONS[k // values.get("num_images", 1)]
        assert line.startswith(f"seed {7 + k}: ") and line.endswith(f": {text}")
    if "negative_prompt" in values:
        assert f"negative     {CAPTIONS[2]}\n" in str(record)
        usual = run("GenerateImage", model=model, seed=7, **(values | {"negative_prompt": ""}))
        assert not torch.equal(usual.values[0], images)


@pytest.mark.parametrize(
    ("node", "chosen", "stop_at", "passes"),
    [
        ("GenerateImage", "Autoregressive", 1 + N_TOKENS + 1, N_TOKENS),  # between batches
        ("Compare", "Jacobi", 4, 4),  # six passes of warming up, one check each
        ("Compare", "Jacobi", 8, 7),
    ],
)
def test_no_pass_is_begun_after_an_interrupt(
    node: str, chosen: str, stop_at: int, passes: int, model: LoadedModel, begun: list[int]
) -> None:
    host = Host(stop_at)
    own = policy(chosen, **({"window": 2} if chosen == "Jacobi" else {}))
    with pytest.raises(Interrupted):
        run(node, host, model=model, policy=own, prompt=CAPTIONS[0], num_images=2)
    assert len(begun) == passes and host.checks == stop_at


def test_an_interrupt_is_heard_between_two_images_of_a_batch(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing an image may take as long as many passes."""
    drawn: list[Any] = []
    render = model.pipe.image_model.render
    monkeypatch.setattr(
        type(model.pipe.image_model), "render", lambda self, *v: drawn.append(v) or render(*v)
    )
    host = Host(stop_at=1 + N_TOKENS + 1)  # before the first pass, after each, after an image
    asked = dict(model=model, policy=policy("Autoregressive"), prompt=CAPTIONS[0])
    with pytest.raises(Interrupted):
        run("GenerateImage", host, **asked, num_images=3, batch_size=3)
    assert len(drawn) == 1


def test_rows_of_a_batch_may_finish_in_any_order(model: LoadedModel) -> None:
    asked = dict(
        model=model, policy=policy("Jacobi", window=3), prompt="\n".join(CAPTIONS), num_images=3
    )
    alone = run("GenerateImage", **asked, seed=4).values
    together = run("GenerateImage", **asked, seed=4, batch_size=5).values
    passes = passes_of(alone[1])
    assert passes == passes_of(together[1]) != sorted(passes)  # in the order of the prompts
    assert torch.equal(alone[0], together[0])


def test_memory_is_freed_on_comfyuis_own_device_alone(comfy: FakeComfy, tmp_path: Path) -> None:
    cls: Any = node_class(NODES["MMAccelLoadModel"])
    cls.execute(model=str(build_tiny(tmp_path)), dtype="bfloat16")
    ((size, device),) = comfy.freed
    assert size > 0 and device == torch.device("cpu")
    ComfyUI().free_memory(10, "cuda")  # which this ComfyUI does not compute on
    assert len(comfy.freed) == 1


def test_only_files_of_the_model_are_listed(tmp_path: Path) -> None:
    """Listing every file below a folder such as `/` would never end."""
    describe = LOADERS[""].fingerprint
    folder = build_tiny(tmp_path / "m")
    state = describe(model=str(folder))
    deep = folder / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "model.safetensors").write_bytes(b"x")
    (folder / "notes.txt").write_text("x", encoding="utf-8")
    assert describe(model=str(folder)) == state
    masked, _ = masked_beside_plain(tmp_path / "two")
    before = describe(model=str(masked))
    (tokenizer,) = (tmp_path / "two").rglob("tokenizer.safetensors")
    assert tokenizer.parent != masked  # outside the folder, and part of the model all the same
    tokenizer.write_bytes(tokenizer.read_bytes())
    assert describe(model=str(masked)) != before


def test_a_model_loaded_in_inference_mode_is_an_ordinary_one(tmp_path: Path) -> None:
    with torch.inference_mode():
        opened = run("LoadModel", model=str(build_tiny(tmp_path / "m"))).values[0]
        images = run("GenerateImage", model=opened, prompt=CAPTIONS[0]).values[0]
    assert not any(p.is_inference() for p in opened.pipe.model.model.parameters())
    assert not images.is_inference()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prompt": "a red xylophone"}, "words the model knows, received 'xylophone'"),
        ({"prompt": " \n "}, "at least one word, received none"),
        ({"guidance_scale": 1.0, "negative_prompt": "red"}, "a guidance_scale other than"),
        ({"policy": "itself"}, "another model than the one that is decoded"),
    ],
    ids=str,
)
def test_what_only_the_model_can_refuse_stops_before_any_pass(
    values: dict[str, Any], said: str, model: LoadedModel, begun: list[int]
) -> None:
    asked = dict(model=model, prompt=CAPTIONS[0]) | values
    if "policy" in asked:
        asked["policy"] = policy("Speculative", draft_model=model)
    with pytest.raises(OptionError, match=said):
        run("GenerateImage", **asked)
    assert begun == []


def test_a_draft_model_is_used(model: LoadedModel, tmp_path: Path) -> None:
    draft = run("LoadModel", model=str(build_tiny(tmp_path / "d"))).values[0]
    chosen = policy("Speculative", draft_model=draft, window=4)
    assert chosen.policy.draft_model is draft.pipe.model
    _, record = run("GenerateImage", model=model, policy=chosen, prompt=CAPTIONS[0]).values
    assert record.stats.draft_passes > 0 and record.stats.exactness == "distribution"


def test_a_comparison_generates_both_sides_and_says_how_they_compare(
    model: LoadedModel, begun: list[int]
) -> None:
    asked = dict(model=model, prompt="\n".join(CAPTIONS), seed=3)
    sheet, plain, fast, record = run("Compare", **asked, policy=policy("Jacobi", window=5)).values
    assert plain.shape == fast.shape == (3, 16, 16, 3) and torch.equal(plain, fast)
    assert len(begun) == 3 + 3 + 3 * N_TOKENS + record.stats.passes  # warm up, plain, policy
    reference = run("GenerateImage", **asked, policy=policy("Autoregressive")).values[0]
    assert torch.equal(plain, reference)
    assert sheet.shape[0] == 1 and sheet.shape[2] > 2 * 240
    assert record.compared == "The same images, token for token"
    assert f"compared     {record.compared}\n" in str(record)
    assert record.stats.passes < 3 * N_TOKENS


@pytest.mark.usefixtures("comfy")
def test_a_graph_with_the_old_names_makes_the_same_images(model: LoadedModel) -> None:
    """ComfyUI hands over no value whose name the node does not have, but the graph has it."""
    asked = dict(prompt=CAPTIONS[0], guidance_scale=3.0)
    old = {"negative": CAPTIONS[2], "count": 2}
    graph = {"3": {"class_type": "MMAccelGenerateImage", "inputs": {**asked, **old}}}
    named = dict(negative_prompt=CAPTIONS[2], num_images=2)
    wanted = run("GenerateImage", model=model, **asked, **named).values[0]

    def images(**values: Any) -> torch.Tensor:
        (made, _), _ = call("GenerateImage", graph, model=model, **asked, **values)
        return made

    assert len(wanted) == 2 and torch.equal(images(), wanted)
    assert torch.equal(images(num_images=1), wanted[:1])
    assert not torch.equal(images(negative=CAPTIONS[1]), wanted)  # of a link, by its old name
    graph["3"]["inputs"]["count"] = -1
    with pytest.raises(OptionError, match="num_images: expected a number in 0..4096, received -1"):
        images()
