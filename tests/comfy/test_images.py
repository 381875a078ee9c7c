"""The image nodes: the command line's pixels, interrupts, loading, comparisons, stats."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel.cli import main
from mmaccel.comfy import loading
from mmaccel.comfy.hosts import V1Host
from mmaccel.comfy.images import to_tensor
from mmaccel.comfy.loading import LOADERS, LoadedModel
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.schemas import v1_class
from mmaccel.comfy.values import refusal
from mmaccel.comfy.widgets import read_prompts
from mmaccel.contracts import Pass
from mmaccel.errors import OptionError
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from tests.comfy.fake_comfy import (
    FakeComfy,
    Host,
    Interrupted,
    call,
    install,
    passes_of,
    policy,
    run,
)
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS, build_tiny, masked_beside_plain


def count_passes(monkeypatch: pytest.MonkeyPatch, model: LoadedModel) -> list[int]:
    """Widths of the passes that began, without those of prompts."""
    begun: list[int] = []
    window: Any = model.pipe.model
    forward = window.forward

    def counted(entries: Pass) -> torch.Tensor:
        begun.append(entries.tokens.shape[1])
        return forward(entries)

    monkeypatch.setattr(window, "forward", counted)
    return begun


@pytest.mark.parametrize(
    ("node", "flags"),
    [
        ("Jacobi", ["--policy", "jacobi", "--window", "5"]),
        ("McSjd", ["--policy", "mc-sjd", "--window", "5"]),
    ],
)
def test_pixels_are_the_command_lines(
    node: str, flags: list[str], model: LoadedModel, tmp_path: Path
) -> None:
    arguments = [
        "generate",
        *CAPTIONS[:2],
        "--num-images",
        "3",
        "--seed",
        "7",
        "--temperature",
        "0.9",
    ]
    arguments += [*flags, "--model", model.name, "--out", str(tmp_path)]
    assert main(arguments) == 0
    files = sorted(file for file in tmp_path.glob("0*.png"))
    made = run(
        "GenerateImage", model=model, policy=policy(node, window=5),
        prompt="\n\n".join(CAPTIONS[:2]) + "\n", seed=7, num_images=3, temperature=0.9,
    )  # fmt: skip
    images, record = made.values
    assert images.shape[0] == len(files) == 6 and images.dtype == torch.float32
    for image, file in zip(images, files):
        with Image.open(file) as opened:
            written = list(opened.get_flattened_data())
        # as ComfyUI's SaveImage turns it into bytes
        shown = (255.0 * image).clamp(0, 255).to(torch.uint8).reshape(-1, 3).tolist()
        assert [tuple(pixel) for pixel in shown] == written
    assert [int(file.name[:4]) for file in files] == [7, 8, 9, 10, 11, 12]
    for k, line in enumerate(record.lines):
        assert line.startswith(f"seed {7 + k}: ") and line.endswith(f": {CAPTIONS[k // 3]}")


def test_every_byte_survives_the_way_through_a_tensor() -> None:
    ramp = Image.new("RGB", (256, 1))
    ramp.putdata([(k, 255 - k, k // 2) for k in range(256)])
    tensor = to_tensor([ramp])
    assert tensor.shape == (1, 1, 256, 3) and 0 <= float(tensor.min()) and float(tensor.max()) == 1
    assert (255.0 * tensor).to(torch.uint8)[0, 0, :, 0].tolist() == list(range(256))


@pytest.mark.parametrize(
    ("node", "chosen", "stop_at", "passes"),
    [
        ("GenerateImage", ("Autoregressive", {}), 1, 0),  # the first check is before any pass
        ("GenerateImage", ("Jacobi", {"window": 2}), 5, 4),  # then one after each pass
        ("GenerateImage", ("Autoregressive", {}), 1 + N_TOKENS + 1, N_TOKENS),  # between batches
        ("Compare", ("Jacobi", {"window": 2}), 4, 4),  # six passes of warming up, one check each
        ("Compare", ("Jacobi", {"window": 2}), 8, 7),
    ],
)
def test_no_pass_is_begun_after_an_interrupt(
    node: str, chosen: tuple[str, dict[str, Any]], stop_at: int, passes: int,
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    begun, host = count_passes(monkeypatch, model), Host(stop_at)
    asked = dict(model=model, policy=policy(chosen[0], **chosen[1]), prompt=CAPTIONS[0])
    with pytest.raises(Interrupted):
        run(node, host, **asked, num_images=2)
    assert len(begun) == passes and host.checks == stop_at
    assert run("GenerateImage", **asked).values[0].shape[0] == 1  # the model is free again


def test_a_model_is_loaded_once_and_again_when_its_files_change(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "m")
    cls: Any = v1_class(NODES["MMAccelLoadModel"])
    state, first = cls.IS_CHANGED(model=str(folder)), run("LoadModel", model=str(folder)).values[0]
    assert state == cls.IS_CHANGED(model=str(folder)) != ""
    assert run("LoadModel", model=str(folder)).values[0] is first
    for dtype in ("auto", "float32", "fp32"):  # the same on a CPU
        assert run("LoadModel", model=str(folder), dtype=dtype).values[0] is first
    assert first.dtype == "float32"
    half = run("LoadModel", model=str(folder), dtype="bf16").values[0]
    assert half is not first and half.dtype == "bfloat16"
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    assert cls.IS_CHANGED(model=str(folder)) != state
    assert run("LoadModel", model=str(folder)).values[0] is not first
    assert LOADERS[""].fingerprint(model="owner/name", decoder="") == ""
    gc.collect()
    before = len(loading.CACHE)
    del first, half
    gc.collect()
    assert len(loading.CACHE) == before - 2


def test_an_interrupt_is_heard_between_two_images_of_a_batch(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing an image may take as long as many passes."""
    drawn: list[Any] = []
    render = model.pipe.image_model.render

    def count(*values: Any) -> Any:
        drawn.append(values)
        return render(*values)

    monkeypatch.setattr(type(model.pipe.image_model), "render", lambda self, *v: count(*v))
    host = Host(stop_at=1 + N_TOKENS + 1)  # before the first pass, after each, after an image
    with pytest.raises(Interrupted):
        run("GenerateImage", host, model=model, policy=policy("Autoregressive"),
            prompt=CAPTIONS[0], num_images=3, batch_size=3)  # fmt: skip
    assert len(drawn) == 1


