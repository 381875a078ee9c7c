"""Contact sheets of images with their prompts, and sheets that compare two policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmaccel.results import EXACT_DTYPE, exactness_in
from mmaccel.samplers.canvas.next_scale import NextScale
from mmaccel.samplers.canvas.stepwise import Stepwise
from mmaccel.samplers.window.autoregressive import Autoregressive

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmaccel.pipelines.text_to_image.outputs import ImageOutput
    from mmaccel.results import Stats

_SIDE = 240  # pixels of an image on a sheet
_GAP = 16
_MARGIN = 40
_BETWEEN = 56
_TITLE, _TEXT = 26, 17  # font sizes
_PAPER = "#fbfaf7"
_INK = "#1f2328"
_SOFT = "#6a6f76"
_LINE = "#d9d6cf"
TOKENS = "token by token"


@dataclass(frozen=True)
class Panel:
    """Images under one heading."""

    title: str  # set large above them
    note: str  # set small below the title
    images: Sequence[Image]  # all of one size
    prompts: Sequence[str]  # one per image
    foot: str  # set below the images


def draw_sheet(panels: Sequence[Panel], columns: int, foot: str = "") -> Image:
    """Panels side by side, with equally many images each, `columns` in a row; a line as `foot`."""
    from PIL import Image, ImageDraw, ImageFont, ImageOps

    title, text = ImageFont.load_default(_TITLE), ImageFont.load_default(_TEXT)
    wrapped = [_wrap(prompt, text) for prompt in panels[0].prompts]
    columns = max(1, min(columns, len(wrapped)))
    n_lines = max(map(len, wrapped))
    cell = _SIDE + 8 + n_lines * (_TEXT + 5) + _GAP
    rows = -(-len(wrapped) // columns)
    head = _TITLE + _TEXT + 30
    widest = max(text.getlength(line) for panel in panels for line in (panel.note, panel.foot))
    inner = max(columns * _SIDE + (columns - 1) * _GAP, int(widest) + 1)
    width = 2 * _MARGIN + len(panels) * inner + (len(panels) - 1) * _BETWEEN
    height = 2 * _MARGIN + head + rows * cell + _TEXT + 12 + (_TEXT + 36 if foot else 0)
    sheet = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for k, panel in enumerate(panels):
        left = _MARGIN + k * (inner + _BETWEEN)
        if k:
            middle = left - _BETWEEN // 2
            bottom = _MARGIN + head + rows * cell + _TEXT + 12
            pen.line([(middle, _MARGIN), (middle, bottom)], fill=_LINE, width=1)
        pen.text((left, _MARGIN - 6), panel.title, fill=_INK, font=title)
        pen.text((left, _MARGIN + _TITLE + 4), panel.note, fill=_SOFT, font=text)
        for i, (image, lines) in enumerate(zip(panel.images, wrapped, strict=True)):
            x = left + (i % columns) * (_SIDE + _GAP)
            y = _MARGIN + head + (i // columns) * cell
            shown = ImageOps.contain(image, (_SIDE, _SIDE), Image.Resampling.BICUBIC)
            sheet.paste(shown, (x + (_SIDE - shown.width) // 2, y + _SIDE - shown.height))
            for j, line in enumerate(lines):
                pen.text((x, y + _SIDE + 6 + j * (_TEXT + 5)), line, fill=_SOFT, font=text)
        pen.text((left, _MARGIN + head + rows * cell), panel.foot, fill=_INK, font=text)
    if foot:
        y = height - _MARGIN - _TEXT - 6
        pen.line([(_MARGIN, y - 16), (width - _MARGIN, y - 16)], fill=_LINE, width=1)
        pen.text((width / 2, y), foot, fill=_INK, font=text, anchor="ma")
    return sheet


def _wrap(prompt: str, font: Any) -> list[str]:
    """Break a prompt into lines no wider than an image."""
    lines: list[str] = []
    for word in prompt.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= _SIDE:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def make_plain(policy: Any) -> Any:
    """The policy to compare with: of one token a pass, in the same order where it has one; of a
    scale a pass, where it is a variant of that.
    """
    if getattr(policy, "kind", "window") == "window":
        return Autoregressive()
    by_scale = NextScale()
    if "scales" in getattr(policy, "needs", ()) and policy != by_scale:
        return by_scale
    names = [name for name in ("order", "block", "cache") if hasattr(policy, name)]
    return Stepwise(**{name: getattr(policy, name) for name in names})


def loop_of(plain: Stats) -> str:
    """What a loop of `make_plain` is called."""
    return "scale by scale" if plain.policy == repr(NextScale()) else TOKENS


def title_of(name: str, policy: Any) -> str:
    """A policy's short name and its window, where it has one."""
    window = getattr(policy, "window", None)
    if window is None:
        return name
    return f"{name}, window {window}" if isinstance(window, int) else f"{name}, {window}"


