"""What fewer visual tokens save of a prompt's pass: seconds, and bytes of the cache.

    python benchmarks/visual_prefill.py --json benchmarks/results/visual-prefill-cpu.json

The model has the sizes of LLaVA-OneVision-0.5B and random weights: times do not depend on weights,
answers do, and none of them counts. One image of three tiles and an overview, about 2 950 visual
tokens, and 40 of text. Each method answers with one token, in a rotating order. Those that work
behind the encoder get features that were encoded once; those that work in the encoder or before it
encode the image every time, and so does the row of all tokens. With --answers each method also
answers questions of the embedded `scenes-vqa`. One row sees a synthetic screen; the others, noise.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import mmaccel  # noqa: E402
from mmaccel.outputs.machine import describe_machine  # noqa: E402
from mmaccel.outputs.whole_files import write_whole  # noqa: E402
from mmaccel.pipelines.attach import prompt_pass  # noqa: E402
from mmaccel.reduction.visual_tokens.contract import TokenReducer  # noqa: E402

IMAGE = 151_646
BATCH = 16  # questions answered together
ON_SCREEN = "PixelPrune of a screen"
SIZE = (384, 1152)  # three tiles side by side


def main() -> None:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=float, default=0.22)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24, help="of the language model")
    parser.add_argument("--answers", type=int, default=0, help="questions of each kind")
    parser.add_argument("--only", nargs="+", help="methods to measure, beside all tokens")
    parser.add_argument("--json", type=Path, help="write the report here")
    args = parser.parse_args()
    model = build_model(args.layers)
    pixels = torch.randn(1, 4, 3, 384, 384)
    screen = draw_screen()
    sizes = torch.tensor([SIZE])
    with torch.no_grad():
        encoded = model.base_model.get_image_features(pixels, sizes, return_dict=True)
    n_visual = len(encoded.pooler_output[0])
    ids = torch.randint(1000, (1, 40))
    ids = torch.cat([ids[:, :8], torch.full((1, n_visual), IMAGE), ids[:, 8:]], 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_sizes": sizes}
    early = tuple(range(1, 9))

    methods: dict[str, Any] = {
        "all tokens": None,
        "UniformTokens": mmaccel.UniformTokens(keep=args.keep),
        "DivPrune": mmaccel.DivPrune(keep=args.keep),
        "DART": mmaccel.DART(keep=args.keep),
        "FastV": mmaccel.FastV(keep=args.keep),
        "PyramidDrop": mmaccel.PyramidDrop(keep=args.keep),
        "ToMe": mmaccel.ToMe(keep=args.keep),
        "ToMe, encoder alone": mmaccel.ToMe(keep=args.keep, features="all"),
        "ToMe in early layers": mmaccel.ToMe(keep=args.keep, layers=early),
        "DownsamplePixels": mmaccel.DownsamplePixels(keep=args.keep),
        "PixelPrune": mmaccel.PixelPrune(keep=args.keep),
        ON_SCREEN: mmaccel.PixelPrune(),
        "PixelPrune, then DivPrune": [
            mmaccel.PixelPrune(keep=0.5),
            mmaccel.DivPrune(keep=args.keep / 0.5),
        ],
    }
    if args.only:
        methods = {name: methods[name] for name in ["all tokens", *args.only]}
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    references: dict[str, str] = {}
    names = list(methods)
    for k in range(args.rounds):
        for name in names[k:] + names[:k]:
            given = {"mm_encoder_outputs": {"image": encoded}}
            method = methods[name]
            if method is None or not is_behind(method):
                given = {"pixel_values": screen if name == ON_SCREEN else pixels}
            costs, references[name] = answer(model, method, inputs | given)
            found[name].append(costs)
            print(k, name, found[name][-1], flush=True)
    shares = {name: right_answers(methods[name], args.answers) for name in names}
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine("cpu"),
        "model": f"LLaVA-OneVision-0.5B sizes, {args.layers} layers, random weights, float32",
        "visual_tokens": n_visual,
        "text_tokens": 40,
        "keep": args.keep,
        "answers": args.answers,
        "encoder_seconds": statistics.median(run["encoder_seconds"] for run in found[names[0]]),
        "visual_prefill": [
            {
                "method": name,
                "settings": describe(methods[name]),
                "right": shares[name],
                "reference": references[name],
            }
            | {field: statistics.median(run[field] for run in runs) for field in runs[0]}
            for name, runs in found.items()
        ],
    }
    if args.json is not None:
        text = json.dumps(report, indent=1) + "\n"
        write_whole(args.json, lambda path: path.write_text(text, encoding="utf-8"))


def draw_screen() -> torch.Tensor:
    """Tiles `[1, 4, 3, 384, 384]` of a page: a bar, a frame, and lines of noise for text."""
    rng = torch.Generator().manual_seed(0)
    tiles = torch.ones(1, 4, 3, 384, 384)
    tiles[..., :42, :] = -0.5
    tiles[..., 56:, :28] = 0.7
    for line in range(5):
        top = 84 + 56 * line
        width = int(torch.randint(100, 320, (1,), generator=rng))
        tiles[..., top : top + 14, 42 : 42 + width] = torch.randn(14, width, generator=rng).sign()
    return tiles


def is_behind(methods: Any) -> bool:
    """Whether a method, or all of a list, work behind the encoder."""
    listed = methods if isinstance(methods, list) else [methods]
    return all(method.stage in ("encoder_exit", "llm_layer") for method in listed)


def describe(methods: Any) -> str:
    """A method, or a list of them, as it is written in Python."""
    listed = methods if isinstance(methods, list) else [methods]
    return ", ".join(map(repr, listed))


@functools.cache
def open_questions(n: int) -> tuple[Any, list[Any]]:
    """`scenes-vqa`, and n questions of each kind."""
    from mmaccel.evaluation.visual_tokens import draw_questions, open_model

    return open_model("scenes-vqa", "cpu", torch.float32), list(draw_questions(n))


def right_answers(methods: Any, n: int) -> float | None:
    """The share of right answers to n questions of each kind; None without questions, and for
    methods in layers that its encoder lacks.
    """
    from mmaccel.evaluation import visual_tokens as measure

    if not n:
        return None
    vlm, asked = open_questions(n)
    right = 0
    for first in range(0, len(asked), BATCH):
        batch = asked[first : first + BATCH]
        seeds = list(range(first, first + len(batch)))
        try:
            texts, _ = measure.answer(
                vlm, vlm.encode(batch), methods, seeds=seeds, max_new_tokens=4
            )
        except mmaccel.OptionError:
            return None
        right += sum(one.is_right(text) for text, one in zip(texts, batch, strict=True))
    return right / len(asked)


def build_model(n_layers: int) -> Any:
    """The model in evaluation mode, float32."""
    import transformers

    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=26,
            num_attention_heads=16,
            image_size=384,
            patch_size=14,
        ),
        text_config=transformers.Qwen2Config(
            vocab_size=152_000,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=n_layers,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32_768,
            tie_word_embeddings=True,
        ),
        image_token_id=IMAGE,
        image_grid_pinpoints=[[384, 384], list(SIZE)],
    )
    torch.manual_seed(0)
    return transformers.LlavaOnevisionForConditionalGeneration(config).eval()


def answer(model: Any, method: Any, inputs: Any) -> tuple[dict[str, float], str]:
    """Seconds to the first token after the encoder, of the encoder if it ran, of the selection,
    and megabytes cached; and what the run says of its visual tokens.
    """
    with selecting() as selection, cached() as sizes, encoding(model) as encoder:
        policy = mmaccel.Autoregressive()
        with mmaccel.attach(model, policy, strict=True, seed=0, visual_tokens=method) as run:
            began = time.perf_counter()
            model.generate(**inputs, max_new_tokens=1, do_sample=False)
            seconds = time.perf_counter() - began
    assert method is None or run.stats.reference
    found = {
        "seconds": seconds - sum(encoder),
        "selection_seconds": sum(selection),
        "cache_megabytes": sum(sizes) / 1e6,
    }
    found |= {"encoder_seconds": sum(encoder)} if encoder else {}
    return found, run.stats.reference


@contextmanager
def encoding(model: Any) -> Iterator[list[float]]:
    """Seconds of every call of the tower inside the block, reductions in it included."""
    found = list[float]()
    own = model.base_model.get_image_features

    @functools.wraps(own)
    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        made = own(*args, **options)
        found.append(time.perf_counter() - began)
        return made

    model.base_model.get_image_features = timed
    try:
        yield found
    finally:
        del model.base_model.get_image_features


@contextmanager
def selecting() -> Iterator[list[float]]:
    """Seconds of every plan made inside the block."""
    plan, found = TokenReducer.plan, list[float]()

    def timed(self: Any, context: Any) -> Any:
        began = time.perf_counter()
        made = plan(self, context)
        found.append(time.perf_counter() - began)
        return made

    TokenReducer.plan = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        TokenReducer.plan = plan  # type: ignore[method-assign]


@contextmanager
def cached() -> Iterator[list[int]]:
    """Bytes of the keys and values of every prompt processed inside the block."""
    read, found = prompt_pass.read_layers, list[int]()

    def count(cache: Any) -> Any:
        layers = read(cache)
        found.extend(t.numel() * t.element_size() for pair in layers for t in pair)
        return layers

    prompt_pass.read_layers = count
    try:
        yield found
    finally:
        prompt_pass.read_layers = read


if __name__ == "__main__":
    main()
