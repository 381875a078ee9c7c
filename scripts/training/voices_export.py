"""Writes the folder of `voices`: float16 weights, codec, words, measured figures, the card."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel import attach
from mmaccel.contracts import Policy
from mmaccel.demo.voices.files import save_text_side
from mmaccel.demo.voices.stacked import FOLDER as DEPTH_FOLDER
from mmaccel.demo.voices.stacked import open_stacked
from mmaccel.demo.voices.words import EVALUATION_SEED, LONGEST, SPEAKERS, WORDS, make_sentence
from mmaccel.outputs.sound_files import write_sound
from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech
from mmaccel.samplers.drafting.coarse import Coarse
from mmaccel.samplers.window.autoregressive import Autoregressive
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.speculative_jacobi import SpeculativeJacobi
from mmaccel.tokenizers_vq.mel import LogMel
from mmaccel.tokenizers_vq.speech_codec import SpeechCodec, load_codec
from scripts.training.cards import write_voices_card
from scripts.training.export import (
    GENERATOR_FILES,
    check_trained,
    copy_files,
    this_machine,
    write_folder,
)
from scripts.training.voices_data import Pool, open_pool
from scripts.training.voices_judge import (
    Judge,
    Phones,
    load_judge,
    measure_judge,
    phone_errors,
    read_lexicon,
)

CODEC_FILES = ("codec.json", "codec.safetensors")
POLICIES: tuple[Policy, ...] = (
    Autoregressive(),
    Jacobi(window=8),
    Jacobi(window=16),
    Jacobi(window=32),
    SpeculativeJacobi(window=16),
)
DEPTH_POLICIES: tuple[Policy, ...] = (
    Autoregressive(),
    Jacobi(window=4),
    Jacobi(window=16),
    SpeculativeJacobi(window=16),
)
COARSE_FOLDER = "coarse"
_ROWS = 20
_SEARCHED = 25  # frames that alignment may be off by
_RUNS = {"flat": ("voices", ""), "stacked": ("voices-depth", DEPTH_FOLDER)}
"""Of each layout the folder of the training, and that of what it has made."""


def export_voices(work: str | Path, target: str | Path) -> None:
    """Copies the codec and the averaged weights from `work` to `target`; writes the text's side.

    Args:
        work: of the trainings; the model with a depth decoder goes to `target/depth`, where it has
            been trained.
        target: made where missing.

    Raises:
        OptionError: nothing has been trained in `work`.
    """
    work = Path(work)
    target = Path(target)
    check_trained(work / "voices" / "generator")
    codec = load_codec(work / "codec")
    save_text_side(target, codec, SPEAKERS, read_lexicon(work), LONGEST)
    copy_files(work / "voices" / "generator", target, GENERATOR_FILES)
    copy_files(work / "codec", target, CODEC_FILES)
    depth = work / "voices-depth" / "generator"
    if depth.is_dir():
        check_trained(depth)
        (target / DEPTH_FOLDER).mkdir(exist_ok=True)
        copy_files(depth, target / DEPTH_FOLDER, GENERATOR_FILES)


def export_voices_card(
    work: str | Path, target: str | Path, count: int = 100, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Measures the exported folder on the CPU and writes `card.json` and `README.md` there.

    Args:
        work: holds logs, the judge and the pool `validation`.
        target: of `export_voices`.
        count: fresh sentences to speak.
        notes: sentences about this training that its log does not say.

    Returns:
        The content of `card.json`.
    """
    work = Path(work)
    target = Path(target)
    pipe = TextToSpeech.from_pretrained(target)
    judge, phones = load_judge(work)
    held_out = open_pool(work, "validation")
    codec = load_codec(target)
    policies = POLICIES
    if (target / COARSE_FOLDER).is_dir():
        policies += (Jacobi(window=16, drafts=Coarse(str(target / COARSE_FOLDER))),)
    sentences = choose_sentences(open_pool(work, "train"), count)
    card: dict[str, Any] = {
        "name": "voices",
        "command": "\n".join(
            f"python -m scripts.training {part} --work runs/voices"
            for part in (
                "voices-codec",
                "voices-data",
                "voices-judge",
                "voices",
                "voices-depth",
                "voices-export",
                "voices-card",
            )
        ),
        "words": len(WORDS),
        "speakers": list(SPEAKERS),
        "longest": LONGEST,
        "codec": measure_codec(codec, held_out, count)
        | {"parameters": sum(p.numel() for p in codec.parameters())},
        "judge": measure_judge(judge, codec, held_out, phones, count) | {"utterances": count},
        "samples": [
            measure_samples(pipe, judge, phones, policy, sentences)
            | {"policy": repr(policy).replace(str(target.parent), "…")}
            for policy in policies
        ],
        "stacked_samples": [
            measure_stacked(target, judge, phones, policy=policy, sentences=sentences)
            for policy in DEPTH_POLICIES
        ]
        if (target / DEPTH_FOLDER).is_dir()
        else [],
        "distance": measure_distance(pipe, held_out, count),
        "training": {
            layout: _cost(work / name)
            for layout, (name, folder) in _RUNS.items()
            if (target / folder / "model.safetensors").is_file()
        },
        "notes": list(notes),
        "measured_with": this_machine("cpu"),
    }
    window: Any = pipe.speech.window
    card["parameters"] = sum(p.numel() for p in window.model.parameters())
    write_folder(target, card, write_voices_card(card))
    return card


