"""`voices`: what espeak is asked, pools, batches, losses of both models, the judge, the folder."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmaccel import Jacobi, TextToSpeech, attach
from mmaccel.demo.voices.words import GROUPS, LONGEST, SPEAKERS, WORDS, make_sentence
from mmaccel.errors import OptionError
from mmaccel.tokenizers_vq.speech_codec import SpeechCodec, save_codec
from scripts.training.data import IGNORE
from scripts.training.generator import GeneratorTraining, train_generator
from scripts.training.voices import SpokenText, Voices, code_loss
from scripts.training.voices_codec import SpectralLoss, encode_pool, train_codec
from scripts.training.voices_data import make_pool, open_pool
from scripts.training.voices_depth import STACK, VoicesDepth, book_losses, stack_frames
from scripts.training.voices_export import (
    aligned_distance,
    choose_sentences,
    export_voices,
    measure_samples,
)
from scripts.training.voices_judge import Judge, Phones, edit_distance, phone_errors, train_judge
from scripts.training.voices_maker import SPEAKERS_MADE, resample, write_phonemes
from tests.fixtures.voices import TINY_CODEC

COUNT = 24
LEXICON = {word: ["'", *word[:3]] for word in WORDS}


def write_pool(folder: Path, name: str, seed: int) -> None:
    """A pool of noise in the files of `make_pool`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(6_000, 12_000, size=COUNT)
    sound = rng.normal(scale=2000, size=lengths.sum()).astype(np.int16)
    sound.tofile(folder / f"{name}.sound")
    found = {
        "ends": lengths.cumsum().tolist(),
        "sentences": [list(make_sentence(seed, k)) for k in range(COUNT)],
        "speakers": rng.integers(len(SPEAKERS), size=COUNT).tolist(),
    }
    (folder / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("voices")
    for k, name in enumerate(("train", "validation", "codec")):
        write_pool(folder, name, k)
    (folder / "lexicon.json").write_text(json.dumps(LEXICON), encoding="utf-8")
    torch.manual_seed(0)
    save_codec(SpeechCodec(**TINY_CODEC), TINY_CODEC, folder / "codec", torch.float32)
    for name in ("train", "validation"):
        encode_pool(folder, name)
    return folder


def test_sentences_are_of_listed_words_and_fixed_by_their_seed() -> None:
    assert 300 <= len(WORDS) <= 600 and len(GROUPS["digit"]) == 10
    sentences = [make_sentence(3, k) for k in range(300)]
    assert {len(sentence) for sentence in sentences} == {*range(1, LONGEST + 1)}
    assert {word for sentence in sentences for word in sentence} <= set(WORDS)
    assert make_sentence(3, 7) == sentences[7] and make_sentence(4, 7) != sentences[7]
    assert SPEAKERS_MADE.keys() == set(SPEAKERS)


def test_codes_of_another_codec_are_refused(work: Path) -> None:
    made_by = work / "validation.codes.sha256"
    known = made_by.read_text(encoding="utf-8")
    encode_pool(work, "validation")  # the same codec: nothing to do
    made_by.write_text("0", encoding="utf-8")
    with pytest.raises(OptionError, match="received those of another"):
        encode_pool(work, "validation")
    made_by.write_text(known, encoding="utf-8")


def test_a_pool_of_another_size_is_refused(work: Path) -> None:
    with pytest.raises(OptionError, match="received 99; delete train"):
        make_pool(work, "train", 5, 99)


def test_phonemes_are_written_as_espeak_reads_them() -> None:
    assert write_phonemes(["h", "@", "l", "'", "oU"]) == "h|@|l|'oU"
    assert write_phonemes([",", "V", "n"]) == ",V|n"


def test_resampling_keeps_tones_and_drops_what_is_too_high() -> None:
    time = np.arange(2205) / 22_050
    low, high = np.sin(2 * np.pi * 440 * time), np.sin(2 * np.pi * 9_500 * time)
    made = resample(low + high)
    wanted = np.sin(2 * np.pi * 440 * np.arange(1600) / 16_000)
    assert len(made) == 1600 and np.abs(made - wanted)[50:-50].max() < 0.02


@pytest.mark.skipif(find_spec("espeakng_loader") is None, reason="needs espeakng-loader")
def test_a_pool_of_espeak_is_nearly_the_same_again(tmp_path: Path) -> None:
    """The noise of espeak's own voices is not fixed by a seed."""
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
        make_pool(tmp_path / part, "train", 5, 4)
    one, other = (open_pool(tmp_path / part, "train") for part in ("a", "b"))
    assert one.sentences == other.sentences and np.abs(one.ends - other.ends).max() < 200
    assert 4_000 < len(one.utterance(0)) < 80_000 and np.abs(one.utterance(0)).max() > 0.2
    lexicon = json.loads((tmp_path / "a" / "lexicon.json").read_text(encoding="utf-8"))
    assert lexicon.keys() == set(WORDS) and lexicon["seven"][0] == "s"


def test_a_batch_is_prompt_codes_and_an_end(work: Path) -> None:
    data = SpokenText(work, "train", 8)
    names = {k: name for name, k in data.ids.items()}
    ids, labels = data.batch(3, 4)
    for row, target, index in zip(ids, labels, data.rows(3, 4).tolist(), strict=True):
        chosen = target != IGNORE
        assert torch.equal(row[chosen], target[chosen])
        codes = row[chosen]
        assert int(codes[-1]) == data.end and bool((codes[:-1] < 8).all())
        assert codes[:-1].tolist() == data.frames(index)[:, :2].reshape(-1).tolist()
        begin = int(chosen.nonzero()[0])
        said = [names[k] for k in row[:begin].tolist()]
        assert said[-1] == "<|say|>" and said[0].strip("<|>") in SPEAKERS
        pool = open_pool(work, "train")
        assert said.count("<|gap|>") == len(pool.sentences[index]) - 1
    again = data.batch(3, 4)
    assert torch.equal(ids, again[0])


def test_an_epoch_has_every_row_once(work: Path) -> None:
    data = SpokenText(work, "train", 8)
    rows = [row for k in range(COUNT // 4) for row in data.rows(k, 4).tolist()]
    assert sorted(rows) == list(range(COUNT))
    assert [row for k in range(6, 12) for row in data.rows(k, 4).tolist()] != rows


def test_the_loss_is_that_of_codes_and_ends_alone(work: Path) -> None:
    task = Voices(work, 20)
    model = task.build(None)
    ids, labels = task.batch(0, 3)
    logits = model(input_ids=ids).logits[:, :-1]
    target = labels[:, 1:]
    wanted = torch.nn.functional.cross_entropy(logits[target != IGNORE], target[target != IGNORE])
    assert torch.allclose(code_loss(model, ids, labels), wanted, atol=1e-5)
    assert task.validate(model, "cpu")["validation"] > 0


def test_losses_of_the_books_are_the_classs_own(work: Path) -> None:
    """The temporal and the depth loss of `CsmForConditionalGeneration` for the same frames."""
    task = VoicesDepth(work, 20)
    model = task.build(None)
    ids, labels = task.batch(0, 3)
    assert bool((labels[ids[..., 0] == -1][..., 0] != IGNORE).all())
    losses = book_losses(model, ids, labels)
    words = model.embed_text_tokens(ids[..., 0].clamp(min=0))
    sound = model.backbone_model.embed_tokens(ids[..., 1:])
    inputs = torch.where(ids[..., :1] == -1, sound, words)
    own = model(inputs_embeds=inputs, labels=labels.clone())
    assert torch.allclose(losses[0], own.backbone_loss, atol=1e-5)
    assert torch.allclose(losses[1:].mean(), own.depth_decoder_loss, atol=1e-5)


@pytest.mark.parametrize("before", range(STACK))
def test_frames_of_the_codec_are_stacked_between_silence(before: int) -> None:
    codes = np.arange(10).reshape(5, 2)
    silence = np.array([98, 99])
    stacked = stack_frames(codes, silence, before)
    assert stacked.shape == (2, 2 * STACK)
    frames = stacked.reshape(-1, 2)
    assert frames[before : before + 5].tolist() == codes.tolist()
    rest = np.delete(frames, range(before, before + 5), 0)
    assert len(rest) == 3 and (rest == silence).all()


def test_utterances_begin_at_any_frame_of_a_stack(work: Path) -> None:
    """The same utterance comes with other stacks, and validation with none of that."""
    task = VoicesDepth(work, 20)
    rows = np.zeros(1, dtype=np.int64)
    ids, _ = task.data.pack(rows)
    later, _ = task.data.pack(rows, np.array([3]))
    first = later[0, len(task.data.prompts[0]), 1:].view(STACK, -1)
    assert first[:3].tolist() == [task.data.silence.tolist()] * 3
    assert torch.equal(first[3], ids[0, len(task.data.prompts[0]), 1:].view(STACK, -1)[0])
    begins = set()
    for step in range(4):
        batch, _ = task.batch(step, 4)
        for row in batch:
            frame = row[row[:, 0] == -1][0, 1:].view(STACK, -1)
            begins.add(
                (frame == torch.from_numpy(task.data.silence)).all(1).int().cumprod(0).sum().item()
            )
    assert begins == set(range(STACK))


def test_the_depth_variant_generates_by_its_own_loop(work: Path, tmp_path: Path) -> None:
    from transformers import CsmForConditionalGeneration

    task = VoicesDepth(work, 20)
    task.build(None).save_pretrained(tmp_path)
    model: Any = CsmForConditionalGeneration.from_pretrained(tmp_path)
    prompt = torch.from_numpy(task.data.prompts[0])[None]
    frames = model.generate(prompt, do_sample=False, max_new_tokens=3)
    assert frames.shape[2] == task.books and int(frames.max()) < task.book_size + 2
    with attach(model, Jacobi(window=2, drafts="previous-frame")):
        assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=3), frames)


def test_a_codec_goes_on_where_it_was_stopped(work: Path, tmp_path: Path) -> None:
    for name in ("codec", "validation"):
        write_pool(tmp_path, name, 3)
    train_codec(tmp_path, 2, batch=2)
    train_codec(tmp_path, 3, batch=2)
    lines = [json.loads(line) for line in (tmp_path / "codec.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 3]
    assert (tmp_path / "codec" / "codec.safetensors").is_file()


def test_the_spectral_loss_is_least_where_spectra_agree() -> None:
    codec = SpeechCodec(**TINY_CODEC)
    real = codec.target(0.1 * torch.randn(2, 3200))
    loss = SpectralLoss(codec)
    assert float(loss(real.log(), real)) == pytest.approx(0, abs=1e-5)
    assert float(loss(real.log() + 0.5, real)) > 0.5


@pytest.mark.parametrize(
    ("heard", "said", "edits"),
    [([], [1, 2], 2), ([1, 2], [1, 2], 0), ([1, 3, 2], [1, 2], 1), ([2, 1], [1, 2], 2)],
)
def test_edits_between_phonemes(heard: list[int], said: list[int], edits: int) -> None:
    assert edit_distance(heard, said) == edits


def test_the_judge_reads_columns_as_ctc_does(work: Path) -> None:
    phones = Phones({"ab": ["'", "a", "b"], "b": ["b"]})
    assert phones.names == ["a", "b"] and phones.ids(["ab", "b"]) == [1, 2, 2]
    judge = Judge(2).eval()
    columns = torch.tensor([0, 1, 1, 0, 2, 2, 0, 2])
    judge.forward = lambda spectrum: torch.eye(3)[columns][None]  # type: ignore[method-assign]
    assert judge.hear(torch.zeros(3200)) == [1, 2, 2]
    assert judge.hear(torch.zeros(100)) == []
    assert phone_errors(judge, phones, [torch.zeros(3200)], [["ab", "b"]]) == 0
    assert phone_errors(judge, phones, [torch.zeros(3200)], [["b", "b"]]) == 0.5


def test_a_judge_learns_and_goes_on(work: Path) -> None:
    train_judge(work, 1, batch=4)
    train_judge(work, 2, batch=4)
    lines = [json.loads(line) for line in (work / "judge.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[-1].keys() >= {"errors real", "errors flat", "errors stacked"}


def test_alignment_forgives_tempo_and_nothing_else() -> None:
    one = np.arange(6.0)[:, None]
    assert aligned_distance(one, np.repeat(one, 3, 0)) == 0
    assert aligned_distance(one, one + 10) > 4


def test_a_trained_folder_speaks(work: Path, tmp_path: Path) -> None:
    folder = work / "voices"
    folder.mkdir(exist_ok=True)
    plan = GeneratorTraining(steps=2, fall=1, batch=4, snapshots=(), mixed=False)
    train_generator(folder, Voices(work, 20), plan)
    export_voices(work, tmp_path)
    pipe = TextToSpeech.from_pretrained(tmp_path)
    phones = Phones(LEXICON)
    judge = Judge(len(phones.names)).eval()
    held_out = open_pool(work, "train")
    sentences = choose_sentences(held_out, 4)
    assert not {*sentences} & {tuple(sentence) for sentence in held_out.sentences}
    found = measure_samples(pipe, judge, phones, Jacobi(window=8), sentences, seconds=0.2)
    assert found["tokens"] >= found["passes"] > 0 and found["sentences"] == 4
    assert found["exactness"] == "bitwise"
