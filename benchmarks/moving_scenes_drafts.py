"""What drafts are worth on clips: tokens a pass by source, window and tree, quiet and busy apart.

    python -m scripts.training coarse moving-scenes runs/coarse-moving-scenes --kind video \\
        --prompts captions.txt --width 96 --guidance 2 --minutes 10
    python -m benchmarks.moving_scenes_drafts --coarse runs/coarse-moving-scenes \\
        --json benchmarks/results/moving-scenes-drafts.json

Passes are counted, no seconds: the figures do not depend on the machine. A quiet clip shows one
object that rests, appears, vanishes or moves slowly; a busy one two objects, or one that moves
quickly. Every policy is bitwise, and its clips are compared with those of the plain loop.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mmaccel
from benchmarks.comb_study import describe, write_study
from mmaccel.demo.moving_scenes.caption import Reading, read_caption
from mmaccel.demo.moving_scenes.data import EVALUATION_SEED, make_captions

WINDOWS = (16, 32, 64)
SOURCES = ("neighbour", "previous-frame", "moved-frame", "above", "left")
TREES = (mmaccel.Comb(8, 3), mmaccel.DySpec(48))
_SEARCHED = 2000  # captions among which those of a kind are looked for


def kind_of(reading: Reading) -> str:
    """Whether a caption is that of a "quiet" or a "busy" clip; "" where it leaves that open."""
    first = reading.objects[0]
    is_quick = any(each.speed == "quickly" for each in reading.objects)
    if len(reading.objects) == 2 or is_quick:
        return "busy"
    return "quiet" if not first.direction or first.speed == "slowly" else ""


def pick_captions(count: int) -> dict[str, list[str]]:
    """`count` fresh captions of each kind."""
    found: dict[str, list[str]] = {"quiet": [], "busy": []}
    for caption in make_captions(EVALUATION_SEED, range(_SEARCHED)):
        kind = kind_of(read_caption(caption))
        if kind and len(found[kind]) < count:
            found[kind].append(caption)
    return found


def list_policies(
    sources: Sequence[str], windows: Sequence[int], coarse: Path | None
) -> list[tuple[str, mmaccel.Jacobi]]:
    """Names of sources, and policies: each source at each window, then trees over coarse drafts.

    Args:
        sources: some of `SOURCES`.
        windows: W of each.
        coarse: folder of a coarse model; None leaves it out.
    """
    found = [(name, mmaccel.Jacobi(w, drafts=name)) for name in sources for w in windows]
    if coarse is None:
        return found
    drafts = mmaccel.Coarse(str(coarse))
    trees = [mmaccel.Jacobi(w, drafts=drafts, tree=t) for w in windows for t in (None, *TREES)]
    return found + [("coarse", policy) for policy in trees]


def measure(
    pipe: mmaccel.TextToVideo,
    captions: dict[str, list[str]],
    policies: Sequence[tuple[str, mmaccel.Jacobi]],
    scale: float,
) -> list[dict[str, Any]]:
    """A row for each policy: tokens a pass of the clips of each kind, and how many clips are the
    plain loop's.

    Args:
        pipe: the model.
        captions: of `pick_captions`.
        policies: of `list_policies`.
        scale: guidance scale.
    """
    texts = [text for own in captions.values() for text in own]
    kinds = [kind for kind, own in captions.items() for _ in own]

    def draw(policy: Any) -> Any:
        return pipe(texts, policy=policy, guidance_scale=scale, seed=range(len(texts))).clips

    plain = draw(mmaccel.Autoregressive())
    rows = []
    for source, policy in policies:
        clips = draw(policy)
        row = {"guidance": scale, "source": source, "window": policy.window}
        row |= describe(policy.tree)
        row["drafts"] = policy.window - 1 + (0 if policy.tree is None else policy.tree.nodes)
        for kind in captions:
            own = [clip for clip, name in zip(clips, kinds, strict=True) if name == kind]
            made = sum(clip.tokens.numel() for clip in own)
            row[kind] = round(made / sum(clip.passes for clip in own), 2)
        equal = [torch.equal(a.tokens, b.tokens) for a, b in zip(clips, plain, strict=True)]
        row["identical"] = sum(equal)
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    """Measure, print a line for each row, and write JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="moving-scenes", help="name or folder")
    parser.add_argument("--coarse", type=Path, help="folder of a coarse model")
    parser.add_argument("--sources", nargs="*", choices=SOURCES, default=SOURCES)
    parser.add_argument("--windows", type=int, nargs="+", default=WINDOWS)
    parser.add_argument("--count", type=int, default=8, help="fresh captions of each kind")
    parser.add_argument("--guidance", type=float, nargs="+", default=[2.0])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    captions = pick_captions(given.count)
    pipe = mmaccel.TextToVideo.from_pretrained(given.model, device="cpu", compile=False)
    policies = list_policies(given.sources, given.windows, given.coarse)
    rows = [row for scale in given.guidance for row in measure(pipe, captions, policies, scale)]
    write_study(given.json, 2 * given.count, "clip_drafts", rows)


if __name__ == "__main__":
    main()
