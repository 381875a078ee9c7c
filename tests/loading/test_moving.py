"""`to`, `enable_model_cpu_offload`, `device_map` of pipelines: the same tokens, or words why not.

Devices are fake ones (`tests/fixtures/fake_device.py`), on which an operation on tensors of two
devices is an error; hooks and maps are accelerate's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import ImageToText, Jacobi, TextToImage
from mmaccel.demo.scenes_vqa.processor import make_processor
from mmaccel.errors import BusyError, MissingBackendError, OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.loading import placement
from mmaccel.pipelines.hosts.loading.moving import find_parts, move_module
from mmaccel.pipelines.hosts.loading.placement import choose_placement, find_main_device
from mmaccel.pipelines.models import glm_image
from mmaccel.pipelines.text_to_image.outputs import Request
from tests.fixtures.checkpoints import FAMILIES, SIZES, captions
from tests.fixtures.fake_device import DEVICE, FakeTensor, fake_device
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.media import MEDIA, MediaCase, content, open_media
from tests.fixtures.next_scale import build_folder
from tests.fixtures.shared import media_folders
from tests.fixtures.tiny_model import CAPTIONS, masked_beside_plain
from tests.fixtures.tiny_vqa import QUESTION, build_vqa, scene

pytest.importorskip("accelerate")


BY_SCALE = ("var", "hart")
EVERY = [*FAMILIES, *BY_SCALE, "words", "scale-words", "masked-words"]
CANVAS = {"masked-words": "stepwise", **dict.fromkeys((*BY_SCALE, "scale-words"), "next-scale")}


@pytest.fixture(scope="module")
def find(
    built: Callable[[str], Path], tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The folder of a family's tiny checkpoint."""
    masked = masked_beside_plain(tmp_path_factory.mktemp("masked"))[0]
    scales = build_folder(tmp_path_factory.mktemp("scales"))
    others = {"words": tiny_folder, "masked-words": masked, "scale-words": scales}
    return lambda family: others.get(family) or built(family)


def open_family(find: Callable[[str], Path], family: str, **options: Any) -> TextToImage:
    options = {"size": SIZES.get(family), "dtype": "fp32"} | options
    return TextToImage.from_pretrained(find(family), **options)


def draw(family: str, pipe: TextToImage) -> Tensor:
    """Tokens of two images, and their pixels."""
    prompts = CAPTIONS[:2] if "words" in family else captions(family)[:2]
    policy = CANVAS.get(family, Jacobi(4))
    made = pipe(prompts, policy=policy, seed=[3, 4], output_type="np")
    pixels = torch.as_tensor(made.images).flatten(1)
    return torch.cat([made.tokens.cpu().flatten(1), pixels], 1)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GLM-Image's diffusion."""
    own = partial(glm_image.GlmImageImages, num_inference_steps=2)
    monkeypatch.setattr(glm_image, "GlmImageImages", own)


def is_fake(module: torch.nn.Module) -> bool:
    return {isinstance(p, FakeTensor) for p in module.parameters()} == {True}


def are_there(pipe: Any) -> bool:
    """Whether all parts of a pipeline are on the fake device."""
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return all(is_fake(module) for module in modules if list(module.parameters()))


# --- to -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", mostly_slow(EVERY, "words"))
def test_to_is_as_good_as_loading_there(find: Callable[[str], Path], family: str) -> None:
    """Moved after a run, whose cache, prompts and rows of the head were elsewhere. What is loaded
    there is not moved: its parts, as tokenizers of images, are opened on the device.
    """
    pipe = open_family(find, family, device="cpu")
    first = draw(family, pipe)
    with fake_device() as device:
        assert pipe.to(device) is pipe
        for each in (pipe, open_family(find, family, device=device)):
            assert each.device == device and are_there(each)
            assert draw(family, each).equal(first)
        assert pipe.to("cpu", torch.bfloat16).dtype == torch.bfloat16
        assert pipe.device.type == "cpu"
    fresh = open_family(find, family, device="cpu", dtype="bf16")
    moved, expected = (p.image_model.window.model.state_dict() for p in (pipe, fresh))
    for name, tensor in moved.items():
        assert tensor.dtype == expected[name].dtype and tensor.equal(expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("kind", MEDIA)
def test_speech_and_clips_move(kind: str) -> None:
    """They are what is loaded there."""
    folders = media_folders(kind)
    pipe = open_media(kind, folders, device="cpu", dtype="fp32")

    def make(pipe: Any) -> Tensor:
        made = MediaCase(kind, folders, pipe).call([1, 2, 3], batch_size=2)
        return torch.cat([content(each).cpu().flatten() for each in made])

    first = make(pipe)
    with fake_device() as device:
        there = open_media(kind, folders, device=device, dtype="fp32")
        for each in (there, pipe.to(device)):
            assert each.device == device and are_there(each) and make(each).equal(first)
        if kind == "cosmos":
            return
        pipe.to("cpu").enable_model_cpu_offload(device="xpu")
        assert pipe.device == DEVICE and make(pipe).equal(first)
        assert not is_fake(pipe.speech.window.model) and not is_fake(pipe.speech.codec)


def test_forms_of_to(tiny_folder: Path) -> None:
    pipe = TextToImage.from_pretrained(tiny_folder, device="cpu", dtype="fp32")
    for args, named in (
        (("bf16",), {}), ((torch.bfloat16, "cpu"), {}), ((torch.device("cpu"), "bfloat16"), {}),
        ((), {"dtype": "torch.bfloat16"}), (("cpu",), {"dtype": torch.bfloat16}),
    ):  # fmt: skip
        assert pipe.to(*args, **named).dtype == torch.bfloat16
        assert next(pipe.image_model.tokenizer.parameters()).dtype == torch.float32
        pipe.to(torch.float32)
    for wrong in ((), ("cpu", "cpu"), ("bf16", "fp16"), ("nowhere",), ("cuda:99",), (torch.int8,)):
        with pytest.raises(OptionError, match=r"expected a dev|expected auto"):
            pipe.to(*wrong)
    pipe.engine.cache  # noqa: B018
    with pytest.raises(BusyError):
        pipe(CAPTIONS[0], on_step=lambda _: pipe.to("bf16"))
    captured = TextToImage(pipe.image_model, engine=type(pipe.engine)(True))
    with pytest.raises(MissingBackendError, match="cuda_graphs=True"):
        captured.to("cpu")


def test_computed_tables_and_kept_modules_stay_in_float32() -> None:
    import transformers as hf

    shape = dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=20)
    model = hf.T5EncoderModel(hf.T5Config(**shape))
    model.register_buffer("table", torch.ones(2), persistent=False)
    model.register_buffer("stored", torch.ones(2))
    move_module(model, None, torch.float16)
    dtypes = {name: tensor.dtype for name, tensor in model.named_parameters()}
    assert {d for n, d in dtypes.items() if ".wo." in n} == {torch.float32}
    assert {d for n, d in dtypes.items() if ".wo." not in n} == {torch.float16}
    assert (model.table.dtype, model.stored.dtype) == (torch.float32, torch.float16)
    assert model.shared.weight is model.encoder.embed_tokens.weight  # tied still


