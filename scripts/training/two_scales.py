"""Would drafts between scales pay? A small head drafts the tokens of a scale of `scenes-var`, so
that one pass could compute that scale and the next.

    python -m scripts.training.two_scales --folder mmaccel/demo/weights/scenes-var --json FILE

In a pass over scales k and k + 1 the entries of scale k are known, those of scale k + 1 are made of
drafts of scale k's tokens. Where every draft is the token that the pass draws, by the slots' own
noise, both scales stand; else scale k alone (bitwise, as in Jacobi decoding). An entry of scale
k + 1 is made of a sum and attends to all of scale k, so that one wrong draft spoils all of it: what
counts is the share of scales that are right as a whole.

The head sees what stands before the pass: a slot's entry, the entries of its scale and the text in
one block like the model's own, with its own cross-entropy to the model's distribution as loss.
`chance` is the expected share under maximal coupling, which is the most that any rule exact in
distribution accepts of these drafts.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rows import read_arguments, write_measured
from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions
from mmaccel.loading import open_pipeline
from mmaccel.options import LoadOptions
from mmaccel.pipelines.hosts.next_scale.network import NextScaleTransformer
from mmaccel.samplers.noise import Noise
from scripts.training import next_scale, scenes
from scripts.training.loop import mixed_precision


def make_head(network: NextScaleTransformer, depth: int) -> NextScaleTransformer:
    """The model's own first blocks, embeddings and head, as a model of `depth` blocks."""
    head = NextScaleTransformer(replace(network.config, depth=depth))
    own = network.state_dict()
    head.load_state_dict({name: own[name] for name in head.state_dict()})
    return head


def learn(
    head: NextScaleTransformer, model: NextScaleTransformer, task: Any, steps: int, seconds: float
) -> int:
    """Draw the head to the model's distributions on drawn images; how many steps that took."""
    optimiser = torch.optim.AdamW(head.parameters(), 1e-3, betas=(0.9, 0.98))
    began = time.perf_counter()
    for step in range(steps):
        share = min(1.0, (time.perf_counter() - began) / seconds)
        if share == 1.0:
            return step
        optimiser.param_groups[0]["lr"] = 1e-3 * min((step + 1) / 50, 2 * (1 - share), 1)
        ids, codes = task.batch(50_000 + step, 16)
        with torch.no_grad():
            sums = task.sums(codes)
            wanted = model(ids.clamp(min=0), ids >= 0, sums).softmax(-1)
        with torch.enable_grad(), mixed_precision("cpu"):
            logits = head(ids.clamp(min=0), ids >= 0, sums)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return steps


def compare(
    head: NextScaleTransformer, model: NextScaleTransformer, task: Any, tokens: Tensor, texts: Any
) -> tuple[list[dict[str, Any]], float]:
    """Rows for each scale, over images `[B, L]` that the model drew at guidance 1, and passes an
    image.
    """
    ids, codes = task.pack([task.words.encode(text) for text in texts], tokens)
    sums = task.sums(codes)
    drafted, real = (each(ids.clamp(min=0), ids >= 0, sums) for each in (head, model))
    noise = Noise.from_seed(1, len(codes), torch.device("cpu"))
    slots = torch.arange(codes.shape[1]).expand(len(codes), -1)
    own = noise.frozen(slots, real.shape[-1], 1.0)
    is_same = (drafted.log_softmax(-1) + own).argmax(-1) == (real.log_softmax(-1) + own).argmax(-1)
    overlap = torch.minimum(drafted.softmax(-1), real.softmax(-1)).sum(-1)  # [B, L]
    rows, stands = [], []
    for scale, (same, coupled) in enumerate(
        zip(is_same.split(model.lengths, 1), overlap.split(model.lengths, 1), strict=True)
    ):
        stands.append(same.all(1))
        rows.append(
            {
                "scale": scale,
                "tokens": model.lengths[scale],
                "right": float(same.float().mean()),
                "whole": float(same.all(1).float().mean()),
                "chance": float(coupled.log().sum(1).exp().mean()),
            }
        )
    n_passes = 0
    for image in torch.stack(stands, 1).tolist():
        scale = 0
        while scale < len(image):
            scale += 2 if image[scale] and scale + 1 < len(image) else 1
            n_passes += 1
    return rows, n_passes / len(codes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=240.0, help="of training, a head")
    parser.add_argument("--count", type=int, default=64, help="images that the model draws")
    given = read_arguments(parser)
    pipe: Any = open_pipeline(str(given.folder), LoadOptions(device="cpu"))
    model = pipe.model.model
    task = next_scale.Generator(scenes.STILLS, given.folder)
    captions = make_captions(EVALUATION_SEED, range(given.count))
    made = pipe(captions, seed=range(given.count), guidance_scale=1.0, output_type="tokens")
    heads = []
    for depth in given.depths:
        head = make_head(model, depth)
        steps = learn(head, model, task, 100_000, given.seconds)
        rows, passes = compare(head, model, task, made.tokens, captions)
        heads.append({"blocks": depth, "steps": steps, "passes": passes, "scales": rows})
        print(heads[-1], flush=True)
    write_measured(given.json, count=given.count, seconds=given.seconds, heads=heads)


if __name__ == "__main__":
    main()
