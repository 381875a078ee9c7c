"""What fewer visual tokens save of a prompt's pass: seconds, and bytes of the cache.

    python benchmarks/visual_prefill.py --json benchmarks/results/visual-prefill-cpu.json

The model has the sizes of LLaVA-OneVision-0.5B and random weights: times do not depend on weights,
answers do, and none is reported. One image of three tiles and an overview, about 2 950 visual
tokens, and 40 of text. The image is encoded once; each method then answers with one token, in a
rotating order.
"""

from __future__ import annotations

import argparse
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
SIZE = (384, 1152)  # three tiles side by side


def main() -> None:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=float, default=0.22)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24, help="of the language model")
    parser.add_argument("--json", type=Path, help="write the report here")
    args = parser.parse_args()
    model = build_model(args.layers)
    pixels = torch.randn(1, 4, 3, 384, 384)
    sizes = torch.tensor([SIZE])
    began = time.perf_counter()
    with torch.no_grad():
        encoded = model.base_model.get_image_features(pixels, sizes, return_dict=True)
    encoder_seconds = time.perf_counter() - began
    n_visual = len(encoded.pooler_output[0])
    ids = torch.randint(1000, (1, 40))
    ids = torch.cat([ids[:, :8], torch.full((1, n_visual), IMAGE), ids[:, 8:]], 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_sizes": sizes}

    methods: dict[str, Any] = {
        "all tokens": None,
        "UniformTokens": mmaccel.UniformTokens(keep=args.keep),
        "DivPrune": mmaccel.DivPrune(keep=args.keep),
        "DART": mmaccel.DART(keep=args.keep),
        "FastV": mmaccel.FastV(keep=args.keep),
        "PyramidDrop": mmaccel.PyramidDrop(keep=args.keep),
    }
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    names = list(methods)
    for k in range(args.rounds):
        for name in names[k:] + names[:k]:
            found[name].append(answer(model, methods[name], inputs, encoded))
            print(k, name, found[name][-1], flush=True)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine("cpu"),
        "model": f"LLaVA-OneVision-0.5B sizes, {args.layers} layers, random weights, float32",
        "visual_tokens": n_visual,
        "text_tokens": 40,
        "keep": args.keep,
        "encoder_seconds": encoder_seconds,
        "visual_prefill": [
            {"method": name, "settings": repr(methods[name])}
            | {field: statistics.median(run[field] for run in runs) for field in runs[0]}
            for name, runs in found.items()
        ],
    }
    if args.json is not None:
        text = json.dumps(report, indent=1) + "\n"
        write_whole(args.json, lambda path: path.write_text(text, encoding="utf-8"))


def build_model(n_layers: int) -> Any:
    """The model in evaluation mode, float32."""
    import transformers

    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=1152, intermediate_size=4304, num_hidden_layers=26, num_attention_heads=16,
            image_size=384, patch_size=14,
        ),
        text_config=transformers.Qwen2Config(
            vocab_size=152_000, hidden_size=896, intermediate_size=4864,
            num_hidden_layers=n_layers, num_attention_heads=14, num_key_value_heads=2,
            max_position_embeddings=32_768, tie_word_embeddings=True,
        ),
        image_token_id=IMAGE, image_grid_pinpoints=[[384, 384], list(SIZE)],
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlavaOnevisionForConditionalGeneration(config).eval()


def answer(model: Any, method: Any, inputs: Any, encoded: Any) -> dict[str, float]:
    """Seconds to the first token after the encoder, seconds of the selection, megabytes cached."""
    with selecting() as selection, cached() as sizes:
        policy = mmaccel.Autoregressive()
        with mmaccel.attach(model, policy, strict=True, seed=0, visual_tokens=method) as run:
            began = time.perf_counter()
            model.generate(
                **inputs, mm_encoder_outputs={"image": encoded}, max_new_tokens=1, do_sample=False
            )
            seconds = time.perf_counter() - began
    assert method is None or run.stats.reference
    return {
        "seconds": seconds, "selection_seconds": sum(selection),
        "cache_megabytes": sum(sizes) / 1e6,
    }  # fmt: skip


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
