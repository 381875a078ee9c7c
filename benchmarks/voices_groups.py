"""What acoustic groups (PCG) cost in errors and gain in passes on `voices`, beside other policies.

    python -m benchmarks.voices_groups --work runs/voices \\
        --json benchmarks/results/voices-pcg-cpu.json

`--work` holds the judge (`python -m scripts.training voices-judge`) and the pool it learnt from,
whose sentences are left out. Every policy says the same sentences, several times with other seeds
and by all speakers in turn; errors are the judge's edits of all phonemes, with intervals from
resampled sentences. Passes are counted in batches, where a row's are its own. Seconds are those of
the first sentences again, one at a time, policies in turn, as medians.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import mmaccel
from benchmarks.long_context import write_report
from mmaccel.contracts import Policy
from scripts.training.voices_data import SPEAKERS, open_pool
from scripts.training.voices_export import choose_sentences
from scripts.training.voices_judge import Judge, Phones, edit_distance, load_judge

COARSE = "mmaccel/demo/weights/voices/coarse"
_ROWS = 20  # of a batch
_SECONDS = 6.0  # after which an utterance is cut
_SHORT = 0.1
_RESAMPLES = 2000


def list_policies(windows: Sequence[int]) -> list[Policy]:
    """The plain loop first."""
    found: list[Policy] = [mmaccel.Autoregressive()]
    for window in windows:
        found.append(mmaccel.Jacobi(window))
        for drafts in ("neighbour", mmaccel.Coarse(COARSE)):
            found.append(mmaccel.SpeculativeJacobi(window, drafts=drafts))
        for radius in (0.4, 0.5, 0.6, 0.7, 0.8):
            found.append(mmaccel.AcousticGroups(window, radius))
        for radius in (0.6, 0.75, 0.9, 1.1):
            found.append(mmaccel.AcousticGroups(window, radius, "codes"))
        found.append(mmaccel.AcousticGroups(window, 0.6, drafts=mmaccel.Coarse(COARSE)))
        found.append(mmaccel.GroupedSpeculative(window))
    return found


def name_policy(policy: Policy) -> str:
    """What differs between the rows."""
    name = type(policy).__name__
    if isinstance(policy, mmaccel.Autoregressive):
        return f"{name}()"
    fields = [str(policy.window)]  # type: ignore[attr-defined]
    if isinstance(policy, mmaccel.AcousticGroups):
        fields.append(f"radius={policy.radius:g}")
        if policy.vectors != "embeddings":
            fields.append(f"vectors={policy.vectors!r}")
    if isinstance(policy.drafts, mmaccel.Coarse):  # type: ignore[attr-defined]
        fields.append("drafts=Coarse(…)")
    return f"{name}({', '.join(fields)})"


class Listener:
    """Says sentences and hears them.

    Args:
        pipe: speaks.
        judge, phones: of `load_judge`.
        sentences: words of each.
        repeats: times that each is said, with other seeds.
    """

    def __init__(
        self,
        pipe: Any,
        judge: Judge,
        phones: Phones,
        sentences: Sequence[Sequence[str]],
        repeats: int,
    ) -> None:
        self._pipe = pipe
        self._judge = judge
        self._phones = phones
        self._sentences = sentences
        self._repeats = repeats
        self._lengths = np.array([len(phones.ids(sentence)) for sentence in sentences])
        self._plain: np.ndarray | None = None

    def measure(self, policy: Policy) -> dict[str, Any]:
        """Tokens a pass, what is spent, and errors of a policy; the plain loop comes first."""
        count = len(self._sentences)
        edits = np.zeros(count)
        tokens = 0
        passes = 0
        cut = 0
        spent = 0.0
        for repeat in range(self._repeats):
            for turn, speaker in enumerate(SPEAKERS):
                rows = range(turn, count, len(SPEAKERS))
                speech = self._pipe(
                    [" ".join(self._sentences[k]) for k in rows],
                    policy=policy,
                    voice=speaker,
                    seed=[count * repeat + k for k in rows],
                    batch_size=_ROWS,
                    max_seconds=_SECONDS,
                )
                spent += speech.stats.total_variation
                for k, made in zip(rows, speech.utterances, strict=True):
                    heard = self._judge.hear(made.waveform)
                    edits[k] += edit_distance(heard, self._phones.ids(self._sentences[k]))
                    tokens += len(made.tokens) + made.is_finished
                    passes += made.passes
                    cut += not made.is_finished
        edits /= self._repeats
        if self._plain is None:
            self._plain = edits
        error, width = self._resample(edits)
        more, more_width = self._resample(edits - self._plain)
        return {
            "policy": name_policy(policy),
            "repr": repr(policy),
            "exactness": policy.exactness,
            "tokens_a_pass": tokens / passes,
            "total_variation": spent / tokens,
            "error": error,
            "half_width": width,
            "more": more,
            "more_half_width": more_width,
            "cut": cut,
        }

    def _resample(self, edits: np.ndarray) -> tuple[float, float]:
        """The rate of edits, and half of its 95 % interval over resampled sentences."""
        rng = np.random.default_rng(0)
        chosen = rng.integers(len(edits), size=(_RESAMPLES, len(edits)))
        rates = edits[chosen].sum(1) / self._lengths[chosen].sum(1)
        low, high = np.quantile(rates, (0.025, 0.975))
        return float(edits.sum() / self._lengths.sum()), float(high - low) / 2

    def time(self, policies: Sequence[Policy], count: int) -> list[dict[str, float]]:
        """Seconds a sentence of each policy, and how many times as fast as the first one."""
        made: list[list[float]] = [[] for _ in policies]
        for k, sentence in enumerate([self._sentences[0], *self._sentences[:count]]):
            for own, policy in zip(made, policies, strict=True):
                text = " ".join(sentence)
                self._pipe(text, policy=policy, seed=k, max_seconds=_SHORT)  # finds its groups
                began = time.perf_counter()
                self._pipe(text, policy=policy, seed=k, max_seconds=_SECONDS)
                own.append(time.perf_counter() - began)
        plain = made[0][1:]  # the first one warms up
        return [
            {
                "seconds": median(own[1:]),
                "times": median(a / b for a, b in zip(plain, own[1:], strict=True)),
            }
            for own in made
        ]


def main() -> None:
    """Measure, print a line for each policy, and write JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the judge")
    parser.add_argument("--count", type=int, default=60, help="sentences")
    parser.add_argument("--repeats", type=int, default=4, help="times that each is said")
    parser.add_argument("--timed", type=int, default=16, help="sentences that are timed")
    parser.add_argument("--windows", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.positions = 0
    judge, phones = load_judge(arguments.work)
    lines = (arguments.work / "judge.jsonl").read_text(encoding="utf-8").splitlines()
    heard = json.loads(lines[-1])
    sentences = choose_sentences(open_pool(arguments.work, "train"), arguments.count)
    pipe = mmaccel.TextToSpeech.from_pretrained("voices", device="cpu")
    listener = Listener(pipe, judge, phones, sentences, arguments.repeats)
    policies = list_policies(arguments.windows)
    rows = []
    with torch.no_grad():
        for policy in policies:
            rows.append(listener.measure(policy))
            print(rows[-1], flush=True)
        for row, timed in zip(rows, listener.time(policies, arguments.timed), strict=True):
            row |= timed
            print(row["policy"], timed, flush=True)
    write_report(
        arguments,
        voices_groups=rows,
        sentences=arguments.count,
        repeats=arguments.repeats,
        judge={name: heard[f"errors {name}"] for name in ("real", "flat")},
    )


if __name__ == "__main__":
    main()