def test_the_batch_size_changes_nothing(model: LoadedModel) -> None:
    asked = dict(
        model=model, policy=policy("Jacobi", window=3), prompt="\n".join(CAPTIONS), num_images=5
    )
    alone = run("GenerateImage", **asked, seed=4)
    passes = passes_of(alone.values[1])
    assert passes != sorted(passes)  # so that a later row of the batch finishes earlier
    together = run("GenerateImage", **asked, seed=4, batch_size=5)
    assert torch.equal(alone.values[0], together.values[0])
    assert passes == passes_of(together.values[1])  # in the order of the prompts
    assert together.values[1].stats.passes < alone.values[1].stats.passes


def test_a_negative_prompt_is_the_command_lines(model: LoadedModel, tmp_path: Path) -> None:
    said = ["--guidance", "3", "--negative", CAPTIONS[2], "--seed", "5"]
    assert (
        main(["generate", CAPTIONS[0], *said, "--model", model.name, "--out", str(tmp_path)]) == 0
    )
    (file,) = tmp_path.glob("0*.png")
    asked = dict(model=model, prompt=CAPTIONS[0], seed=5, guidance_scale=3.0)
    images, record = run("GenerateImage", **asked, negative_prompt=f" {CAPTIONS[2]}\n").values
    with Image.open(file) as opened:
        written = np.asarray(opened)
    assert np.array_equal((images[0] * 255).round().to(torch.uint8).numpy(), written)
    assert not torch.equal(run("GenerateImage", **asked).values[0], images)
    assert f"negative     {CAPTIONS[2]}\n" in str(record)
    with pytest.raises(OptionError, match="negative prompt: expected a guidance_scale other than"):
        run("GenerateImage", **{**asked, "guidance_scale": 1.0}, negative_prompt=CAPTIONS[2])