@torch.no_grad()
def measure_codec(codec: SpeechCodec, pool: Pool, count: int) -> dict[str, Any]:
    """Mel distances of both layouts, bits a second, and how many codes are in use."""
    mel = LogMel(codec.sample_rate, 256)
    used: set[int] = set()
    totals = {"flat": 0.0, "stacked": 0.0}
    for k in range(count):
        real = torch.from_numpy(pool.utterance(k))[None]
        flat = codec.encode(real)
        used |= set(flat.flatten().tolist())
        made = {"flat": codec.decode(flat)}
        made["stacked"] = codec.decode_stacked(codec.encode_stacked(real))
        n = real.shape[1] // 256 * 256
        for layout, sound in made.items():
            totals[layout] += float((mel(sound[:, :n]) - mel(real[:, :n])).abs().mean()) / count
    frames = codec.sample_rate / codec.hop
    return {
        "sample_rate": codec.sample_rate,
        "flat_size": codec.flat_size,
        "books": codec.books,
        "book_size": codec.book_size,
        "flat_bits_a_second": round(frames * math.log2(codec.flat_size)),
        "stacked_bits_a_second": round(frames / 2 * codec.books * math.log2(codec.book_size)),
        "codes_used": len(used),
        "mel_flat": round(totals["flat"], 4),
        "mel_stacked": round(totals["stacked"], 4),
    }


def choose_sentences(trained: Pool, count: int) -> list[tuple[str, ...]]:
    """The first sentences of `EVALUATION_SEED` that a pool does not hold."""
    known = {tuple(sentence) for sentence in trained.sentences}
    found: list[tuple[str, ...]] = []
    index = 0
    while len(found) < count:
        sentence = make_sentence(EVALUATION_SEED, index)
        index += 1
        if sentence not in known:
            found.append(sentence)
    return found


def measure_samples(
    pipe: TextToSpeech,
    judge: Judge,
    phones: Phones,
    policy: Policy,
    sentences: Sequence[tuple[str, ...]],
    seconds: float = 6.0,
) -> dict[str, Any]:
    """Speaks sentences and has the judge hear them.

    Args:
        pipe: the model.
        judge, phones: of `load_judge`.
        policy: how to decode.
        sentences: words of each; sentence k has seed k, speakers take turns.
        seconds: after which an utterance is cut.
    """
    count = len(sentences)
    sounds: list[Tensor] = [torch.zeros(0)] * count
    tokens = 0
    passes = 0
    cut = 0
    for n, speaker in enumerate(SPEAKERS):
        rows = range(n, count, len(SPEAKERS))
        texts = [" ".join(sentences[k]) for k in rows]
        speech = pipe(
            texts,
            policy=policy,
            voice=speaker,
            seed=list(rows),
            batch_size=_ROWS,
            max_seconds=seconds,
        )
        for k, made in zip(rows, speech.utterances, strict=True):
            sounds[k] = made.waveform
            tokens += len(made.tokens) + made.is_finished
            passes += made.passes
            cut += not made.is_finished
    spoken = sum(len(sound) for sound in sounds) / pipe.speech.sample_rate
    return {
        "policy": repr(policy),
        "exactness": policy.exactness,
        "sentences": count,
        "tokens": tokens,
        "passes": passes,
        "tokens_per_pass": round(tokens / passes, 3),
        "errors": round(phone_errors(judge, phones, sounds, sentences), 4),
        "cut": cut,
        "seconds_of_sound": round(spoken, 1),
    }


