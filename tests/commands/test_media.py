"""`mmaccel speak` and `mmaccel animate`: files equal the payloads, facts, wrong options."""

from __future__ import annotations

import json
import re
import shutil
import wave
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel import ImageToVideo, TextToSpeech
from mmaccel.cli import main
from mmaccel.commands.jobs import codec as codec_job
from mmaccel.commands.jobs import media as media_job
from mmaccel.outputs.video_files import read_frames
from mmaccel.pipelines.loading.sources import content_hash
from tests.fixtures.media import build_media, image, read_webp
from tests.fixtures.shared import reading_folders, reading_pipe
from tests.fixtures.speech import TEXTS, build_speech

SECONDS = 0.05
COMMANDS = {"speak": ("llasa", "wav", "utterance"), "animate": ("cosmos", "webp", "clip")}
Parts = tuple[Path, Path]


class Command:
    """A command on a tiny model."""

    def __init__(self, name: str, parts: Parts, folder: Path) -> None:
        self.name, self.parts, self.out = name, parts, folder / "out"
        _, self.suffix, self.unit = COMMANDS[name]
        self.start = folder / "red fox.png"
        image().save(self.start)
        self.seed: list[object] = ["--seed", 0]  # an argument replaces it

    def run(self, n: int, *arguments: object, parts: Parts | None = None) -> int:
        """Generate n payloads."""
        inputs: list[object]
        if self.name == "speak":
            inputs = [*TEXTS[:n], "--max-seconds", SECONDS]
        else:
            inputs = [self.start, "--count", n, "--format", "webp"]
        return self.raw(*inputs, *arguments, parts=parts)

    def raw(self, *arguments: object, parts: Parts | None = None) -> int:
        """The command with these arguments, model, codec and folder."""
        model, codec = parts or self.parts
        fixed = ["--model", model, "--codec", codec, "--out", self.out]
        return main([str(each) for each in (self.name, *self.seed, *arguments, *fixed)])

    def files(self) -> list[Path]:
        """The files without the JSON files."""
        return sorted(self.out.glob(f"*.{self.suffix}"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parts]:
    return {
        name: build_media(kind, tmp_path_factory.mktemp(name))
        for name, (kind, _, _) in COMMANDS.items()
    }


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest, built: dict[str, Parts], tmp_path: Path) -> Command:
    return Command(request.param, built[request.param], tmp_path)


@pytest.fixture
def speak(built: dict[str, Parts], tmp_path: Path) -> Command:
    return Command("speak", built["speak"], tmp_path)


@pytest.fixture
def animate(built: dict[str, Parts], tmp_path: Path) -> Command:
    return Command("animate", built["animate"], tmp_path)


def facts_of(files: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(f.with_suffix(".json").read_text(encoding="utf-8")) for f in files]


def read_wav(file: Path) -> tuple[int, np.ndarray[Any, Any]]:
    with wave.open(str(file)) as sound:
        assert (sound.getnchannels(), sound.getsampwidth()) == (1, 2)
        return sound.getframerate(), np.frombuffer(sound.readframes(sound.getnframes()), "<i2")


def test_sound_files_hold_the_pipelines_sound(speak: Command, capsys: Any) -> None:
    assert speak.run(3, "--seed", 3, "--batch-size", 2) == 0
    plain = TextToSpeech.from_pretrained(speak.parts[0], codec=speak.parts[1])(
        TEXTS, seed=[3, 4, 5], max_seconds=SECONDS
    )
    files = speak.files()
    for file, facts, made in zip(files, facts_of(files), plain.utterances, strict=True):
        rate, samples = read_wav(file)
        wanted = np.rint(made.waveform.double().numpy() * 32767)
        assert rate == 16000 and np.abs(samples - wanted).max() <= 1
        assert facts["text"] == made.text and facts["seed"] == made.seed
        assert facts["is_finished"] == made.is_finished and facts["tokens"] == len(made.tokens)
        assert facts["temperature"] == 0.8 and facts["repetition_penalty"] == 1.0
        assert facts["seconds"] == made.seconds and facts["sample_rate"] == 16000
    said = capsys.readouterr().out
    seconds = sum(made.seconds for made in plain.utterances)
    assert f"3 utterances, {seconds:.1f} s of sound, in {speak.out}: " in said
    assert said.count("was cut at") == sum(not made.is_finished for made in plain.utterances) > 0


