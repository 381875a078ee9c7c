"""`--drafts`: names of draft sources and folders of coarse models, in commands and nodes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from mmaccel import Coarse, Jacobi, OptionError, TextToImage
from mmaccel.catalog import make_policy
from mmaccel.cli import main
from mmaccel.comfy.nodes import NODES
from mmaccel.commands.options import WindowPolicyFlags
from mmaccel.samplers.drafting.coarse_model import WEIGHTS, describe_coarse
from tests.fixtures.tiny_coarse import MINUTES, build_coarse
from tests.fixtures.tiny_model import CAPTIONS


@pytest.fixture(scope="module")
def coarse(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random coarse model for the tiny model."""
    folder = tmp_path_factory.mktemp("made") / "coarse"
    return build_coarse(TextToImage.from_pretrained(tiny_folder), folder)


def test_a_comparison_says_that_drafts_are_coarse(
    tiny_folder: Path, coarse: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(tiny_folder), "--out", str(tmp_path), "--window", "8", "--compare"]
    options += ["--seed", "0"]
    assert main(["generate", CAPTIONS[1], "--drafts", coarse, *options]) == 0
    said = capsys.readouterr().out
    assert "jacobi, coarse drafts" in said and "The same image, token for token" in said
    (file,) = tmp_path.glob("0000-*.png")
    facts = json.loads(Image.open(file).text["mmaccel"])  # type: ignore[attr-defined]
    assert facts["policy_options"]["drafts"] == {
        "folder": coarse,
        "candidates": 16,
        "rounds": None,
    }
    assert facts["batch"]["stats"]["drafts"] == "coarse"


@pytest.mark.parametrize("drafts", ["nowhere/coarse", "no-such-source", ""])
@pytest.mark.parametrize("command", ["generate", "speak", "bench"])
def test_wrong_drafts_are_refused_before_a_model_is_opened(
    command: str, drafts: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(TextToImage, "from_pretrained", None)  # would not be callable
    fixed = {"generate": ["--policy", "sjd"], "speak": ["--model", "x"], "bench": []}[command]
    out = [] if command == "bench" else ["--out", str(tmp_path / "out")]
    assert main([command, "a red circle", "--drafts", drafts, *fixed, *out]) == 2
    said = " ".join(capsys.readouterr().err.split())
    if command == "bench" and not drafts:
        assert "--drafts: expected at least one" in said
    elif "/" in drafts:
        assert "drafts: expected a folder, received 'nowhere/coarse'" in said
    else:
        assert "drafts: expected one of auto, coarse, " in said
        assert "neighbour" in said and f", received {drafts!r}; auto suits" in said
    assert not list(tmp_path.iterdir())


def test_every_command_and_the_nodes_take_a_folder(coarse: str) -> None:
    assert WindowPolicyFlags(policy="jacobi", drafts=coarse).choose("window")[1] == Jacobi(
        drafts=Coarse(coarse)
    )
    assert make_policy("mc-sjd", drafts=coarse).drafts == Coarse(coarse)
    assert make_policy("jacobi", drafts="left").drafts == "left"
    with pytest.raises(OptionError, match="--drafts: expected it once"):
        WindowPolicyFlags(drafts=coarse, set_fields=["drafts=left"]).choose("window")
    spec = NODES["MMAccelJacobiPolicy"]
    values = {"drafts": "left", "coarse_folder": f'"{coarse}" '}
    (made,) = spec.run(**spec.read(values))
    assert made.policy.drafts == Coarse(coarse)
    assert "no coarse.json" in str(spec.refusal({"coarse_folder": str(Path(coarse).parent)}))
    assert "coarse_folder" not in [w.name for w in NODES["MMAccelPromptLookupPolicy"].widgets]


def test_bench_compares_draft_sources_in_one_run(
    tiny_folder: Path, coarse: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    options = ["--policies", "jacobi,prompt-lookup", "--windows", "8", "--guidance", "1"]
    options += ["--count", "2", "--json", str(file), "--model", str(tiny_folder)]
    assert main(["bench", CAPTIONS[1], *options, "--drafts", f"neighbour,coarse,{coarse}"]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    rows = [(row["policy"], row["drafts"], row["identical"]) for row in report["rows"][:4]]
    assert rows == [
        ("autoregressive", None, 2),
        ("jacobi", "neighbour", 2),
        ("jacobi", "neighbour", 2),  # the model ships none
        ("jacobi", coarse, 2),
    ]
    assert len(report["rows"]) == 5 and report["rows"][4]["drafts"] == "ngram"
    assert report["rows"][3]["passes"] != report["rows"][1]["passes"]
    assert report["coarse"] == {coarse: describe_coarse(coarse)}
    assert report["coarse"][coarse]["minutes"] == MINUTES
    assert report["coarse"][coarse]["bytes"] == (Path(coarse) / WEIGHTS).stat().st_size
    assert "jacobi 8 coarse" in capsys.readouterr().out


def test_bench_refuses_drafts_that_no_policy_takes(tiny_folder: Path, capsys) -> None:
    fixed = ["--model", str(tiny_folder), "--drafts", "left"]
    assert main(["bench", "--policies", "prompt-lookup", *fixed]) == 2
    assert "--drafts: expected a policy that has draft sources" in capsys.readouterr().err
    assert main(["bench", "--family", "canvas", *fixed]) == 2
    assert "--drafts: expected none with --family canvas" in capsys.readouterr().err


def test_models_says_where_a_coarse_model_ships(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        "mmaccel.samplers.drafting.coarse_model.find_coarse",
        lambda folder: folder if folder.name == "scenes" else None,
    )
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = {line.split()[0]: line.split()[1] for line in lines if line.startswith("scenes")}
    assert told == {"scenes": "yes", "scenes-masked": "-", "scenes-vqa": "-"}


def test_bench_names_the_coarse_model_in_the_models_folder(
    tiny_folder: Path, coarse: str, tmp_path: Path
) -> None:
    model, file = tmp_path / "model", tmp_path / "found.json"
    shutil.copytree(tiny_folder, model)
    shutil.copytree(coarse, model, dirs_exist_ok=True)
    options = ["--policies", "jacobi,mc-sjd", "--windows", "8", "--guidance", "1", "--count", "1"]
    assert main(["bench", CAPTIONS[0], *options, "--model", str(model), "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert [row["drafts"] for row in report["rows"]] == [None, "coarse", "neighbour"]
    assert report["coarse"] == {"coarse": describe_coarse(coarse)}
