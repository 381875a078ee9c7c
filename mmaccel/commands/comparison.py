"""Token by token on the left, a policy on the right: the picture and the table of `--compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmaccel.catalog import make_policy
from mmaccel.commands.picture_sheet import Panel, draw_sheet
from mmaccel.results import EXACT_DTYPE, promise_in

if TYPE_CHECKING:
    from mmaccel.pipelines.pictures import Pictures
    from mmaccel.results import Stats


def make_plain(policy: Any) -> Any:
    """What a policy is compared with: one token a pass, in the same order where it has one."""
    if getattr(policy, "kind", "window") == "window":
        return make_policy("autoregressive")
    same = ("order", "block", "cache")
    own = {name: getattr(policy, name) for name in same if hasattr(policy, name)}
    return make_policy("stepwise", **own)


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


def print_comparison(name: str, plain: Pictures, made: Pictures, dtype: str) -> None:
    """The table: passes, tokens per pass, seconds, identical."""
    from mmaccel.commands.terminal import make_table, wide_console

    count = len(made.prompts)
    same = identical(plain, made)
    table = make_table("", *("passes", "tok/pass", "seconds", "speed-up", "identical", "promise"))
    for side_name, side in (("token by token", plain), (name, made)):
        stats = side.stats
        table.add_row(
            side_name,
            f"{stats.row_passes / count:.1f}",
            f"{stats.tokens_per_pass:.2f}",
            f"{stats.seconds / count:.2f}",
            f"{plain.stats.seconds / stats.seconds:.2f}",
            "-" if side is plain else ("yes" if same == count else f"no, {same} of {count}"),
            promise_in(stats.exactness, dtype),
        )
    console = wide_console()
    console.print(table)
    console.print(f"{verdict(plain, made, dtype)}. Means over {count} images.")


def _plain(side: Pictures) -> str:
    return "one slot a pass" if side.stats.positions else "the plain loop"


def _cost(side: Pictures) -> str:
    stats, count = side.stats, len(side.prompts)
    passes = stats.row_passes / count
    return (
        f"{stats.tokens // count} tokens in {passes:.0f} forward passes, "
        f"{stats.seconds / count:.2f} s an image"
    )