def test_video_files_hold_the_pipelines_frames(animate: Command, capsys: Any) -> None:
    assert animate.run(3, "--seed", 7, "--top-p", 1) == 0
    said = capsys.readouterr().out
    assert f"3 clips in {animate.out}: " in said and "bitwise" in said
    files = animate.files()
    assert [file.name[:13] for file in files] == ["0007-red-fox-", "0008-red-fox-", "0009-red-fox-"]
    pipe = ImageToVideo.from_pretrained(animate.parts[0], codec=animate.parts[1])
    wanted = pipe(image(), seed=[7, 8, 9], top_p=1.0)
    for file, facts, clip in zip(files, facts_of(files), wanted.clips, strict=True):
        assert torch.equal(read_webp(file), clip.frames)
        assert (facts["start"], facts["seed"], facts["n_given"]) == ("red fox.png", clip.seed, 1)
        assert (facts["frames"], facts["fps"], facts["tokens"]) == (17, 25.0, 18)
        assert (facts["passes"], facts["total_variation"]) == (clip.passes, 0.0)
        assert facts["top_p"] == 1.0


def test_a_prompt_behind_the_start_is_read(tmp_path: Path, capsys: Any) -> None:
    model, codec, encoder = reading_folders()
    animate = Command("animate", (model, codec), tmp_path)
    text = ["--text-encoder", encoder, "--format", "webp", "--seed", 7]
    assert animate.raw(animate.start, "a red fox", *text) == 0
    (file,), (facts,) = animate.files(), facts_of(animate.files())
    wanted = reading_pipe()(image(), prompt="a red fox", seed=7)
    assert torch.equal(read_webp(file), wanted[0].frames)
    assert (facts["prompt"], facts["start"]) == ("a red fox", "red fox.png")
    assert facts["text_encoder"] == content_hash(encoder)
    assert animate.raw(animate.start, *text) == 2
    assert "prompt: expected what happens in the clip" in capsys.readouterr().err
    assert animate.raw(animate.start, "a blue fox", *text) == 0
    assert len(animate.files()) == 2


def test_a_drawn_seed_is_said_and_makes_the_same_files(command: Command, capsys: Any) -> None:
    command.seed = []
    assert command.run(2) == 0
    found = re.match(r"seed: (\d+), drawn; .* --seed \1 makes the same", capsys.readouterr().out)
    assert found is not None
    made = {file.name: file.read_bytes() for file in command.files()}
    shutil.rmtree(command.out)
    assert command.run(2, "--seed", found[1]) == 0
    assert {file.name: file.read_bytes() for file in command.files()} == made and len(made) == 2
    seeds = [facts["seed"] for facts in facts_of(command.files())]
    assert sorted(seeds) == [int(found[1]), int(found[1]) + 1]
    assert ", drawn" not in capsys.readouterr().out


def test_batch_and_policy_change_the_cost_alone(command: Command) -> None:
    """The file name has the policy and its fields; the batch size only where it matters."""
    assert command.run(3) == 0
    before = {file.name: file.read_bytes() for file in command.files()}
    assert len(before) == 3
    assert sorted(command.out.iterdir()) == sorted(
        path for file in command.files() for path in (file, file.with_suffix(".json"))
    )
    for facts in facts_of(command.files()):
        assert (facts["policy"], facts["exactness"]) == ("jacobi", "bitwise")
        assert facts["weights"] == content_hash(command.parts[0])
        assert facts["codec"] == content_hash(command.parts[1])
    for other in (("--window", 5, "--batch-size", 2), ("--policy", "autoregressive")):
        known = set(command.files())
        assert command.run(3, *other) == 0
        again = [file for file in command.files() if file not in known]
        assert sorted(file.read_bytes() for file in again) == sorted(before.values())
    assert len(command.files()) == 9


