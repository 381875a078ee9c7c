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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

import mmaccel
from benchmarks.rows import read_arguments, write_measured
from mmaccel.catalog import read_method
from mmaccel.demo.moving_scenes.data import EVALUATION_SEED, make_captions
from mmaccel.demo.voices.stacked import open_stacked
from mmaccel.evaluation.measure import Case, by_case, measure, summarise
from mmaccel.pipelines.hosts.transformers_release import CACHE
from mmaccel.samplers.drafting.sources import parse_source
from scripts.training.voices_words import EVALUATION_SEED as SPOKEN_SEED
from scripts.training.voices_words import make_sentence

Item = dict[str, Any]  # what a policy makes of a text: tokens, how many with the end, passes
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


@contextmanager
def attached(model: Any, policy: Any, seed: int) -> Iterator[Any]:
    """A policy, the model's own loop ("generate"), or the chain ("chain"); gives the handle."""
    decoder = model.depth_decoder
    if not isinstance(policy, str):
        with mmaccel.attach(model, policy, seed=seed, strict=True) as handle:
            yield handle
        return
    if policy == "chain":
        decoder.generate = partial(run_chain, decoder)
    try:
        yield None
    finally:
        decoder.__dict__.pop("generate", None)


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


def open_moving_scenes() -> Make:
    """Makes a clip."""
    pipe = mmaccel.TextToVideo.from_pretrained("moving-scenes", device="cpu")

    def make(text: str, policy: Any, seed: int) -> Item:
        (clip,) = pipe(text, policy=policy, seed=seed).clips
        return {"tokens": clip.tokens, "count": clip.tokens.numel(), "passes": clip.passes}

    return make


MODELS: dict[str, Callable[[], Make]] = {
    "voices": open_voices,
    "voices-depth": open_voices_depth,
    "moving-scenes": open_moving_scenes,
}


def list_policies(given: argparse.Namespace) -> list[Any]:
    """The plain loop, each source at each window, and trees over the first source."""
    found: list[Any] = ["chain", "generate"] if given.model == "voices-depth" else []
    found.append(mmaccel.Autoregressive())
    windows: list[Any] = [*given.windows]
    if given.model == "voices-depth":
        windows.append("adaptive")
    for name, window in product(given.sources, windows):
        found.append(mmaccel.Jacobi(window=window, drafts=parse_source(name)))
    trees = [read_method("tree", text) for text in given.trees]
    for tree, window in product(trees, given.windows):
        drafts = parse_source(given.sources[0])
        found.append(mmaccel.Jacobi(window=window, drafts=drafts, tree=tree))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--sources", nargs="+", default=["auto"], help="names or folders")
    parser.add_argument("--windows", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--trees", nargs="+", default=[], help="shapes, as `--tree` has them")
    parser.add_argument("--count", type=int, default=16, help="texts")
    given = read_arguments(parser)
    if given.model == "moving-scenes":
        texts = list(make_captions(EVALUATION_SEED, range(given.count)))
    else:
        texts = [" ".join(make_sentence(SPOKEN_SEED, k)) for k in range(given.count)]
    make = MODELS[given.model]()
    policies = {str(policy): policy for policy in list_policies(given)}
    cases = [
        Case(name, lambda k, policy=policy: make(texts[max(k, 0)], policy, k + 1))
        for name, policy in policies.items()
    ]
    runs = list(measure(cases, given.count))
    sides, rows = by_case(runs), []
    exact = next(own for name, own in sides.items() if not isinstance(policies[name], str))
    for row in summarise(runs):
        policy, own = policies[row["side"]], sides[row["side"]]
        rows.append(
            {
                "policy": row["side"],
                "exactness": getattr(policy, "exactness", ""),
                "tokens_a_pass": sum(x["count"] for x in own) / sum(x["passes"] for x in own),
                "seconds": row["seconds"]["median"],
                "times": row["pairs"]["median"],
            }
        )
        if not isinstance(policy, str):
            pairs = zip(exact, own, strict=True)
            rows[-1]["same"] = all(torch.equal(a["tokens"], b["tokens"]) for a, b in pairs)
        for name in ("first_sound", "of_sound", "of_frame"):
            if name in own[0]:
                rows[-1][name] = median(x[name] for x in own)
        print(rows[-1], flush=True)
    write_measured(given.json, media_speed=rows)


if __name__ == "__main__":
    main()
