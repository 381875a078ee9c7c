"""Draw docs/images/window.gif: one image token by token, and by Jacobi decoding, pass by pass.

Both runs are real and are recorded after every forward pass: a frame is a pass of both. Cells that
a pass added are bright. The script ends with an error if the two images differ.

    python scripts/window_gif.py [--prompt TEXT] [--seed N] [--out FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

import mmaccel
from mmaccel.results import Progress

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "a red circle above a small blue square on grass"
SIDE, MARGIN, HEAD, FOOT = 272, 12, 34, 26  # pixels
MILLISECONDS, HOLD = 50, 2500  # of a frame, and of the last one
UNKNOWN, NEW, INK, PAPER = (222, 222, 222), (255, 244, 200), (30, 30, 30), (255, 255, 255)


def record(
    pipe: mmaccel.TextToImage,
    prompt: str,
    policy: mmaccel.Autoregressive | mmaccel.Jacobi,
    seed: int,
) -> tuple[Image.Image, torch.Tensor, list[int]]:
    """The image, its tokens, and how many tokens there were after each forward pass."""
    lengths: list[int] = []

    def on_step(progress: Progress) -> None:
        lengths.append(int(progress.lengths[0]))

    out = pipe(prompt, policy=policy, seed=seed, on_step=on_step)
    return out.images[0], out.tokens[0], lengths


def draw_panel(image: Image.Image, grid: tuple[int, int], before: int, now: int) -> Image.Image:
    """The first `now` cells of an image; those from `before` on are bright, later ones grey."""
    rows, columns = grid
    panel = image.resize((SIDE, SIDE), Image.Resampling.NEAREST)
    draw = ImageDraw.Draw(panel, "RGBA")
    for cell in range(before, rows * columns):
        y, x = divmod(cell, columns)
        box = [x * SIDE // columns, y * SIDE // rows, (x + 1) * SIDE // columns - 1]
        box.append((y + 1) * SIDE // rows - 1)
        draw.rectangle(box, fill=(*NEW, 110) if cell < now else UNKNOWN)
    return panel


def draw_frame(
    image: Image.Image, grid: tuple[int, int], runs: list[tuple[str, list[int]]], step: int
) -> Image.Image:
    """Both panels after pass `step` (from 0), with their names and counts."""
    frame = Image.new("RGB", (2 * SIDE + 3 * MARGIN, HEAD + SIDE + FOOT + MARGIN), PAPER)
    draw = ImageDraw.Draw(frame)
    name_font, count_font = ImageFont.load_default(16), ImageFont.load_default(14)
    for k, (name, lengths) in enumerate(runs):
        left = MARGIN + k * (SIDE + MARGIN)
        last = min(step, len(lengths) - 1)
        ended = step >= len(lengths)
        before = lengths[last] if ended else lengths[last - 1] if last else 0
        frame.paste(draw_panel(image, grid, before, lengths[last]), (left, HEAD))
        draw.text((left, 8), name, INK, name_font)
        count = f"{last + 1} passes, {lengths[last]} tokens" + ("  (finished)" if ended else "")
        draw.text((left, HEAD + SIDE + 6), count, INK, count_font)
    return frame


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes both images and writes the GIF."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "window.gif")
    args = parser.parse_args(arguments)
    pipe = mmaccel.TextToImage.from_pretrained("scenes", device="cpu")
    plain = record(pipe, args.prompt, mmaccel.Autoregressive(), args.seed)
    jacobi = record(pipe, args.prompt, mmaccel.Jacobi(window=32), args.seed)
    if not torch.equal(plain[1], jacobi[1]):
        raise SystemExit("the two images differ; expected the same tokens")
    layout = pipe.image_model.layout
    runs = [("one token a pass", plain[2]), ("Jacobi(window=32)", jacobi[2])]
    frames = [
        draw_frame(plain[0], (layout.rows, layout.columns), runs, step)
        for step in range(len(plain[2]) + 1)
    ]
    both = Image.new("RGB", (frames[0].width, 2 * frames[0].height))
    both.paste(frames[len(jacobi[2]) // 2])
    both.paste(frames[-1], (0, frames[0].height))
    colours = both.quantize(96)  # one palette, so that a frame holds only what changed
    frames = [frame.quantize(palette=colours, dither=Image.Dither.NONE) for frame in frames]
    times = [MILLISECONDS] * (len(frames) - 1) + [HOLD]
    frames[0].save(
        args.out, save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True
    )
    print(f"{args.out}: {len(plain[2])} and {len(jacobi[2])} passes, the same tokens")


if __name__ == "__main__":
    main()