def test_only_the_same_payload_is_overwritten(command: Command) -> None:
    model, codec = command.parts
    for arguments in ((), (), ("--seed", 1), ("--temperature", 0.5), ("--batch-size", 2)):
        assert command.run(1, *arguments) == 0
    assert len(command.files()) == 3
    assert command.run(1, parts=(model / ".." / model.name, codec)) == 0  # another spelling
    assert len(command.files()) == 3
    for rows in (1, 2):  # an acceptance may depend on the last bit
        assert command.run(1, "--policy", "mc-sjd", "--batch-size", rows) == 0
    assert len(command.files()) == 5


def test_another_codec_makes_another_name(command: Command, tmp_path: Path) -> None:
    model, codec = command.parts
    other = Path(shutil.copytree(codec, tmp_path / "other"))
    (other / "config.json").write_text("{} " if command.name == "animate" else (
        codec / "config.json").read_text(encoding="utf-8") + " ", encoding="utf-8")  # fmt: skip
    for parts in ((model, codec), (model, other)):
        assert command.run(1, parts=parts) == 0
    hashes = {content_hash(codec), content_hash(other)}
    assert {facts["codec"] for facts in facts_of(command.files())} == hashes and len(hashes) == 2
    assert len(command.files()) == 2


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "mmaccel: stopped; 1 of 3 {unit}s are in {out}"),
        (
            OSError(28, "No space left on device"),
            1,
            "mmaccel: --out: expected space for {file} in '{out}', received No space left on "
            "device; 1 of 3 {unit}s are written; free some space, and run it again",
        ),
    ],
    ids=["ctrl-c", "full disk"],
)
def test_written_files_remain(
    command: Command, error: BaseException, code: int, message: str,
    monkeypatch: pytest.MonkeyPatch, capsys: Any,
) -> None:  # fmt: skip
    calls: list[Path] = []

    def fail_second(write: Callable[..., None], file: Path, **facts: Any) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise error
        write(file, **facts)

    for name in ("write_sound", "write_video"):
        own = partial(fail_second, getattr(codec_job, name))
        monkeypatch.setattr(codec_job, name, own)
    assert command.run(3, "--batch-size", 3) == code
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line == message.format(unit=command.unit, out=command.out, file=calls[1].name)
    assert len(command.files()) == 1


