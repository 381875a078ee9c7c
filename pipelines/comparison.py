"""Token by token on the left, a policy on the right: one picture of both, and what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmaccel.pipelines.picture_sheet import Panel, draw_sheet
from mmaccel.results import EXACT_DTYPE, promise_in
from mmaccel.samplers.autoregressive import Autoregressive
from mmaccel.samplers.stepwise import Stepwise

if TYPE_CHECKING:
    from mmaccel.pipelines.pictures import Pictures
    from mmaccel.results import Stats


def make_plain(policy: Any) -> Any:
    """What a policy is compared with: one token a pass, in the same order where it has one."""
    if getattr(policy, "kind", "window") == "window":
        return Autoregressive()
    same = ("order", "block", "cache")
    own = {name: getattr(policy, name) for name in same if hasattr(policy, name)}
    return Stepwise(**own)


def title_of(name: str, policy: Any) -> str:
    """A policy's short name and its window, where it has one."""
    window = getattr(policy, "window", None)
    if window is None:
        return name
    return f"{name}, window {window}" if isinstance(window, int) else f"{name}, {window}"


def identical(plain: Pictures, made: Pictures) -> int:
    """How many pictures have the same tokens in both."""
    return int((plain.tokens == made.tokens).all(1).sum())


def verdict(plain: Pictures, made: Pictures, dtype: str) -> str:
    """Say in words how the two sides compare, and what was promised.

    Args:
        plain: made token by token.
        made: of the same captions and seeds.
        dtype: of the generator, both times.
    """
    same, count, exactness = identical(plain, made), len(plain.tokens), made.stats.exactness
    if same == count:
        return f"The same {'images' if count > 1 else 'image'}, token for token"
    if exactness == "bitwise" and dtype != EXACT_DTYPE:
        first = (plain.tokens != made.tokens).int().argmax(1)[(plain.tokens != made.tokens).any(1)]
        return (
            f"{same} of {count} images identical, the others on average up to token "
            f"{float(first.float().mean()):.0f}: {dtype} rounds differently in wider passes, "
            f"{EXACT_DTYPE} keeps the promise"
        )
    kept = {
        "bitwise": "bitwise was promised: please report this",
        "distribution": "other draws from the same law, as promised",
        "relaxed": "a relaxed policy: another law",
    }[exactness]
    return f"{same} of {count} images identical: {kept}"


def promise(stats: Stats, dtype: str) -> str:
    """What a run promised in a dtype, in words; a relaxed one says what it spent."""
    if stats.nats:
        return f"relaxed: {stats.nats / stats.tokens:.4f} nats spent a token at most"
    if stats.exactness == "relaxed":
        spent = stats.total_variation / stats.tokens
        return f"relaxed: total variation {spent:.3f} spent a token"
    if stats.exactness == "distribution":
        return "distribution: another draw from the same law"
    if dtype != EXACT_DTYPE:
        return f"same seed, same tokens {promise_in(stats.exactness, dtype)} ({dtype})"
    return "bitwise: same seed, same tokens"


def draw_comparison(name: str, plain: Pictures, made: Pictures, dtype: str) -> Any:
    """Both sides on one sheet; `name` is the short name of the policy on the right."""
    panels = [
        make_panel("Token by token", _plain(plain), plain, _cost(plain)),
        make_panel(name, promise(made.stats, dtype), made, _cost(made)),
    ]
    return draw_sheet(panels, columns=2, foot=verdict(plain, made, dtype))


def make_panel(title: str, note: str, made: Pictures, foot: str) -> Panel:
    """A panel of the pictures that were kept; says so where they are not all."""
    shown, count = len(made.images), len(made.prompts)
    note += f" (the first {shown} of {count})" if shown < count else ""
    return Panel(title, note, made.images, made.prompts[:shown], foot)


def _plain(side: Pictures) -> str:
    return "one slot a pass" if side.stats.positions else "the plain loop"


def _cost(side: Pictures) -> str:
    stats, count = side.stats, len(side.prompts)
    passes = stats.row_passes / count
    return (
        f"{stats.tokens // count} tokens in {passes:.0f} forward passes, "
        f"{stats.seconds / count:.2f} s an image"
    )