def test_a_model_nobody_holds_is_gone_before_the_next_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models may not fit in memory together: a reference cycle must not hold the first."""
    folder, other, seen = build_tiny(tmp_path / "a"), build_tiny(tmp_path / "b"), []
    first = run("LoadModel", model=str(folder)).values[0]
    first.pipe.in_a_cycle = first.pipe
    held, real = weakref.ref(first.pipe), TextToImage.from_pretrained

    def load(*values: Any, **options: Any) -> Any:
        seen.append(held() is None)
        return real(*values, **options)

    monkeypatch.setattr(TextToImage, "from_pretrained", load)
    gc.disable()
    try:
        del first
        run("LoadModel", model=str(other))
    finally:
        gc.enable()
    assert seen == [True]


def test_the_host_frees_memory_before_a_model_is_loaded(comfy: FakeComfy, tmp_path: Path) -> None:
    """Other nodes' models may fill the memory: twice the files' bytes are freed, once."""
    folder, host = build_tiny(tmp_path / "m"), Host()
    files = ("config.json", "tokenizer.json", "words.json", "generation_config.json",
             "model.safetensors", "tokenizer.safetensors")  # fmt: skip
    size = 2 * sum((folder / f).stat().st_size for f in files if (folder / f).exists())
    first = run("LoadModel", host, model=str(folder)).values[0]
    assert run("LoadModel", host, model=str(folder)).values[0] is first
    assert host.freed == [(size, "cpu")] and host.checks == 1
    cls: Any = v1_class(NODES["MMAccelLoadModel"])
    cls().execute(model=str(folder), dtype="bfloat16")
    assert comfy.freed == [(size, torch.device("cpu"))]
    V1Host().free_memory(10, "cuda")  # which this ComfyUI does not compute on
    assert len(comfy.freed) == 1


def test_auto_is_where_comfyui_computes(tiny_folder: Path) -> None:
    host = Host()
    host.device = lambda: "cuda:77"  # type: ignore[method-assign]
    with pytest.raises(OptionError, match="device: expected a device .* received 'cuda:77'"):
        run("LoadModel", host, model=str(tiny_folder))
    assert run("LoadModel", host, model=str(tiny_folder), device="cpu").values[0].dtype == "float32"


def test_an_interrupt_is_heard_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(TextToImage, "from_pretrained", lambda *a, **k: begun.append(a))
    with pytest.raises(Interrupted):
        run("LoadModel", Host(stop_at=1), model=str(build_tiny(tmp_path / "m")))
    assert begun == []


def test_a_path_may_be_pasted_as_file_managers_copy_it(tiny_folder: Path) -> None:
    named = run("LoadModel", model=str(tiny_folder)).values[0]
    assert run("LoadModel", model=f' "{tiny_folder}"\n').values[0] is named
    assert refusal(NODES["MMAccelLoadModel"], {"model": " scenes "}) is None
    assert "received ''" in str(refusal(NODES["MMAccelLoadModel"], {"model": '""'}))


def test_only_files_of_the_model_are_listed(tmp_path: Path) -> None:
    """Listing every file below a folder such as `/` would never end."""
    folder = build_tiny(tmp_path / "m")
    state = LOADERS[""].fingerprint(model=str(folder), decoder="")
    deep = folder / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "model.safetensors").write_bytes(b"x")
    (folder / "notes.txt").write_text("x", encoding="utf-8")
    assert LOADERS[""].fingerprint(model=str(folder), decoder="") == state
    masked, _ = masked_beside_plain(tmp_path / "two")
    before, (tokenizer,) = LOADERS[""].fingerprint(model=str(masked), decoder=""), [
        f for f in (tmp_path / "two").rglob("tokenizer.safetensors")
    ]  # fmt: skip
    assert tokenizer.parent != masked  # outside the folder, and part of the model all the same
    tokenizer.write_bytes(tokenizer.read_bytes())
    assert LOADERS[""].fingerprint(model=str(masked), decoder="") != before


def test_a_model_loaded_in_inference_mode_is_an_ordinary_one(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "m")
    with torch.inference_mode():
        opened = run("LoadModel", model=str(folder)).values[0]
        images = run("GenerateImage", model=opened, prompt=CAPTIONS[0]).values[0]
    assert not any(p.is_inference() for p in opened.pipe.model.model.parameters())
    assert not images.is_inference()


def test_what_only_the_model_can_refuse_stops_before_any_pass(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = count_passes(monkeypatch, model)
    with pytest.raises(OptionError, match="expected a folder, a file, an id .* scenes.*received"):
        run("LoadModel", model="/no/such/folder")
    with pytest.raises(OptionError, match="received 'owner/name', which is in no cache"):
        run("LoadModel", model="owner/name")
    with pytest.raises(OptionError, match="window: expected an integer in 1..4096"):
        policy("Jacobi", window=5000)  # as if it came over a link
    with pytest.raises(OptionError, match="words the model knows, received 'xylophone'"):
        run("GenerateImage", model=model, prompt="a red xylophone")
    with pytest.raises(OptionError, match="at least one word, received none"):
        run("GenerateImage", model=model, prompt=" \n ")
    with pytest.raises(OptionError, match="'stepwise', which decodes a canvas, not a window"):
        run("GenerateImage", model=model, policy=policy("Stepwise"), prompt=CAPTIONS[0])
    with pytest.raises(OptionError, match="another model than the one that is decoded"):
        own = policy("Speculative", draft_model=model)
        run("GenerateImage", model=model, policy=own, prompt=CAPTIONS[0])
    assert begun == []


def test_a_draft_model_is_used(model: LoadedModel, tmp_path: Path) -> None:
    draft = run("LoadModel", model=str(build_tiny(tmp_path / "d"))).values[0]
    chosen = policy("Speculative", draft_model=draft, window=4)
    assert chosen.policy.draft_model is draft.pipe.model
    _, record = run("GenerateImage", model=model, policy=chosen, prompt=CAPTIONS[0]).values
    assert record.stats.draft_passes > 0 and record.stats.exactness == "distribution"


def test_stats_show_exactness_tokens_passes_and_seeds(model: LoadedModel) -> None:
    chosen = policy("Jacobi", window=5)
    _, record = run(
        "GenerateImage", model=model, policy=chosen, prompt="\n".join(CAPTIONS[:2]), seed=2**64 - 1
    ).values
    made = run("Stats", stats=record)
    assert made.values == (made.text,)
    text = made.text or ""
    assert "policy       jacobi, window 5\n" in text and "bitwise: same seed, same tokens" in text
    assert f"tokens       {2 * N_TOKENS} in " in text and f"{model.name} (float32 on cpu)" in text
    own = [f"seed {s}: {N_TOKENS} tokens in {p} forward passes: {caption}"
           for s, p, caption in zip((2**64 - 1, 0), passes_of(record), CAPTIONS)]  # fmt: skip
    assert text.endswith("\n".join(own))


def test_a_comparison_generates_both_sides_and_says_how_they_compare(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, begun = "\n".join(CAPTIONS), count_passes(monkeypatch, model)
    chosen = policy("Jacobi", window=5)
    sheet, plain, fast, record = run(
        "Compare", model=model, policy=chosen, prompt=prompt, seed=3
    ).values
    assert plain.shape == fast.shape == (3, 16, 16, 3) and torch.equal(plain, fast)
    assert len(begun) == 3 + 3 + 3 * N_TOKENS + record.stats.passes  # warm up, plain, policy
    reference = run(
        "GenerateImage", model=model, policy=policy("Autoregressive"), prompt=prompt, seed=3
    ).values[0]
    assert torch.equal(plain, reference)
    assert sheet.shape[0] == 1 and sheet.shape[2] > 2 * 240
    assert record.compared == "The same images, token for token"
    assert f"compared     {record.compared}\n" in str(record)
    assert record.stats.passes < 3 * N_TOKENS


def test_lines_are_prompts() -> None:
    assert read_prompts(" a b \r\n\n c\n") == ["a b", "c"]
    assert read_prompts("") == read_prompts(" \n\n") == [""]


@pytest.mark.parametrize("with_v3", [False, True])
def test_a_graph_with_the_old_names_makes_the_same_images(
    with_v3: bool, monkeypatch: pytest.MonkeyPatch, model: LoadedModel
) -> None:
    """ComfyUI hands over no value whose name the node does not have, but the graph has it."""
    install(monkeypatch, with_v3=with_v3)
    asked = dict(prompt=CAPTIONS[0], guidance_scale=3.0)
    old = {"negative": CAPTIONS[2], "count": 2}
    graph = {"3": {"class_type": "MMAccelGenerateImage", "inputs": {**asked, **old}}}
    named = dict(negative_prompt=CAPTIONS[2], num_images=2)
    wanted = run("GenerateImage", model=model, **asked, **named).values[0]
    (images, _), _ = call(with_v3, "GenerateImage", graph=graph, model=model, **asked)
    assert len(images) == 2 and torch.equal(images, wanted)
    values = {**asked, "num_images": 1}
    (images, _), _ = call(with_v3, "GenerateImage", graph=graph, model=model, **values)
    assert torch.equal(images, wanted[:1])
    text = CAPTIONS[1]  # another node writes it, so it comes under its old name
    (images, _), _ = call(
        with_v3, "GenerateImage", graph=graph, model=model, **asked, negative=text
    )
    assert not torch.equal(images, wanted)
    graph["3"]["inputs"]["count"] = -1
    with pytest.raises(OptionError, match="num_images: expected a number in 0..4096, received -1"):
        call(with_v3, "GenerateImage", graph=graph, model=model, **asked)


@pytest.mark.parametrize("with_v3", [False, True])
def test_both_schemas_run_on_comfyui(
    with_v3: bool, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    comfy = install(monkeypatch, with_v3=with_v3)
    (model,), _ = call(with_v3, "LoadModel", model=str(tiny_folder), device="auto")
    asked = dict(model=model, prompt=CAPTIONS[0])
    (images, record), _ = call(with_v3, "GenerateImage", **asked, seed=1)
    assert images.shape == (1, 16, 16, 3)
    assert comfy.checks > 1 and comfy.reports[-1] == (N_TOKENS, N_TOKENS, None)
    assert call(with_v3, "Stats", stats=record) == ((str(record),), (str(record),))
    comfy.stop_at = comfy.checks + 3
    with pytest.raises(Interrupted):
        call(with_v3, "GenerateImage", **asked, seed=2)