@torch.no_grad()
def measure_stacked(
    folder: Path,
    judge: Judge,
    phones: Phones,
    *,
    policy: Policy,
    sentences: Sequence[tuple[str, ...]],
) -> dict[str, Any]:
    """The same of the model with a depth decoder, whose passes are those of that decoder.

    Args:
        folder: of `export_voices`.
        judge, phones: of `load_judge`.
        policy: of the depth decoder's codes.
        sentences: words of each; sentence k has seed k, speakers take turns.
    """
    voices = open_stacked(folder)
    sounds = []
    frames = 0
    passes = 0
    cut = 0
    for k, sentence in enumerate(sentences):
        with attach(voices.model, policy, seed=k, strict=True) as handle:
            spoken = voices.speak(" ".join(sentence), SPEAKERS[k % len(SPEAKERS)], seed=k)
        assert handle.stats is not None
        sounds.append(spoken.waveform)
        frames += len(spoken.codes) + spoken.is_finished
        passes += handle.stats.passes
        cut += not spoken.is_finished
    return {
        "policy": repr(policy),
        "exactness": policy.exactness,
        "frames": frames,
        "passes_per_frame": round(passes / frames, 3),
        "errors": round(phone_errors(judge, phones, sounds, sentences), 4),
        "cut": cut,
    }


def measure_distance(pipe: TextToSpeech, pool: Pool, count: int) -> dict[str, Any]:
    """Mel distance along the best alignment to espeak's sound of the same sentences and speakers,
    and between espeak's own two sentences that differ, as a measure of what is far.
    """
    mel = LogMel(pipe.speech.sample_rate, 256)
    made_far = 0.0
    total = 0.0
    ratio = 0.0
    n_spoken = 0
    for k in range(count):
        real = torch.from_numpy(pool.utterance(k))
        other = torch.from_numpy(pool.utterance((k + 1) % len(pool)))
        text = " ".join(pool.sentences[k])
        speech = pipe(text, policy=Jacobi(), voice=SPEAKERS[pool.speakers[k]], seed=[k])
        sound = speech[0].waveform
        if not len(sound):
            continue
        n_spoken += 1
        total += aligned_distance(_columns(mel, sound), _columns(mel, real))
        made_far += aligned_distance(_columns(mel, other), _columns(mel, real))
        ratio += len(sound) / len(real)
    n_each = max(n_spoken, 1)
    return {
        "sentences": count,
        "empty": count - n_spoken,
        "mel": round(total / n_each, 4),
        "mel_of_other_sentences": round(made_far / n_each, 4),
        "duration_ratio": round(ratio / n_each, 3),
    }


def _columns(mel: LogMel, sound: Tensor) -> np.ndarray:
    """[T, bands]."""
    whole = sound[: len(sound) // mel.hop * mel.hop]
    columns: np.ndarray = mel(whole[None])[0].T.numpy()
    return columns


def aligned_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Mean absolute difference along the alignment of least sum (dynamic time warping).

    Args:
        one: [T, bands].
        other: [U, bands].
    """
    costs = np.abs(one[:, None] - other[None]).mean(-1)  # [T, U]
    total = np.full((len(one) + 1, len(other) + 1), np.inf)
    steps = np.zeros_like(total)
    total[0, 0] = 0
    for i in range(1, len(one) + 1):
        for j in range(1, len(other) + 1):
            a, b = min(((i - 1, j - 1), (i - 1, j), (i, j - 1)), key=lambda at: total[at])
            total[i, j] = total[a, b] + costs[i - 1, j - 1]
            steps[i, j] = steps[a, b] + 1
    return float(total[-1, -1] / steps[-1, -1])


def write_examples(pipe: TextToSpeech, folder: Path, sentences: Sequence[str], seed: int) -> None:
    """Writes a WAV file of each sentence, speakers taking turns."""
    folder.mkdir(parents=True, exist_ok=True)
    for k, sentence in enumerate(sentences):
        speaker = SPEAKERS[k % len(SPEAKERS)]
        made = pipe(sentence, policy=Jacobi(), voice=speaker, seed=[seed + k])[0]
        name = f"{speaker}-{'-'.join(sentence.split())}.wav"
        facts = {"text": sentence, "voice": speaker, "seed": seed + k}
        write_sound(
            folder / name, waveform=made.waveform, sample_rate=made.sample_rate, facts=facts
        )


def _cost(folder: Path) -> dict[str, Any]:
    lines = [
        json.loads(line)
        for line in (folder / "generator.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    losses = [line for line in lines if "loss" in line]
    plan = [line["plan"] for line in lines if "plan" in line][-1]
    checked = [line for line in losses if "validation" in line]
    kept = ("step", "loss", "seconds", "validation")
    return {
        "steps": plan["steps"],
        "done": losses[-1]["step"],
        "batch": plan["batch"],
        "utterances": losses[-1]["distinct"],
        "minutes": round(losses[-1]["seconds"] / 60, 1),
        "validation": checked[-1]["validation"] if checked else None,
        "curve": [{k: line[k] for k in kept} for line in checked],
    }
