"""What windows save on speech and clips: tokens a pass, seconds, and the time to the first sound.

    python -m benchmarks.media_speed voices --windows 4 8 16 --json FILE
    python -m benchmarks.media_speed voices-depth --sources auto left --windows 4 16 --json FILE
    python -m benchmarks.media_speed moving-scenes --sources auto previous-frame --trees dyspec \\
        --json FILE

Every policy makes each item in turn, one at a time, so that all of them meet the same load; the
first item of each is left out. Seconds are those of whole calls, codec included. Tokens are
compared with those of the plain loop. The time to the first sound is that of the first chunk of
`TextToSpeech.stream`.

Of `voices-depth` passes are those of the depth decoder, and seconds those of a frame, both decoders
and no codec. Times are those of a chain of passes over the codes with a cache and without the
machinery of `generate`, which stands in a row of its own: both draw otherwise than policies do, so
that their tokens are compared with nothing.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import mmaccel
from benchmarks.long_context import write_report
from mmaccel.catalog import read_method
from mmaccel.demo.moving_scenes.data import EVALUATION_SEED, make_captions
from mmaccel.demo.voices.stacked import open_stacked
from mmaccel.pipelines.transformers_release import CACHE
from mmaccel.samplers.drafting.sources import parse_source
from scripts.training.voices_words import EVALUATION_SEED as SPOKEN_SEED
from scripts.training.voices_words import make_sentence

Item = dict[str, Any]  # what a policy makes of a text: tokens, with the end, passes, seconds
Make = Callable[[str, Any, int], Item]  # text, policy, seed


def open_voices() -> Make:
    """Speaks a sentence twice: as a whole, and in chunks until the first one is there."""
    pipe = mmaccel.TextToSpeech.from_pretrained("voices", device="cpu")

    def make(text: str, policy: Any, seed: int) -> Item:
        began = time.perf_counter()
        (spoken,) = pipe(text, policy=policy, seed=seed).utterances
        seconds = time.perf_counter() - began
        began = time.perf_counter()
        with pipe.stream(text, policy=policy, seed=seed) as chunks:
            next(iter(chunks))
            first = time.perf_counter() - began
        return {
            "tokens": spoken.tokens,
            "count": len(spoken.tokens) + spoken.is_finished,
            "passes": spoken.passes,
            "seconds": seconds,
            "first_sound": first,
            "of_sound": seconds / max(spoken.seconds, 0.02),
        }

    return make


@contextmanager
def attached(model: Any, policy: Any, seed: int) -> Iterator[Any]:
    """A policy, the model's own loop ("generate"), or the chain ("chain"); gives the handle."""
    if isinstance(policy, str):
        decoder = model.depth_decoder
        if policy == "chain":
            decoder.generate = partial(run_chain, decoder)
        try:
            yield None
        finally:
            decoder.__dict__.pop("generate", None)
        return
    with mmaccel.attach(model, policy, seed=seed, strict=True) as handle:
        yield handle


def run_chain(
    decoder: Any, input_ids: Tensor, backbone_last_hidden_state: Tensor, **_: Any
) -> Tensor:
    """The codes of a frame, one pass each with a cache, sampled; the first is in `input_ids`."""
    from transformers import DynamicCache

    cache = DynamicCache(config=decoder.config)
    given = {"backbone_last_hidden_state": backbone_last_hidden_state}
    codes = entries = input_ids
    while codes.shape[1] <= decoder.config.num_codebooks:
        made = decoder(entries, use_cache=True, logits_to_keep=1, **{CACHE: cache}, **given)
        entries = torch.multinomial(made.logits[:, -1].softmax(-1), 1)
        codes = torch.cat([codes, entries], 1)
        given = {}
    return codes


def open_voices_depth() -> Make:
    """The codes of a sentence, 16 a frame."""
    voices = open_stacked()
    n_drafted = voices.model.config.num_codebooks - 1

    def make(text: str, policy: Any, seed: int) -> Item:
        with attached(voices.model, policy, seed) as handle:
            began = time.perf_counter()
            frames = voices.generate(text, seed=seed)
            seconds = time.perf_counter() - began
        count = len(frames) * n_drafted
        passes = count if handle is None else handle.stats.passes
        made = {"tokens": frames, "count": count, "passes": passes}
        return made | {"seconds": seconds / len(frames), "of_frame": passes / len(frames)}

    return make


def open_moving_scenes() -> Make:
    """Makes a clip."""
    pipe = mmaccel.TextToVideo.from_pretrained("moving-scenes", device="cpu")

    def make(text: str, policy: Any, seed: int) -> Item:
        began = time.perf_counter()
        (clip,) = pipe(text, policy=policy, seed=seed).clips
        seconds = time.perf_counter() - began
        count = clip.tokens.numel()
        return {"tokens": clip.tokens, "count": count, "passes": clip.passes, "seconds": seconds}

    return make


MODELS: dict[str, Callable[[], Make]] = {
    "voices": open_voices,
    "voices-depth": open_voices_depth,
    "moving-scenes": open_moving_scenes,
}


def make_texts(model: str, count: int) -> list[str]:
    """Fresh texts of a model."""
    if model != "moving-scenes":
        return [" ".join(make_sentence(SPOKEN_SEED, k)) for k in range(count)]
    return list(make_captions(EVALUATION_SEED, range(count)))


def list_policies(arguments: argparse.Namespace) -> list[Any]:
    """The plain loop, each source at each window, and trees over the first source."""
    found: list[Any] = [mmaccel.Autoregressive()]
    if arguments.model == "voices-depth":
        found = ["chain", "generate", *found]
    for name, window in product(arguments.sources, arguments.windows):
        found.append(mmaccel.Jacobi(window=window, drafts=parse_source(name)))
    trees = [read_method("tree", text) for text in arguments.trees]
    for tree, window in product(trees, arguments.windows):
        drafts = parse_source(arguments.sources[0])
        found.append(mmaccel.Jacobi(window=window, drafts=drafts, tree=tree))
    return found


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each policy."""
    make = MODELS[arguments.model]()
    texts = make_texts(arguments.model, arguments.count)
    policies = list_policies(arguments)
    made: dict[int, list[Item]] = defaultdict(list)
    for seed, text in enumerate([texts[0], *texts]):
        for number, policy in enumerate(policies):
            item = make(text, policy, seed)
            if seed:  # the first one warms up
                made[number].append(item)
    plain = made[0]
    exact = made[[isinstance(policy, str) for policy in policies].index(False)]
    rows = []
    for number, policy in enumerate(policies):
        own = made[number]
        row = {
            "policy": policy if isinstance(policy, str) else repr(policy),
            "exactness": "" if isinstance(policy, str) else policy.exactness,
            "tokens_a_pass": sum(x["count"] for x in own) / sum(x["passes"] for x in own),
            "seconds": median(x["seconds"] for x in own),
            "times": median(a["seconds"] / b["seconds"] for a, b in zip(plain, own, strict=True)),
        }
        if not isinstance(policy, str):
            row["same"] = all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(exact, own))
        for name in ("first_sound", "of_sound", "of_frame"):
            if name in own[0]:
                row[name] = median(x[name] for x in own)
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    """Measure, print a line for each policy, and write JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--sources", nargs="+", default=["auto"], help="names or folders")
    parser.add_argument("--windows", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--trees", nargs="+", default=[], help="shapes, as `--tree` has them")
    parser.add_argument("--count", type=int, default=16, help="texts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.positions = 0
    with torch.no_grad():
        rows = measure(arguments)
    write_report(arguments, media_speed=rows)


if __name__ == "__main__":
    main()
