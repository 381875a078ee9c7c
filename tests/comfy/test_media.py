"""What the nodes of speech, clips and answers alone do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmaccel
from mmaccel import OptionError
from mmaccel.cli import main
from mmaccel.comfy.loading import LoadedModel
from mmaccel.comfy.speech import pad_sounds
from mmaccel.demo import loading as demo_loading
from mmaccel.pipelines.text_to_speech.types import Speech, Utterance
from mmaccel.results import Stats
from tests.comfy.fake_comfy import Host, policy, run
from tests.comfy.kinds import N_NEW, QUESTIONS, START, Kind, scenes
from tests.fixtures.tiny_vlms import encodes_first
from tests.fixtures.tiny_vqa import QUESTION, save_scenes, scene

KindOf = Callable[[str], Kind]
Load = Callable[[Kind], LoadedModel]
reduces = pytest.mark.skipif(
    not encodes_first(), reason="this transformers encodes images in its first pass"
)


@pytest.fixture
def vqa(kind_of: KindOf) -> Kind:
    return kind_of("Vision")


def tokens(method: str, node: str = "VisualTokens", **values: Any) -> Any:
    chosen = {"method": method} if node == "VisualTokens" else {}
    return run(node, **chosen, **values).values[0]


def test_silence_after_the_shorter_ones() -> None:
    def utterance(*values: float) -> Utterance:
        sound = torch.tensor(values)
        return Utterance(0, "a", None, 0, sound, 8000, torch.zeros(1).long(), 1, True)

    made = Speech([utterance(0.5, 0.25), utterance(), utterance(1.0)], Stats())
    assert pad_sounds(made).tolist() == [[[0.5, 0.25]], [[0.0, 0.0]], [[1.0, 0.0]]]
    assert pad_sounds(Speech([utterance()], Stats())).tolist() == [[[0.0]]]


@pytest.mark.parametrize("word", ["Speech", "TextToVideo", "Video"])
def test_one_report_a_payload_where_passes_are_quick(
    word: str, kind_of: KindOf, loaded: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kind_of(word)
    monkeypatch.setattr("mmaccel.comfy.progress._REPORT", 1e9)
    host = Host()
    kind.make(loaded(kind), host, policy=policy("Autoregressive"))
    done = [report[0] for report in host.reports]
    assert len(done) == kind.rows and done[-1] == kind.tokens


def test_transparency_is_left_out_and_nine_frames_count(kind_of: KindOf, loaded: Load) -> None:
    kind = kind_of("Video")
    model = loaded(kind)
    bright = torch.cat((START, torch.zeros(1, 32, 48, 1)), -1) + 1e-7  # as other nodes return it
    assert torch.equal(kind.make(model, start=bright)[1], kind.make(model)[1])
    more = torch.rand(12, 20, 30, 4, generator=torch.Generator().manual_seed(1))
    assert "9 of them given" in str(kind.make(model, start=more)[-1])


@pytest.mark.parametrize("word", ["", "Speech", "TextToVideo", "Video", "Vision"])
@pytest.mark.parametrize(
    ("node", "slot"), [("SnapkvKVCache", "kv_cache"), ("QuestAttention", "attention")]
)
def test_methods_for_layers_reach_the_run(
    word: str, node: str, slot: str, kind_of: KindOf, loaded: Load
) -> None:
    kind = kind_of(word)
    fields = (
        {"budget": 4, "window": 2}
        if slot == "kv_cache"
        else {"budget": 0.1, "block": 1, "first_layer": 0}
    )
    method = run(node, **fields).values[0]
    _, *_, record = kind.make(loaded(kind), batch_size=kind.rows, **{slot: method})
    assert repr(method) in record.stats.reference


@reduces
def test_fewer_visual_tokens_are_the_command_lines(
    vqa: Kind, loaded: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [str(file) for file in save_scenes(tmp_path)]
    text, kept, stats = vqa.make(
        loaded(vqa),
        image=scenes(0, 1),
        question=QUESTION,
        visual_tokens=tokens("dart", keep=0.25),
        policy=policy("Jacobi", window=5),
        seed=3,
        temperature=1.0,
    )
    options = ["--visual-tokens", "dart", "--keep", "0.25", "--window", "5", "--seed", "3"]
    options += ["--temperature", "1", "--max-tokens", str(N_NEW), "-o", "a.png", "--json", "a.json"]
    model = str(vqa.parts["model"])
    assert main(["answer", *files, QUESTION, "--model", model, *options]) == 0
    report = json.loads(Path("a.json").read_text(encoding="utf-8"))
    assert text == report["runs"][0]["text"]
    drawn = np.asarray(Image.open("a.png"))
    assert torch.equal((kept * 255).round().byte()[0], torch.from_numpy(drawn.copy()))
    said = str(stats)
    assert "relaxed: the model on 260 of 1040 visual tokens after layer 2" in said
    assert f"{QUESTION} {text} (cut): 260 of 1040 visual tokens, 6 tokens, " in said


def test_one_answer_a_line_and_the_image_where_all_stays(vqa: Kind, loaded: Load) -> None:
    model = loaded(vqa)
    rgba = torch.cat([scenes(0), torch.zeros(1, 80, 80, 1)], -1) + 1e-7
    text, kept, _ = vqa.make(model, image=rgba, batch_size=2)
    made = model.pipe(scene(), [q for q in QUESTIONS.split("\n") if q], max_new_tokens=N_NEW)
    assert text.split("\n") == [answer.text for answer in made.answers]
    assert torch.equal(kept, scenes(0))


@reduces
def test_a_picture_for_each_question(vqa: Kind, loaded: Load) -> None:
    _, kept, _ = vqa.make(loaded(vqa), visual_tokens=tokens("fastv", keep=0.3))
    assert kept.shape == (2, 528, 1024, 3) and kept.dtype == torch.float32
    assert not torch.equal(kept[0], kept[1])  # what stays depends on the question


@reduces
def test_methods_of_two_stages_in_a_chain(vqa: Kind, loaded: Load) -> None:
    first = tokens("hired", keep=0.5)
    both = tokens("fastv", n_keep=40, visual_tokens=first)
    assert both.methods == (mmaccel.HiRED(keep=0.5), mmaccel.FastV(n_keep=40))
    said = str(vqa.make(loaded(vqa), visual_tokens=both)[-1])
    assert "250 of 520 visual tokens, 40 of 250 visual tokens after layer 2" in said
    with pytest.raises(OptionError, match="expected one method a stage"):
        tokens("divprune", keep=0.5, visual_tokens=first)


def test_a_methods_own_node_has_its_fields_and_may_end_a_chain() -> None:
    first = tokens("hired", "HiredVisualTokens", keep=0.5, queries="all", scorer=tokens("evs"))
    assert first.methods[0] == mmaccel.HiRED(keep=0.5, queries="all", scorer=mmaccel.EVS(keep=0.22))
    both = tokens("", "PyramidDropVisualTokens", layers="1, 2", visual_tokens=first)
    assert both.methods[1] == mmaccel.PyramidDrop(keep=0.22, layers=(1, 2))
    with pytest.raises(OptionError, match="scorer: expected one method, received a chain of 2"):
        tokens("", "HiredVisualTokens", scorer=both)
    assert tokens("", "IlreVisualTokens", layer=0).methods == (mmaccel.ILRe(keep=0.22),)


@reduces
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"method": "lazy-llm"}, r"visual_tokens: expected Autoregressive\(\) with LazyLLM"),
        ({"max_tokens": 2000}, "positions: expected at most 2048"),
        ({"question": "is <image> above <image> ?"}, "images: expected 2, one for each <image>"),
    ],
    ids=str,
)
def test_what_only_the_model_knows_is_said_in_its_node(
    values: dict[str, Any], said: str, vqa: Kind, loaded: Load
) -> None:
    asked = dict(values)
    if "method" in asked:
        asked["visual_tokens"] = tokens(asked.pop("method"), keep=0.5)
    with pytest.raises(OptionError, match=said):
        vqa.make(loaded(vqa), **asked)


@pytest.mark.parametrize(
    ("values", "said"),
    [({"max_seconds": 9.0}, "positions: expected at most 160"), ({"voice": " tara "}, "'tara';")],
    ids=str,
)
def test_what_only_a_speaker_knows_is_said_in_its_node(
    values: dict[str, Any], said: str, kind_of: KindOf, loaded: Load
) -> None:
    kind = kind_of("Speech")
    with pytest.raises(OptionError, match=said):
        kind.make(loaded(kind), **values)


def test_weights_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind_of: KindOf, tiny_folder: Path
) -> None:
    monkeypatch.setattr(demo_loading, "WEIGHTS", tmp_path)
    with pytest.raises(OptionError, match="scripts.training scenes-vqa"):
        run("LoadVisionModel")
    for word in ("Speech", "Video"):
        with pytest.raises(OptionError, match="which makes images from prompts"):
            kind_of(word).load(model=str(tiny_folder))
