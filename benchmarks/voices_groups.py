"""What acoustic groups (PCG) cost in errors and gain in passes on `voices`, beside other policies.

    python -m benchmarks.voices_groups --work runs/voices --kept runs/voices-groups.jsonl \\
        --json benchmarks/results/voices-pcg-cpu.json

`--work` holds the judge (`python -m scripts.training voices-judge`) and the pool it learnt from,
whose sentences are left out. Every policy says the same sentences, several times with other seeds
and by all speakers in turn; errors are the judge's edits of all phonemes. Differences from the
plain loop are sentence by sentence, with intervals from resampled sentences; those of the plain
loop with other seeds say what chance does. Passes are counted in batches, where a row's are its
own. Seconds are those that one thread computes for the first sentences again, one at a time,
policies in turn, as medians; what else the machine does counts little.

Rows are kept in the file `--kept`, so that a run goes on where another was stopped.
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
OTHER_SEEDS = "plain loop, other seeds"
_ROWS = 20  # of a batch
_SECONDS = 6.0  # after which an utterance is cut
_SHORT = 0.1
_RESAMPLES = 2000


def list_policies() -> list[Policy]:
    """The plain loop first."""
    found: list[Policy] = [mmaccel.Autoregressive()]
    for window in (8, 16):
        found.append(mmaccel.Jacobi(window))
        found.append(mmaccel.SpeculativeJacobi(window))
        found.append(mmaccel.SpeculativeJacobi(window, drafts=mmaccel.Coarse(COARSE)))
        found.append(mmaccel.GroupedSpeculative(window))
        for radius in (0.4, 0.5, 0.6, 0.7, 0.8) if window == 8 else (0.4, 0.6, 0.8):
            found.append(mmaccel.AcousticGroups(window, radius))
        for radius in (0.6, 0.75, 0.9) if window == 8 else (0.75,):
            found.append(mmaccel.AcousticGroups(window, radius, "codes"))
        found.append(mmaccel.AcousticGroups(window, 0.6, drafts=mmaccel.Coarse(COARSE)))
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

    def measure(self, policy: Policy, first_seed: int = 0) -> dict[str, Any]:
        """Tokens a pass, what is spent, and the edits of each sentence."""
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
                    seed=[first_seed + count * repeat + k for k in rows],
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
        return {
            "policy": name_policy(policy),
            "repr": repr(policy),
            "exactness": policy.exactness,
            "tokens_a_pass": tokens / passes,
            "total_variation": spent / tokens,
            "cut": cut,
            "edits": (edits / self._repeats).tolist(),
        }

    def compare(self, row: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
        """A row with its errors in place of its edits, and what they are more than others."""
        edits = np.array(row["edits"])
        error, width = self._resample(edits)
        more, more_width = self._resample(edits - np.array(plain["edits"]))
        named = {name: value for name, value in row.items() if name != "edits"}
        return named | {
            "error": error,
            "half_width": width,
            "more": more,
            "more_half_width": more_width,
        }

    def _resample(self, edits: np.ndarray) -> tuple[float, float]:
        """The rate of edits, and half of its 95 % interval over resampled sentences."""
        rng = np.random.default_rng(0)
        chosen = rng.integers(len(edits), size=(_RESAMPLES, len(edits)))
        rates = edits[chosen].sum(1) / self._lengths[chosen].sum(1)
        low, high = np.quantile(rates, (0.025, 0.975))
        return float(edits.sum() / self._lengths.sum()), float(high - low) / 2

    def time(self, policies: Sequence[Policy], count: int) -> list[dict[str, float]]:
        """Seconds that a sentence takes the processor under each policy, and how many times as fast
        that is as under the first one.
        """
        made: list[list[float]] = [[] for _ in policies]
        for k, sentence in enumerate([self._sentences[0], *self._sentences[:count]]):
            for own, policy in zip(made, policies, strict=True):
                text = " ".join(sentence)
                self._pipe(text, policy=policy, seed=k, max_seconds=_SHORT)  # finds its groups
                began = time.process_time()
                self._pipe(text, policy=policy, seed=k, max_seconds=_SECONDS)
                own.append(time.process_time() - began)
        plain = made[0][1:]  # the first one warms up
        return [
            {
                "seconds": median(own[1:]),
                "times": median(a / b for a, b in zip(plain, own[1:], strict=True)),
            }
            for own in made
        ]


def measure_all(listener: Listener, policies: Sequence[Policy], kept: Path) -> list[dict[str, Any]]:
    """A row for each policy, then one of the plain loop with other seeds; see `--kept`."""
    known = {}
    if kept.exists():
        lines = kept.read_text(encoding="utf-8").splitlines()
        known = {row["policy"]: row for row in map(json.loads, lines)}
    null = mmaccel.Jacobi(8)  # the plain loop's tokens, in fewer passes
    wanted = [(name_policy(policy), policy, 0) for policy in policies]
    rows = []
    for name, policy, seed in [*wanted, (OTHER_SEEDS, null, 10_000)]:
        if name not in known:
            known[name] = listener.measure(policy, seed) | {"policy": name}
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[name]) + "\n")
        rows.append(listener.compare(known[name], known[wanted[0][0]]))
        print({key: value for key, value in rows[-1].items() if key != "repr"}, flush=True)
    return rows


def main() -> None:
    """Measure, print a line for each policy, and write JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the judge")
    parser.add_argument("--kept", type=Path, required=True, help="file of rows that are measured")
    parser.add_argument("--count", type=int, default=60, help="sentences")
    parser.add_argument("--repeats", type=int, default=4, help="times that each is said")
    parser.add_argument("--timed", type=int, default=16, help="sentences that are timed")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.threads = 1
    arguments.positions = 0
    judge, phones = load_judge(arguments.work)
    lines = (arguments.work / "judge.jsonl").read_text(encoding="utf-8").splitlines()
    heard = json.loads(lines[-1])
    sentences = choose_sentences(open_pool(arguments.work, "train"), arguments.count)
    pipe = mmaccel.TextToSpeech.from_pretrained("voices", device="cpu")
    listener = Listener(pipe, judge, phones, sentences, arguments.repeats)
    policies = list_policies()
    with torch.no_grad():
        rows = measure_all(listener, policies, arguments.kept)
        times = listener.time(policies, arguments.timed)
    timed = {name_policy(policy): one for policy, one in zip(policies, times, strict=True)}
    for row in rows:
        row |= timed.get(row["policy"], {})
        print(row["policy"], row.get("times"), flush=True)
    write_report(
        arguments,
        voices_groups=rows,
        sentences=arguments.count,
        repeats=arguments.repeats,
        judge={name: heard[f"errors {name}"] for name in ("real", "flat")},
    )


if __name__ == "__main__":
    main()