def test_files_removed_meanwhile_are_missing_at_the_end(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def remove_others(write: Callable[..., None], file: Path, **facts: Any) -> None:
        for other in command.files():
            other.unlink()
        write(file, **facts)

    for name in ("write_sound", "write_video"):
        own = partial(remove_others, getattr(codec_job, name))
        monkeypatch.setattr(codec_job, name, own)
    assert command.run(2, "--batch-size", 2) == 3
    said = capsys.readouterr()
    assert f"expected the 4 written files in '{command.out}'" in said.err and said.out == ""
    assert "a folder without 1 of them (" in said.err


LOADED = [
    (["--voice", "tara"], 2, "voice: expected none for Llasa"),
    (["--device", "cuda:9"], 2, "device: expected"),
    (["--cuda-graphs", "on"], 1, "cuda_graphs=True: expected a model on a CUDA device"),
    (["--family", "bark"], 2, "family: expected one of llasa, orpheus"),
]


@pytest.mark.parametrize(("arguments", "code", "said"), LOADED, ids=lambda v: str(v)[:30])
def test_what_the_model_refuses_makes_no_folder(
    speak: Command, arguments: list[str], code: int, said: str, capsys: Any
) -> None:
    assert speak.run(1, *arguments) == code and said in capsys.readouterr().err
    assert not speak.out.exists()


def test_another_sound_has_another_name(speak: Command, tmp_path: Path) -> None:
    """Capitals, full stops and the chat template change the sound."""
    for text in ("blue cat", "blue cat.", "Blue cat", " blue cat "):
        assert speak.raw(text, "--max-seconds", SECONDS) == 0
    assert len(speak.files()) == 3
    model = Path(shutil.copytree(speak.parts[0], tmp_path / "model"))
    template = model / "chat_template.jinja"
    template.write_text("{# changed #}" + template.read_text(encoding="utf-8"), encoding="utf-8")
    assert speak.raw("blue cat", "--max-seconds", SECONDS, parts=(model, speak.parts[1])) == 0
    assert len(speak.files()) == 4


def test_a_length_that_others_shortened_is_in_the_name(speak: Command) -> None:
    """Without --max-seconds, the longest text decides the length that is left for all."""
    for texts in (["fox"], ["fox", "the grass in the snow"], ["fox", "the grass in the snow"]):
        assert speak.raw(*texts) == 0
    # 160 positions; 14 ids beside a text's own; 20 samples of 16000 a second for a code
    seconds = sorted((each["text"], each["max_seconds"]) for each in facts_of(speak.files()))
    assert seconds == [
        ("fox", (160 - 14 - 5) / 800),
        ("fox", (160 - 14 - 1) / 800),
        ("the grass in the snow", (160 - 14 - 5) / 800),
    ]


def test_voice_and_dtype_are_recorded_and_in_the_name(speak: Command, tmp_path: Path) -> None:
    parts = build_speech("orpheus", tmp_path / "parts")
    for own in ((), ("--voice", "leo"), ("--dtype", "bfloat16"),
                ("--dtype", "bfloat16", "--batch-size", 2)):  # fmt: skip
        assert speak.raw("fox", "--max-seconds", 0.003, *own, parts=parts) == 0
    facts = facts_of(speak.files())
    found = sorted((str(f["voice"]), f["dtype"], f["exactness"] == "bitwise") for f in facts)
    assert found == [
        ("None", "bfloat16", False),
        ("None", "bfloat16", False),
        ("None", "float32", True),
        ("leo", "float32", True),
    ]


def test_an_mp4_can_be_continued(animate: Command, tmp_path: Path) -> None:
    """The name of the folder looks like a protocol of FFmpeg."""
    animate.out = tmp_path / "clips:today"
    assert animate.raw(animate.start) == 0
    (clip,) = animate.out.glob("*.mp4")
    frames = read_frames(clip, 99)
    assert len(frames) == 17 and frames[0].size == (48, 32)
    assert len(read_frames(clip, 9)) == 9
    animate.out = tmp_path / "more"
    assert animate.raw(clip, animate.start, "--format", "webp") == 0
    assert sorted(facts["n_given"] for facts in facts_of(animate.files())) == [1, 9]


def test_starts_of_one_name_do_not_overwrite_each_other(animate: Command, tmp_path: Path) -> None:
    """Their first frames are equal."""
    files = [tmp_path / name / "c.webp" for name in ("red", "blue")]
    for file in files:
        pages = [Image.new("RGB", (48, 32), file.parent.name) for _ in range(8)]
        for k, page in enumerate(pages):
            page.putpixel((k, 0), (255, 255, 255))  # equal pages would become one
        file.parent.mkdir()
        image().save(file, save_all=True, append_images=pages, lossless=True)
    assert [len(read_frames(file, 9)) for file in files] == [9, 9]
    assert animate.raw(*files, "--format", "webp") == 0 and len(animate.files()) == 2


def test_the_bar_counts_the_payloads_of_all_runs() -> None:
    from mmaccel.results import Progress

    shown: list[float] = []

    class Bar:
        def update(self, task: object, completed: float) -> None:
            shown.append(completed)

    bar, tokens = media_job.JobProgress(Bar(), 0), torch.zeros(1, 4, dtype=torch.int64)
    for _ in range(2):  # two starts, two clips each, one at a time
        bar.begin(2)
        for row in range(2):
            bar.update(Progress(tokens, torch.tensor([2]), torch.zeros(1), 1, (row,)))
            bar.finish(row)
    assert shown == [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]


def test_long_words_of_wide_letters_fit_a_file_name(speak: Command) -> None:
    text = " ".join(letter * 30 for letter in "\U0001d400\U0001d401狐")
    assert speak.raw(text, "--seed", 2**64 - 1, "--max-seconds", SECONDS) == 0
    (file,) = speak.files()
    assert "\U0001d400" * 15 + "-" + "\U0001d401" * 15 + "-" + "狐" * 20 + "-" in file.name
