"""Vision-language nodes at work: the command line's answer, methods in a chain, interrupts."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from PIL import Image

import mmaccel
from mmaccel import OptionError
from mmaccel.cli import main
from mmaccel.comfy.loading import LOADERS, LoadedModel
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.schemas import v1_class, v3_class
from mmaccel.comfy.values import refusal
from mmaccel.demo import vision
from tests.comfy.fake_comfy import Host, Interrupted, install, policy, run
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_vlms import encodes_first
from tests.fixtures.tiny_vqa import QUESTION, save_scenes, save_vqa, scene

N_NEW = 6
QUESTIONS = f"{QUESTION}\n\nhow many stars are there?\nwhat number is on the green sign ?"
reduces = pytest.mark.skipif(
    not encodes_first(), reason="this transformers encodes images in its first pass"
)


def to_image(*indices: int) -> torch.Tensor:
    pixels = np.stack([np.asarray(scene(k)) for k in indices])
    return torch.from_numpy(pixels).float() / 255


def load(folder: Path, host: Host | None = None, **values: Any) -> LoadedModel:
    opened: LoadedModel = run("LoadVisionModel", host, model=str(folder), **values).values[0]
    return opened


def ask(model: LoadedModel, host: Host | None = None, **values: Any) -> tuple[Any, ...]:
    own = dict(vision_model=model, image=to_image(0), question=QUESTION, max_tokens=N_NEW)
    return run("AnswerQuestion", host, **(own | values)).values


def tokens(method: str, **values: Any) -> Any:
    return run("VisualTokens", method=method, **values).values[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vqa(tmp_path_factory.mktemp("vqa"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load(folder)


@reduces
def test_the_answer_is_the_command_lines(
    model: LoadedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [str(file) for file in save_scenes(tmp_path)]
    text, kept, stats = ask(
        model, image=to_image(0, 1), visual_tokens=tokens("dart", keep=0.25),
        policy=policy("Jacobi", window=5), seed=3, temperature=1.0,
    )  # fmt: skip
    options = ["--visual-tokens", "dart", "--keep", "0.25", "--window", "5", "--seed", "3"]
    options += ["--temperature", "1", "--max-tokens", str(N_NEW), "-o", "a.png", "--json", "a.json"]
    assert main(["answer", *files, QUESTION, "--model", str(folder), *options]) == 0
    report = json.loads(Path("a.json").read_text(encoding="utf-8"))
    assert text == report["runs"][0]["text"]
    drawn = np.asarray(Image.open("a.png"))
    assert torch.equal((kept * 255).round().byte()[0], torch.from_numpy(drawn.copy()))
    said = run("Stats", stats=stats).text
    assert "relaxed: the model on 260 of 1040 visual tokens after layer 2" in said
    assert "policy       jacobi, window 5" in said
    assert f"{QUESTION} {text} (cut): 260 of 1040 visual tokens, 6 tokens, " in said


def test_one_answer_a_line_and_the_image_where_all_stays(model: LoadedModel) -> None:
    image = to_image(0)
    rgba = torch.cat([image, torch.zeros(1, 80, 80, 1)], -1) + 1e-7
    text, kept, stats = ask(model, image=rgba, question=QUESTIONS, batch_size=2)
    pipe = model.pipe
    made = pipe(scene(), [q for q in QUESTIONS.split("\n") if q], max_new_tokens=N_NEW)
    assert text.split("\n") == [answer.text for answer in made.answers]
    assert torch.equal(kept, image)
    assert "bitwise: same seed, same tokens" in run("Stats", stats=stats).text


@reduces
def test_a_picture_for_each_question(model: LoadedModel) -> None:
    _, kept, _ = ask(model, question=QUESTIONS, visual_tokens=tokens("fastv", keep=0.3))
    assert kept.shape == (3, 528, 1024, 3) and kept.dtype == torch.float32
    assert not torch.equal(kept[0], kept[1])  # what stays depends on the question


@reduces
def test_methods_of_two_stages_in_a_chain(model: LoadedModel) -> None:
    first = tokens("hired", keep=0.5)
    both = tokens("fastv", n_keep=40, visual_tokens=first)
    assert both.methods == (mmaccel.HiRED(keep=0.5), mmaccel.FastV(n_keep=40))
    said = run("Stats", stats=ask(model, visual_tokens=both)[-1]).text
    assert "250 of 520 visual tokens, 40 of 250 visual tokens after layer 2" in said
    with pytest.raises(OptionError, match="expected one method a stage"):
        tokens("divprune", keep=0.5, visual_tokens=first)


def test_progress_and_interrupts(model: LoadedModel) -> None:
    host = Host()
    ask(model, host, question=QUESTIONS, policy=policy("Autoregressive"))
    done = [report[0] for report in host.reports]
    assert done == sorted(done) and done[-1] == 3 * N_NEW and len(done) > N_NEW
    assert {report[1] for report in host.reports} == {3 * N_NEW}
    passes: list[object] = []
    layer = model.pipe.model.get_decoder()
    hook = layer.register_forward_pre_hook(lambda *_: passes.append(_))
    try:
        with pytest.raises(Interrupted):
            ask(model, Host(stop_at=1), policy=policy("Autoregressive"))
        assert not passes
        with pytest.raises(Interrupted):
            ask(model, Host(stop_at=4), policy=policy("Autoregressive"))
    finally:
        hook.remove()
    assert len(passes) == 3  # the prompt's, which gives the first token, and two
    assert ask(model)[0]  # and the model is free


def test_a_model_is_loaded_once_and_held_weakly(folder: Path) -> None:
    host = Host()
    first = load(folder, host, dtype="bfloat16")
    assert load(folder, host, dtype="bf16") is first and len(host.freed) == 1
    assert load(folder, host, dtype="fp32") is load(folder, host) is not first
    host.freed.clear()
    assert load(folder, host, dtype="float16") is not first
    assert first.pipe.model.dtype == torch.bfloat16
    before = LOADERS["Vision"].fingerprint(model=str(folder))
    (folder / "model.safetensors").touch()
    assert LOADERS["Vision"].fingerprint(model=str(folder)) != before
    assert LOADERS["Vision"].fingerprint(model="owner/name") == ""
    assert load(folder, host, dtype="bfloat16") is not first
    gone = ref(first)
    del first
    gc.collect()
    assert gone() is None


def test_bad_values_are_refused_before_anything_runs(tmp_path: Path) -> None:
    build_lm("llama").save_pretrained(tmp_path / "lm")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("LoadVisionModel", {"model": "none"}, "model: expected a folder"),
        ("LoadVisionModel", {"model": str(tmp_path / "lm")}, "expected a vision-language model"),
        ("LoadVisionModel", {"device": "cuda:9"}, "device: expected"),
        ("VisualTokens", {"keep": 0.0}, "DART.keep: expected a number in (0, 1], received 0"),
        ("VisualTokens", {"keep": 1.5}, "DART.keep: expected a number in (0, 1]"),
        ("VisualTokens", {"n_keep": -1}, "DART.n_keep: expected an integer >= 1"),
        ("VisualTokens", {"method": "best"}, "visual_tokens: expected one of downsample"),
        ("AnswerQuestion", {"question": " \n "}, "prompt: expected a question"),
        ("AnswerQuestion", {"temperature": -0.5}, "temperature"),
        ("AnswerQuestion", {"max_tokens": 0}, "max_tokens: expected a number in 1..65536"),
        ("AnswerQuestion", {"batch_size": 0}, "batch_size: expected a number in 1..256"),
    ]
    for name, values, said in cases:
        assert said in str(refusal(NODES[f"MMAccel{name}"], values)), values
    assert refusal(NODES["MMAccelLoadVisionModel"], {"model": "owner/name"}) is None


@reduces
def test_what_only_the_model_knows_is_said_in_its_node(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match="visual_tokens: expected Autoregressive.. with LazyLLM"):
        ask(model, visual_tokens=tokens("lazy-llm", keep=0.5))
    with pytest.raises(OptionError, match="policy: expected one of"):
        ask(model, policy=policy("EntropyBounded"))
    with pytest.raises(OptionError, match="positions: expected at most 2048"):
        ask(model, max_tokens=2000)
    with pytest.raises(OptionError, match="images: expected 2, one for each <image>"):
        ask(model, question="is <image> like <image> ?")
    monkeypatch.setattr(vision, "WEIGHTS", tmp_path)
    with pytest.raises(OptionError, match="scripts.training vqa"):
        run("LoadVisionModel")


def test_both_schemas_have_the_native_sockets(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comfy = install(monkeypatch, with_v3=False)
    loader: Any = v1_class(NODES["MMAccelLoadVisionModel"])
    node: Any = v1_class(NODES["MMAccelAnswerQuestion"])
    assert node.RETURN_TYPES == ("STRING", "IMAGE", "MMACCEL_STATS")
    assert set(node.INPUT_TYPES()["optional"]) == {"policy", "visual_tokens"}
    (opened,) = loader().execute(model=str(folder))
    text, kept, _ = node().execute(
        vision_model=opened, image=to_image(0), question=QUESTION, max_tokens=3
    )
    assert isinstance(text, str) and kept.shape == (1, 80, 80, 3)
    assert comfy.reports[-1][:2] == (3, 3)
    install(monkeypatch, with_v3=True)
    schema = v3_class(NODES["MMAccelAnswerQuestion"]).define_schema()
    assert [output.io_type for output in schema.outputs] == list(node.RETURN_TYPES)