def identical(plain: ImageOutput, made: ImageOutput) -> int:
    """How many images have the same tokens in both."""
    return int((plain.tokens == made.tokens).all(1).sum())


def describe_difference(plain: ImageOutput, made: ImageOutput, dtype: str) -> str:
    """How a policy's output differs from the plain loop's, and whether its guarantee allows it."""
    same = identical(plain, made)
    count = len(plain.tokens)
    exactness = exactness_in(made.stats.exactness, dtype)
    if same == count:
        own = "; scale by scale is the model's plain loop" * (loop_of(made.stats) != TOKENS)
        return f"The same {'images' if count > 1 else 'image'}, token for token{own}"
    if exactness == "up to rounding":
        is_other = plain.tokens != made.tokens  # [B, N]
        first = is_other.int().argmax(1)[is_other.any(1)]
        return (
            f"{same} of {count} images identical, the others on average up to token "
            f"{float(first.float().mean()):.0f}: {made.stats.dtype or dtype} rounds differently "
            f"in wider passes, {EXACT_DTYPE} keeps the guarantee"
        )
    reason = {
        "bitwise": "bitwise was guaranteed: please report this",
        "distribution": "other samples of the same distribution, as guaranteed",
        "relaxed": "a relaxed policy: another distribution",
    }[exactness]
    return f"{same} of {count} images identical: {reason}"


def describe_guarantee(stats: Stats, dtype: str) -> str:
    """The guarantee of a run in a dtype; of a relaxed one the divergence per token, or what ran."""
    if stats.nats:
        return f"relaxed: {stats.nats / stats.tokens:.4f} nats per token at most"
    if stats.exactness == "relaxed" and stats.reference and not stats.total_variation:
        return f"relaxed: {stats.reference}"
    if stats.exactness == "relaxed":
        return f"relaxed: total variation {stats.total_variation / stats.tokens:.3f} per token"
    if stats.exactness == "distribution":
        return "distribution: another sample of the same distribution"
    if exactness_in(stats.exactness, dtype) == "up to rounding":
        return f"same seed, same tokens up to rounding ({stats.dtype or dtype})"
    return "bitwise: same seed, same tokens"


def draw_comparison(name: str, plain: ImageOutput, made: ImageOutput, dtype: str) -> Any:
    """Both outputs on one sheet; `name` is the short name of the policy on the right."""
    if made.stats.drafts in ("coarse", "online"):
        name += f", {made.stats.drafts} drafts"
    title = loop_of(plain.stats).capitalize()
    note = "the plain loop"
    if plain.stats.positions:
        note = "one slot per pass" if loop_of(plain.stats) == TOKENS else "one scale per pass"
    panels = [
        make_panel(title, note, plain, _cost(plain)),
        make_panel(name, describe_guarantee(made.stats, dtype), made, _cost(made)),
    ]
    return draw_sheet(panels, columns=2, foot=describe_difference(plain, made, dtype))


def make_panel(title: str, note: str, made: ImageOutput, foot: str) -> Panel:
    """A panel of the stored images; its note says so if these are not all."""
    shown = len(made.images)
    count = len(made.prompts)
    note += f" (the first {shown} of {count})" if shown < count else ""
    return Panel(title, note, made.images, made.prompts[:shown], foot)


def _cost(output: ImageOutput) -> str:
    stats = output.stats
    count = len(output.prompts)
    passes = stats.row_passes / count
    return (
        f"{stats.tokens // count} tokens in {passes:.0f} forward passes{stats.of_canvases}, "
        f"{stats.seconds / count:.2f} s per image"
    )
