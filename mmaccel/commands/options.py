"""Options that several commands share, as types of their parameters, and how values are parsed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.catalog import METHODS, POLICIES, REDUCERS, make, make_policy, read_method, read_named
from mmaccel.commands.terminal import say
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_THREADS, MAX_VALUES, SEEDS
from mmaccel.options import option, parse_fields
from mmaccel.own_code import TypedName


def parse_path(text: str) -> Path:
    """A path with a name: an empty text, maybe an unset variable, would be the current folder."""
    if not str(text).strip():
        raise typer.BadParameter(
            f"expected a path, received {str(text)!r}; name one, or leave the option out"
        )
    return Path(text)


def _choose(what: str, *names: str) -> str:
    return f"{what}: one of {', '.join(names)}, or module:Name, with fields as name:field=value"


Out = Annotated[
    Path,
    typer.Option("--out", "-o", help="folder for the files", parser=parse_path, metavar="PATH"),
]
Decoder = Annotated[Path | None, typer.Option(help="image decoder, for checkpoints without one")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps or xpu")]
Threads = Annotated[
    int | None,
    typer.Option(
        help="of a CPU; by default the fastest for this model, measured", min=1, max=MAX_THREADS
    ),
]
Dtype = Annotated[str, typer.Option(help="auto, float32 (fp32), bfloat16 (bf16) or float16 (fp16)")]
CompileFirst = Annotated[  # not "auto", which would compile in the middle of a measurement
    bool,
    typer.Option(
        "--compile/--no-compile",
        help="compile the fused passes on a CPU, before anything is measured",
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="write figures here", parser=parse_path, metavar="FILE"),
]


@dataclass(frozen=True, kw_only=True)
class PolicyFlags:
    """How tokens are decoded. `policy` is a short name or `module:Name`, None an exact one;
    `set_fields` are fields of the policy as texts, all others have flags of their own.
    """

    policy: TypedName | None = option(
        None, f"one of {', '.join(POLICIES)}; or module:Name; by default one that is exact"
    )
    set_fields: list[str] | None = option(
        None,
        "a field of the policy as name=value, as often as needed; see mmaccel models",
        names=("--set",),
    )
    window: str | None = option(None, 'tokens per pass, or "adaptive"')
    drafts: TypedName | None = option(
        None,
        "draft source: auto, coarse, online, neighbour, …, the folder of a coarse model, or "
        "module:Name",
    )
    tree: TypedName | None = option(None, _choose("branches beside the drafts", *METHODS["tree"]))

    def fields(self) -> dict[str, Any]:
        """The given fields of the policy; `--set` counts where a field has a flag, too."""
        named = given(**vars(self) | {"policy": None, "set_fields": None})
        texts = map(TypedName, self.set_fields or ())
        return named | parse_fields("--set", texts, "--set gamma=0.2")

    def read(self) -> dict[str, Any]:
        """The given fields, after a look at the policy, if one is named."""
        options = self.fields()
        if self.policy is not None:
            make_policy(self.policy, **options)
        return options

    def choose(self, model: Any = None) -> tuple[str, Any]:
        """The short name of the policy and the policy; None: for any model that is decoded in
        windows.
        """
        from mmaccel.loading import pick_name

        name = pick_name(self.policy, model)
        return name, make_policy(name, **self.fields())


@dataclass(frozen=True, kw_only=True)
class WindowPolicyFlags(PolicyFlags):
    """The same of models that are decoded in windows."""

    policy: TypedName | None = option(
        None,
        f"one of {', '.join(METHODS['window'])}; or module:Name; by default jacobi, which is exact",
    )

    def read(self) -> dict[str, Any]:
        self.choose()
        return self.fields()


@dataclass(frozen=True, kw_only=True)
class SizeFlags:
    """Width and height of images."""

    size: str | None = option(None, "pixels, 768 or 1024x768")
    width: int | None = option(None, "pixels, beside --height; as --size 1024x768")
    height: int | None = option(None, "pixels, beside --width")

    def join(self) -> str | None:
        """The size as `--size` has it; None takes the model's own."""
        parts = given(**vars(self))
        if len(parts) < 2 and self.width is None and self.height is None:
            return self.size
        if parts.keys() != {"width", "height"}:
            named = " ".join(f"--{name} {value}" for name, value in parts.items())
            raise OptionError(
                f"--width, --height: expected both, or --size alone, received {named}; write for "
                "example --width 1024 --height 768"
            )
        return f"{self.width}x{self.height}"


@dataclass(frozen=True, kw_only=True)
class LayerFlags:
    """What is done to the caches and the attention of a model's layers."""

    kv_cache: str | None = option(
        None, _choose("which entries of a prompt stay in the caches", *METHODS["kv_cache"])
    )
    attention: str | None = option(
        None, _choose("which cached keys a pass attends to", *METHODS["attention"])
    )

    def read(self) -> dict[str, Any]:
        texts = given(**vars(self))
        return {slot: read_method(slot, TypedName(text)) for slot, text in texts.items()}


@dataclass(frozen=True, kw_only=True)
class VisualFlags:
    """Which visual tokens of a prompt stay."""

    visual_tokens: list[str] | None = option(None, _choose("a method, once a stage", *REDUCERS))
    keep: float | None = option(None, "the fraction of visual tokens that stays")
    n_keep: int | None = option(None, "the number that stays, instead of --keep")

    def read(self) -> list[Any]:
        return parse_reducers(self.visual_tokens, self.keep, self.n_keep)


def given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def refuse(options: dict[str, Any], reason: str) -> None:
    """Refuse options, by name, that do not go with something; None and False were not given."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise OptionError(
                f"{name}: expected none {reason}, received {str(value)!r}; leave it out"
            )


def pick_seed(seed: int | None) -> tuple[int, bool]:
    """The value of `--seed`, or one that is drawn without it and for -1, and whether it was."""
    from mmaccel.samplers.noise import choose_one_seed, draw_new_seed

    return choose_one_seed(seed, draw_new_seed), seed in (None, -1)


def read_seed(seed: int) -> int:
    """The value of a `--seed` that has a default; -1 draws one and prints it."""
    if 0 <= seed < SEEDS:  # most, and without torch
        return seed
    chosen, _ = pick_seed(seed)
    say_drawn(chosen)
    return chosen


def say_drawn(seed: int) -> None:
    """Print a seed that was drawn, and how the run can be made again."""
    say(f"seed: {seed}, drawn; the same command with --seed {seed} makes the same again")


def set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def split_values(option: str, text: str) -> list[str]:
    """The parts of a value between commas, each once."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if len(parts) > MAX_VALUES:
        raise OptionError(
            f"{option}: expected at most {MAX_VALUES} values, received {len(parts)}; ask for fewer"
        )
    return parts


def parse_reducers(texts: list[str] | None, keep: float | None, n_keep: int | None) -> list[Any]:
    """The methods of `--visual-tokens NAME[:field=value…]`; `keep` and `n_keep` are of all that
    name neither themselves.
    """
    if not texts:
        option, value = ("--keep", keep) if keep is not None else ("--n-keep", n_keep)
        if value is not None:
            raise OptionError(
                f"{option}: expected --visual-tokens with it, received {value!r} alone; name a "
                "method such as --visual-tokens dart"
            )
        return []
    methods = []
    for text in texts:
        name, chosen = read_named("visual_tokens", TypedName(text), REDUCERS)
        if not {"keep", "n_keep"} & set(chosen):
            chosen |= given(keep=keep, n_keep=n_keep)
        methods.append(make("visual_tokens", name, **chosen))
    return methods