def test_answers_move() -> None:
    pipe = ImageToText(build_vqa(), make_processor())

    def ask() -> list[int]:
        return pipe(scene(), QUESTION, max_new_tokens=6).answers[0].tokens.tolist()

    first = ask()
    with fake_device() as device:
        assert pipe.to(device).device == device and ask() == first
        pipe.to("cpu").enable_model_cpu_offload(device="xpu")
        assert ask() == first and not is_fake(pipe.model)


# --- offload --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", mostly_slow(EVERY[:-1], "words"))
def test_parts_are_on_the_accelerator_while_they_compute(
    find: Callable[[str], Path], family: str
) -> None:
    """In a call, and in a call after it; then they are back on the CPU."""
    pipe, where = open_family(find, family, device="cpu"), []
    first, model = draw(family, pipe), pipe.image_model.window.model
    with fake_device() as device:
        pipe.enable_model_cpu_offload(0, "xpu")
        assert pipe.device == device and not is_fake(model)
        forward = pipe.model.forward

        def look(*args: Any) -> Tensor:
            where.append(is_fake(model))
            return forward(*args)

        pipe.model.forward = look  # type: ignore[method-assign,union-attr]
        prompt, served = CAPTIONS[0] if "words" in family else captions(family)[0], []
        assert draw(family, pipe).equal(first)
        policy = CANVAS.get(family, Jacobi(4))
        pipe.serve([Request(prompt, 3)], pipe.image_model.params, policy=policy,
                   deliver=served.append)  # fmt: skip
        parts = [part.module for part in find_parts(pipe.image_model).values()]
        assert len(served) == 1 and all(where) and not any(map(is_fake, parts))
        with pytest.raises(UnsupportedModelError, match="after enable_model_cpu_offload"):
            pipe.to("cpu")
        assert "with CPU offload" in repr(pipe)


def test_offloading_without_an_accelerator(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = TextToImage.from_pretrained(tiny_folder, device="cpu")
    with pytest.raises(MissingBackendError, match="expected an accelerator .* leave it out"):
        pipe.enable_model_cpu_offload()
    monkeypatch.setattr(placement, "find_spec", lambda name: None)
    with pytest.raises(MissingBackendError, match="pip install accelerate"):
        pipe.enable_model_cpu_offload(device="cuda")
    with pytest.raises(MissingBackendError, match="device_map: .* pip install accelerate"):
        TextToImage.from_pretrained(tiny_folder, device_map="auto")


# --- device maps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", mostly_slow([f for f in EVERY if f != "imagegpt"], "words"))
def test_weights_on_a_disk(find: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    if family.startswith(("llamagen", "scale", *BY_SCALE)):
        with pytest.raises(UnsupportedModelError, match="device_map: expected none for"):
            open_family(find, family, device_map="auto")
        return
    mapped = open_family(find, family, device_map={"": "disk"}, offload_folder=tmp_path / "offload")
    model = mapped.image_model.window.model
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    assert draw(family, mapped).equal(draw(family, open_family(find, family, device="cpu")))
    for refused in (lambda: mapped.to("bf16"), lambda: mapped.enable_model_cpu_offload(0, "xpu")):
        with fake_device(), pytest.raises(UnsupportedModelError, match="the device map {'': 'dis"):
            refused()


def test_a_map_says_where_the_other_parts_are() -> None:
    for device_map, main in (
        ("auto", "cpu"), ("cpu", "cpu"), ({"": "disk"}, "cpu"), ({"a": "cpu", "b": "disk"}, "cpu"),
        ({"a": "cpu", "b": "cuda:1", "c": "cuda:0"}, "cuda:1"),
    ):  # fmt: skip
        assert find_main_device(device_map) == main
    with fake_device():
        assert choose_placement(device_map={"a": str(DEVICE)})[0] == str(DEVICE)


def test_a_quantised_model_stays(tiny_folder: Path) -> None:
    quantization = pytest.importorskip("torch.ao.quantization")
    pipe = TextToImage.from_pretrained(tiny_folder, device="cpu", dtype="fp32")
    model = pipe.image_model.window.model
    pipe.image_model.window.model = quantization.quantize_dynamic(model, {torch.nn.Linear})
    with pytest.raises(UnsupportedModelError, match="quantised by torch.ao.nn.quantized"):
        pipe.to("bf16")
