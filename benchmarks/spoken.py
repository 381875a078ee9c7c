"""What canvas policies cost on `voices-masked`, and how many phonemes a recogniser hears wrong.

    python -m benchmarks.spoken --policies layered-parallel entropy-bounded:gamma=40 --json FILE

The recogniser is that of `voices-features`, whose card says what it reads right of espeak's own
sound. *errors* are edits between the phonemes that it hears and those to say, of the latter; stress
is not told apart. Passes are the mean of an utterance's, `nats` bounds its divergence from
committing several codes at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

import mmaccel
from benchmarks.rows import read_arguments, write_measured
from mmaccel.catalog import DEMO_WEIGHTS, read_policy
from mmaccel.demo.features import SpeechFeatures, load_features
from scripts.training.voices_words import EVALUATION_SEED, make_sentence

_STRESSES = ("'", ",")


class Recogniser:
    """Phonemes of sound at 16 kHz, by connectionist temporal classification, read greedily."""

    def __init__(self) -> None:
        features: Any = load_features("voices")
        self._features: SpeechFeatures = features
        state = load_file(DEMO_WEIGHTS / "voices-features" / "model.safetensors")
        self._head = state["phones.weight"].float(), state["phones.bias"].float()
        facts = json.loads((DEMO_WEIGHTS / "voices" / "voices.json").read_text(encoding="utf-8"))
        self._words: dict[str, list[str]] = facts["words"]
        names = sorted({name for word in self._words.values() for name in word} - {*_STRESSES})
        self._ids = {name: k + 1 for k, name in enumerate(names)}  # 0 is the blank

    def spell(self, words: Sequence[str]) -> list[int]:
        names = [name for word in words for name in self._words[word]]
        return [self._ids[name] for name in names if name not in _STRESSES]

    def hear(self, sound: Tensor) -> list[int]:
        weight, bias = self._head
        scores = self._features.columns(sound[None])[0] @ weight.T + bias  # [T, phonemes + 1]
        best = scores.argmax(-1).tolist()
        return [k for k, before in zip(best, [0, *best]) if k and k != before]


def edit_distance(heard: Sequence[int], said: Sequence[int]) -> int:
    """Fewest insertions, deletions and replacements that make one of the other."""
    row = list(range(len(said) + 1))
    for i, one in enumerate(heard, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(said, 1):
            diagonal, row[j] = row[j], min(diagonal + (one != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def measure(pipe: Any, policy: str, count: int, batch_size: int, ear: Recogniser) -> dict[str, Any]:
    """One row: sentence k is said by voice k of four, with seed k."""
    sentences = [make_sentence(EVALUATION_SEED, k) for k in range(count)]
    totals = dict.fromkeys(("edits", "phonemes", "passes", "tokens", "nats"), 0.0)
    for first, voice in enumerate(pipe.speech.voices):
        chosen = range(first, count, len(pipe.speech.voices))
        spoken = pipe(
            [" ".join(sentences[k]) for k in chosen], voice=voice, seed=[*chosen],
            policy=read_policy(policy), batch_size=batch_size,
        )  # fmt: skip
        totals["nats"] += spoken.stats.nats
        for k, made in zip(chosen, spoken.utterances, strict=True):
            said = ear.spell(sentences[k])
            totals["edits"] += edit_distance(ear.hear(made.waveform), said)
            totals["phonemes"] += len(said)
            totals["passes"] += made.passes
            totals["tokens"] += len(made.tokens)
    return {
        "policy": policy,
        "exactness": spoken.stats.exactness,
        "guidance": pipe.speech.params.guidance_scale,
        "temperature": pipe.speech.params.temperature,
        "batch": batch_size,
        "rows": count,
        "passes": round(totals["passes"] / count, 2),
        "tokens_per_pass": round(totals["tokens"] / totals["passes"], 2),
        "nats": round(totals["nats"] / count, 2),
        "errors": round(totals["edits"] / totals["phonemes"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="voices-masked", help="or voices, or a folder")
    parser.add_argument("--policies", nargs="+", default=["layered-parallel"])
    parser.add_argument("--count", type=int, default=60, help="sentences")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8])
    parser.add_argument("--guidance", type=float, help="by default the model's own")
    parser.add_argument("--temperature", type=float, help="by default the model's own")
    given = read_arguments(parser)
    pipe = mmaccel.TextToSpeech.from_pretrained(given.model, device="cpu")
    speech: Any = pipe.speech
    asked = {"guidance_scale": given.guidance, "temperature": given.temperature}
    changes = {name: value for name, value in asked.items() if value is not None}
    speech.params = replace(speech.params, **changes)
    ear, rows = Recogniser(), []
    for policy, batch_size in product(given.policies, given.batch_sizes):
        row = measure(pipe, policy, given.count, batch_size, ear)
        rows.append({"model": given.model, **row})
        print(json.dumps(rows[-1]), flush=True)
    write_measured(given.json, spoken=rows)


if __name__ == "__main__":
    main()
