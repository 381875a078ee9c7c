"""Every table of README.md and docs/: what it shows, and of which JSON in benchmarks/results/.

A page marks a table with `<!-- table: NAME -->` and `<!-- end -->`; `fill_tables` replaces what
stands between. `TABLES` says how each is made. Most are a `Table`: the key of the reports that it
shows, a sentence above, and columns with the format of a row's cell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from benchmarks.method_pages import PAGES, link, method_sections
from mmaccel.capabilities import GLOSSARY
from mmaccel.catalog import METHODS, load
from mmaccel.comfy.ports import field_tooltips
from mmaccel.errors import MMAccelError, OptionError
from mmaccel.evaluation.measure import tabulate
from mmaccel.evaluation.tables import grid
from mmaccel.pipelines.hosts.runner.engine import GRAPHS, SHARING, Engine, chunks_of
from mmaccel.pipelines.hosts.runner.fused_layers import LAYERS
from mmaccel.results import EXACT_DTYPE
from mmaccel.samplers.prefix_tree import PREFIX_TREE
from scripts.size import make_table, read_budget

Report = dict[str, Any]
Reports = Mapping[str, Report]
Row = dict[str, Any]
Cell = str | Callable[[Row], str]
"""Of a row: a format of its fields, or a function."""
Columns = Mapping[str, Cell]

DOCS = Path(__file__).resolve().parent.parent / "docs"
_MARK = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Block(NamedTuple):
    """A text, and the table below it; either may be empty."""

    text: str
    heads: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()


def fill_block(text: str, columns: Columns, rows: Iterable[Row]) -> Block:
    """A block of rows."""
    return Block(text, tuple(columns), tabulate(columns, rows))


def write(cell: Cell, row: Row) -> str:
    """A row's cell, or a report's sentence."""
    return cell.format_map(row) if isinstance(cell, str) else cell(row)


@dataclass(frozen=True)
class Table:
    """A block for each report that has a key.

    Attributes:
        key: of the rows in a report.
        columns: of the rows; those in `optional` only where the first row has their field.
        says: above the rows.
        of: what the reports' commands contain.
    """

    key: str
    columns: Columns
    says: Cell
    optional: Mapping[str, str] | None = None
    of: str = ""

    def __call__(self, reports: Reports) -> Iterator[Block]:
        for report in reports.values():
            if self.key in report and self.of in report["command"]:
                rows = report[self.key]
                left_out = {h for h, name in (self.optional or {}).items() if name not in rows[0]}
                columns = {h: cell for h, cell in self.columns.items() if h not in left_out}
                yield fill_block(write(self.says, report), columns, rows)


def fill_tables(text: str, reports: Reports) -> str:
    """Replace every marked table of a page.

    Args:
        text: Markdown.
        reports: results by file stem.

    Raises:
        OptionError: a marked table that nobody makes.
    """

    def replace(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise OptionError(
                f"table: expected one of {', '.join(TABLES)}, received {match[2]!r}; "
                "correct the mark"
            )
        parts: list[str] = []
        for block in TABLES[match[2]](reports):
            parts += [block.text] if block.text else []
            parts += [grid(block.heads, block.rows)] if block.heads else []
        return match[1] + "\n" + "\n\n".join(parts or ["Not yet measured."]) + "\n\n" + match[3]

    return _MARK.sub(replace, text)


def read_reports(folder: Path) -> dict[str, Report]:
    """All results in a folder, by file stem, in the order of their names; those of `mmaccel
    evaluate speed` with baselines have a folder each, whose name is the stem.
    """
    files = {file.parent.name: file for file in sorted(folder.glob("*-baselines/*/speed.json"))}
    files |= {file.stem: file for file in sorted(folder.glob("*.json"))}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}


def or_dash(cell: str, field: str) -> Cell:
    """A cell where the field has a value."""
    return lambda row: "–" if row.get(field) is None else cell.format_map(row)


def code(field: str) -> Callable[[Row], str]:
    """A field, as code where it is a call."""
    return lambda row: f"`{row[field]}`" if "(" in row[field] else str(row[field])


TORCH = "{machine[name]}, {machine[threads]} threads, torch {machine[versions][torch]}"
LIBRARIES = TORCH + ", transformers {machine[versions][transformers]}"


def source(report: Report) -> str:
    """The machine and the command of a report."""
    threads = report["machine"]["threads"]
    unit = "thread" if threads == 1 else "threads"
    return f"{report['machine']['name']}, {threads} {unit}. Made by `{report['command']}`."


# --- windows --------------------------------------------------------------------------------------


def _tokens_a_pass(row: Row) -> str:
    half = row.get("half_width")
    return f"{row['tokens_per_pass']:.2f}" + ("" if half is None else f" ± {half:.2f}")


def _promise(row: Row) -> str:
    spent = f", total variation {row['total_variation']:.3f} a token"
    return row["promise"] + (spent if row["exactness"] == "relaxed" else "")


FIRST_SCREEN = Table(
    "first_screen",
    {
        "guidance": "{guidance:g}",
        "decoding": "{label}",
        "tokens a pass": _tokens_a_pass,
        "s an image": "{seconds:.3f}",
        "speed-up": "{speed_up:.2f}×",
        "same tokens": "{identical} of {images}",
        "exactness": _promise,
    },
    lambda report: (
        "`{model}`, {first_screen[0][images]} captions, batch {batch_size}, temperature "
        "{temperature:g}, float32; " + LIBRARIES + ". Made by `{command}`."
    ).format_map(report),
)


def _policy(row: Row) -> str:
    """With the draft source where it is not the nearest slot, which older results do not name."""
    drafts = row.get("drafts")
    parts = [row["policy"]]
    parts += [f"window {row['window']}"] if row["window"] is not None else []
    parts += [f"{Path(drafts).name} drafts"] if drafts not in (None, "neighbour") else []
    parts += [row["dtype"]] if row.get("dtype", EXACT_DTYPE) != EXACT_DTYPE else []
    return ", ".join(parts)


_POLICY: Columns = {
    "policy": _policy,
    "tokens a pass": _tokens_a_pass,
    "s an image": "{seconds:.3f}",
    "speed-up": "{speed_up:.2f}×",
}
_VARIATION: Columns = {"total variation a token": "{total_variation:.3f}"}
_LEFT_OUT = ("scenes-cpu-adaptive", "scenes-cpu-bfloat16", "scenes-cpu-lookup")
"""Reports whose rows others have too, or a method's section names."""


def policy_tables(reports: Reports) -> Iterator[Block]:
    """The rows of each report of policies at its largest guidance scale."""
    for name, report in reports.items():
        if "rows" in report and "baselines" not in report and name not in _LEFT_OUT:
            guidance = max(row["guidance"] for row in report["rows"])
            rows = [row for row in report["rows"] if row["guidance"] == guidance]
            is_relaxed = any(row["exactness"] == "relaxed" for row in rows)
            columns = {**_POLICY, **_VARIATION} if is_relaxed else _POLICY
            yield fill_block(_describe_policies(report), columns, rows)


def _describe_policies(report: Report) -> str:
    return (
        f"`{report['model']}`, {len(report['captions'])} captions, batch {report['batch_size']}, "
        f"temperature {report['temperature']:g}, float32 where nothing else is said; "
        f"{TORCH.format_map(report)}. Made by `{report['command']}`."
    )


_SIDES = {
    "plain": "plain loop of this library",
    "static": "`generate`, static cache",
    "compiled": "`generate`, static cache, compiled",
}


_BASELINES: Columns = {
    "side": "{name}",
    "passes": "{passes:.1f}",
    "s an image": "{median:.3f}",
    "IQR": "{iqr:.3f}",
    "times as fast as the compiled `generate`": "{times:.2f}×",
}


def baseline_tables(reports: Reports) -> Iterator[Block]:
    """Seconds an image of a policy, of the plain loop and of transformers' own `generate`."""
    for report in reports.values():
        if "baselines" not in report:
            continue
        medians = {row["side"]: row["seconds"]["median"] for row in report["rows"]}
        rows = [
            row
            | row["seconds"]
            | {
                "name": _SIDES.get(row["side"], f"`{report['policy']}`"),
                "times": medians["compiled"] / medians[row["side"]],
            }
            for row in report["rows"]
        ]
        says = (
            "`{model}` in {dtype}, batch 1, guidance {guidance:g}; " + LIBRARIES + ". Medians of "
            "{runs} images a side, in turn. Made by `{command}`."
        )
        yield fill_block(says.format_map(report), _BASELINES, rows)


# --- canvases, visual tokens, caches --------------------------------------------------------------

_CANVAS: Columns = {
    "policy": "{policy}",
    "exactness": "{exactness}",
    "passes": "{passes:.2f}",
    "tokens a pass": "{tokens_per_pass:.2f}",
    "positions": "{positions:.0f}",
    "nats": "{nats:.3f}",
    "same tokens": or_dash("{same} of {rows}", "same"),
}


def canvas_tables(reports: Reports) -> Iterator[Block]:
    """A block for each model of every report of canvas policies."""
    for name, report in reports.items():
        if "canvas" not in report or name.endswith("-caches"):  # these in words, with the policies
            continue
        for model in dict.fromkeys(row["model"] for row in report["canvas"]):
            rows = [row for row in report["canvas"] if row["model"] == model]
            quality = rows[0]["quality"]
            names = {"right": "right", "distance": "total_variation"}
            names |= {name: name for name in ("colours", "shapes", "relations", "whole")}
            shown: Columns = {
                h: f"{{quality[{name}]:.3f}}" for h, name in names.items() if name in quality
            }
            floor = quality.get("floor")
            noise = "" if floor is None else f" Noise alone gives a distance of {floor:.3f}."
            text = (
                f"`{model}`, {rows[0]['rows']} rows, seed {report['seed']}; torch "
                f"{report['machine']['versions']['torch']}. Made by `{report['command']}`.{noise}"
            )
            yield fill_block(text, {**_CANVAS, **shown}, rows)


_MADE = TORCH + ". Made by `{command}`."
SPOKEN = Table(
    "spoken",
    {
        "model": "`{model}`",
        "policy": "`{policy}`",
        "exactness": "{exactness}",
        "guidance": "{guidance:g}",
        "temperature": "{temperature:g}",
        "batch": "{batch}",
        "sentences": "{rows}",
        "passes": "{passes:.1f}",
        "codes a pass": "{tokens_per_pass:.2f}",
        "nats": "{nats:.0f}",
        "phone errors": "{errors:.3f}",
    },
    _MADE,
)
NEXT_SCALE = Table(
    "next_scale",
    {
        "policy": "`{policy}`",
        "guidance": "{guidance:g}",
        "batch": "{batch}",
        "images": "{rows}",
        "passes": "{passes:.1f}",
        "positions": "{positions:.0f}",
        "entries kept": "{kept:.0%}",
        "seconds a call": "{seconds:.3f}",
        "times as fast": "{times:.2f}",
        "other tokens": "{differ:.0%}",
        "colours": "{colours:.1%}",
        "shapes": "{shapes:.1%}",
        "whole captions": "{whole:.1%}",
    },
    _MADE,
)


def visual_tokens_tables(reports: Reports) -> Iterator[Block]:
    """Right answers under each reducer."""
    says = "`{model}`, {questions} questions, batch {batch}, {dtype}; " + TORCH
    for report in (r for r in reports.values() if "sides" in r):
        rows = [row | {"budget": row["keep"]} for row in report["sides"]]
        yield share_block(says.format_map(report) + f". Made by `{report['command']}`.", rows)


def cache_tables(reports: Reports) -> Iterator[Block]:
    """Right answers under each cache policy and selector, of all reports of a model together."""
    by_model: dict[str, list[Report]] = {}
    for report in reports.values():
        if report.get("suite"):  # of released models; the order on a toy does not carry over
            by_model.setdefault(report["model"], []).append(report)
    for model, of_model in by_model.items():
        machines = dict.fromkeys(TORCH.format_map(report) for report in of_model)
        says = [f"`{model}`, {of_model[0]['dtype']}; {'; '.join(machines)}. Made by\n"]
        says += [f"- `{report['command']}`" for report in of_model]
        rows = [row for report in of_model for row in report["cache_sides"]]
        yield share_block("\n".join(says), rows)


def share_block(text: str, rows: Sequence[Row]) -> Block:
    """Right answers in %: a row for each method, a column for each budget; of several runs the one
    with the most questions.
    """
    runs: dict[tuple[str, Any], Row] = {}
    for row in sorted(rows, key=lambda row: row["accuracy"]["all"]["questions"]):
        runs[row["method"], row["budget"]] = row["accuracy"]["all"]
    budgets = sorted({budget for _, budget in runs if budget is not None}, reverse=True)
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        shares = [runs.get((method, budget)) for budget in (*budgets, None)]
        cells = ["" if share is None else f"{100 * share['right']:.0f}" for share in shares]
        asked = max(share["questions"] for share in shares if share is not None)
        lines.append((method, *cells, str(asked)))
    heads = ("method", *(f"{budget:g}" for budget in budgets), "as set", "of questions")
    return Block(text, heads, lines)


def _describe_steps(report: Report) -> str:
    """Layers and heads; reports that do not say have as many key heads as heads."""
    heads = report.get("heads", 16)
    key_heads, step = report.get("key_heads", heads), report.get("step_bytes")
    shape = f"{report.get('layers', 16)} layers of {heads} heads of 64"
    shape += f" and {key_heads} key heads" if key_heads != heads else ""
    if step is not None:
        shape += (
            f" ({step['weights'] / 2**20:.0f} MiB of weights and {step['cache'] / 2**20:.0f} of "
            f"keys and values: at most {step['speed_up']:.1f}× by reading alone)"
        )
    return (
        f"A step over {report['positions']} positions, {shape}, random weights, float32, one row; "
        f"{source(report)}"
    )


LONG_CONTEXT = Table(
    "long_context",
    {
        "window": "{width}",
        "method": code("way"),
        "ms a step": "{ms:.0f}",
        "times as fast": "{times:.2f}×",
        "cache, MiB": lambda row: f"{row['cache_bytes'] / 2**20:.0f}",
    },
    _describe_steps,
)

# --- texts, speech, clips -------------------------------------------------------------------------


def _describe_drafts(report: Report) -> str:
    says = "`stdlib` continues held-out modules"
    if "kind" in report["text_drafts"][0]:
        model = report["command"].partition("--model ")[2].split()[0]
        says = f"{model} answers four kinds of prompts"
    return f"{says}, float32, one row; in brackets tokens a pass; {source(report)}"


def text_draft_tables(reports: Reports) -> Iterator[Block]:
    """How many times as fast as `generate` drafts of text are: a row for each way to decode, a
    column for each temperature, or kind of prompt and temperature.
    """
    for report in (r for r in reports.values() if "text_drafts" in r):
        by_way: dict[str, dict[str, Row]] = {}
        for row in report["text_drafts"]:
            prompts = f"{row.get('kind', 'temperature')} {row['temperature']:g}"
            by_way.setdefault(code("way")(row), {})[prompts] = row
        first, *others = by_way.items()
        lines = [(first[0], *(f"{row['ms_a_token']:.1f} ms" for row in first[1].values()))]
        lines += [(way, *map(_gain, rows.values())) for way, rows in others]
        yield Block(_describe_drafts(report), ("decoding", *first[1]), lines)


def _gain(row: Row) -> str:
    passes = row.get("tokens_a_pass") or 1
    return f"{row['times']:.2f}×" + (f" ({passes:.2f})" if passes > 1 else "")


def text_tree_tables(reports: Reports) -> Iterator[Block]:
    """What trees over drafts for text save: a row for each shape, a column for each policy."""
    for report in (r for r in reports.values() if "text_trees" in r):
        rows = report["text_trees"]
        found = {(r["temperature"], r["policy"], r["tree"]): r for r in rows}
        kinds = list(dict.fromkeys(key[:2] for key in found))
        lines = []
        for row in {r["tree"]: r for r in rows}.values():
            counts = (f"{found[*kind, row['tree']]['tokens_a_pass']:.2f}" for kind in kinds)
            lines.append((code("tree")(row), str(row["nodes"]), *counts))
        heads = ("tree", "nodes", *(f"`{policy}`, {at:g}" for at, policy in kinds))
        text = (
            f"`stdlib`, its head, a window of {rows[0]['window']}, tokens a pass by policy and "
            f"temperature. {source(report)}"
        )
        yield Block(text, heads, lines)


_MEDIA_NAMES = {
    "chain": "a chain of passes with a cache",
    "generate": "transformers' own `generate`",
}


def media_table(model: str) -> Table:
    """What windows save on one model of speech or clips, by policy."""
    digits = 3 if model == "voices-depth" else 2
    columns: Columns = {
        "policy": lambda row: _MEDIA_NAMES.get(row["policy"], f"`{row['policy']}`"),
        "tokens a pass": "{tokens_a_pass:.2f}",
        "s": f"{{seconds:.{digits}f}}",
        "times as fast": "{times:.2f}×",
        "s a second of sound": "{of_sound:.2f}",
        "s to the first sound": "{first_sound:.2f}",
        "passes a frame": "{of_frame:.2f}",
    }
    optional = dict(zip(list(columns)[4:], ("of_sound", "first_sound", "of_frame")))
    says = f"`{model}`, float32, one at a time, medians; "
    of = f"media_speed {model} "
    return Table("media_speed", columns, lambda report: says + source(report), optional, of)


# --- GPUs -----------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """What is measured, how it is written (`{}` takes the value), what is aimed at, and which of
    the values of several parts stands for all of them.
    """

    what: str
    form: str
    target: str
    worst: Callable[[Iterable[float]], float] = min


FIGURES = {  # key in a report of `scripts/gpu_check.py` -> figure
    "step_share_of_floor": Figure(
        "captured step of one token: share of the floor, weights and keys read once", "{:.0%}",
        "at least 75 % at 7B, 60 % at 1B",
    ),
    "eager_step_ratio": Figure(
        "step of `generate` over the captured step", "{:.2f}×", "at least 5×"
    ),
    "compiled_step_ratio": Figure(
        "the same, with a static cache and transformers' compiled pass", "{:.2f}×", "–"
    ),
    "window_32_step_ratio": Figure(
        "captured step of a window of 32 over that of one token", "{:.2f}×", "at most 1.15×", max,
    ),
    "window_64_step_ratio": Figure(
        "captured step of a window of 64 over that of one token", "{:.2f}×", "at most 1.25×", max,
    ),
    "window_attention_share_of_copy": Figure(
        "`window_attention` over more than 128 MB: share of the copy bandwidth", "{:.0%}",
        "at least 75 %",
    ),
    "window_attention_over_sdpa": Figure(
        "`window_attention`: SDPA's time over its", "{:.2f}×", "at least 1×"
    ),
    "window_attention_ragged_gain": Figure(
        "`window_attention`, ragged rows: equal splits over splits by lengths", "{:.2f}×",
        "at least 1×",
    ),
    "window_attention_over_flex": Figure(
        "`window_attention`: FlexAttention's time over its", "{:.2f}×", "at least 1×"
    ),
    "sample_64x131k_ms": Figure(
        "`sample`, 64 rows x 131072 ids: no filters, top-k, top-p", "{:.3f} ms", "at most 0.35 ms",
        max,
    ),
    "scenes_images_per_s": Figure(
        "`scenes`, Jacobi in a captured step, batch 64", "{:.1f} images/s", "–"
    ),
    "product": Figure(
        "`scenes`, batch 1: an image by `generate` over one by captured Jacobi", "{:.2f}×",
        "at least 20×",
    ),
    "product_compiled": Figure(
        "the same, with a static cache and transformers' compiled pass", "{:.2f}×", "–"
    ),
    "scenes_outside": Figure(
        "`scenes`, batch 1: share of a captured Jacobi run outside its steps", "{:.0%}",
        "at most 10 %", max,
    ),
    "canvas_lossless_speed_up": Figure(
        "`scenes-masked`: an image by `Stepwise` over one by `LosslessUnmask`", "{:.2f}×", "–"
    ),
}  # fmt: skip


def devices_of(reports: Reports) -> dict[str, list[Report]]:
    """Reports of `scripts/gpu_check.py` by device."""
    found: dict[str, list[Report]] = {}
    for name, report in reports.items():
        if name.startswith("gpu-") and "parts" in report:
            found.setdefault(report["device"], []).append(report)
    return found


def parts_of(reports: list[Report]) -> list[Report]:
    """The newest run of every part that passed, oldest first."""
    runs = [run for report in reports for run in report["parts"].items()]
    newest: dict[str, Report] = {}
    for name, part in sorted(runs, key=lambda run: run[1]["date"]):
        if part["status"] == "passed":
            newest.pop(name, None)  # the newest goes after all others
            newest[name] = part
    return list(newest.values())


def figure_table(reports: Reports) -> Iterator[Block]:
    """Every figure, a column for each device: the worst of the newest values there are."""
    devices = devices_of(reports)
    rows = []
    for key, figure in FIGURES.items():
        cells = []
        for of_device in devices.values() or [[]]:
            own = [p["figures"][key] for p in parts_of(of_device) if key in p.get("figures", {})]
            worst = figure.form.format(figure.worst(own)) if own else "not yet measured"
            cells.append(worst.replace("%", " %"))
        rows.append((figure.what, figure.target, *cells))
    yield Block("", ("figure", "target", *(devices or ["any GPU"])), rows)
    said = []
    for device, of_device in devices.items():
        newest = max(of_device, key=lambda report: report["date"])
        versions = ", ".join(f"{name} {version}" for name, version in newest["versions"].items())
        said.append(f"{device}: {versions}; {newest['date'][:10]}, by `{newest['command']}`.")
    yield Block(
        "\n".join(said) or "Measured by `python scripts/gpu_check.py` on a machine with a GPU."
    )


def gpu_tables(reports: Reports, key: str) -> Iterator[Block]:
    """Rows of all parts by device."""
    for device, of_device in devices_of(reports).items():
        rows = [row for part in parts_of(of_device) for row in part.get(key, ())]
        if key == "timings":  # a kernel's rows are those of the newest part
            rows = list({(row["kernel"], row["name"]): row for row in rows}.values())
        if rows:
            yield fill_block(f"{device}:", _GPU[key], rows)


def share(field: str) -> Cell:
    """A share in percent, if there is one."""
    return lambda row: "–" if row[field] is None else f"{100 * row[field]:.0f} %"


def _window(field: str, width: str, form: str) -> Cell:
    return lambda row: form.format(row[field][width])


def _ratios(row: Row) -> str:
    return ", ".join(f"{row['window_ratios'][width]:.2f}×" for width in ("32", "64"))


def _attention(row: Row) -> str:
    """Which attention ran, and whether passes were captured."""
    how = "kernel" if row["attention"] == "window_attention" else f"own: {row['attention']}"
    how += "" if row["runner"] == "cuda graphs" else f"; not captured: {row['reason']}"
    return how.replace("|", "/")


def _forward(row: Row) -> str:
    if not row["policy"]:
        return "its own"
    how = _attention(row).removeprefix("kernel")
    return row["forward"] + (f", attention its {how}" if how.startswith("own") else how)


_LIBRARY = {
    "library": "transformers alone",
    "library-static": "transformers, static cache, compiled pass",
}
_TIMES: Columns = {
    "s an image": "{seconds:.4f}",
    "speed-up": "{speed_up:.2f}×",
}
_GPU: dict[str, Columns] = {  # rows of the parts of a report -> columns
    "timings": {
        "kernel": "`{kernel}`",
        "sizes": "{name}",
        "torch ms": "{torch_ms:.3f}",
        "Triton ms": "{triton_ms:.3f}",
        "GB/s": "{gb_per_s:.0f}",
        "of a copy": share("share_of_copy"),
    },
    "steps": {
        "model": "{model}",
        "forward": "{route}",
        "attention": _attention,
        "nodes": or_dash("{nodes}", "nodes"),
        "context": "{context}",
        "floor ms": "{floor_ms:.2f}",
        "one token ms": "{step_ms:.2f}",
        "of the floor": share("share_of_floor"),
        "window 32 ms": _window("windows_ms", "32", "{:.2f}"),
        "window 64 ms": _window("windows_ms", "64", "{:.2f}"),
        "ratios": _ratios,
        "`generate` ms": "{generate_ms:.2f}",
        "its ratio": "{generate_ratio:.2f}×",
        "compiled ms": or_dash("{compiled_ms:.2f}", "compiled_ms"),
        "ratio of compiled": or_dash("{compiled_ratio:.2f}×", "compiled_ms"),
    },
    "scenes": {
        "batch": "{batch}",
        "guidance": "{guidance:g}",
        "policy": lambda row: f"`{row['policy']}`" if row["policy"] else _LIBRARY[row["route"]],
        "forward": _forward,
        "tokens a pass": "{tokens_per_pass:.2f}",
        **_TIMES,
        "outside the steps": share("outside"),
    },
    "canvas": {
        "batch": "{batch}",
        "policy": "`{policy}`",
        "exactness": "{exactness}",
        "passes": "{passes:.1f}",
        "same tokens": "{same} of {pictures}",
        **_TIMES,
    },
}

# --- the catalog ----------------------------------------------------------------------------------


def layer_support_table(reports: Reports) -> Iterator[Block]:
    """Methods of caches and attention with the same cells share a row."""
    for report in (r for r in reports.values() if "layer_support" in r):
        names: dict[tuple[str, ...], list[str]] = {}
        for row in report["layer_support"]:
            cells = tuple(row[name] for name in ("window", "guidance", "batch", "memory"))
            names.setdefault(cells, []).append(link(row["slot"], row["method"]))
        lines = [(", ".join(methods), *cells) for cells, methods in names.items()]
        heads = ("methods", "windows of drafts", "guidance pair", "batch", "frees memory")
        yield Block(f"Made by `{report['command']}`.", heads, lines)


def run_options_table(_: Reports) -> Iterator[Block]:
    """The options of how passes run, from the docstring of `Engine`."""
    lines = [(f"`{name}`", what) for name, what in field_tooltips(Engine).items()]
    yield Block("", ("option", "what"), lines)


def fused_layers_list(_: Reports) -> Iterator[Block]:
    """The families whose decoder layers the fused decoder knows."""
    families = dict.fromkeys(name.partition(".")[0] for name in LAYERS)
    yield Block(", ".join(f"`{family}`" for family in families))


def kernels_list(_: Reports) -> Iterator[Block]:
    """The operations that have a kernel in Triton."""
    kernels = DOCS.parent / "kernels"
    names = {file.stem for file in kernels.glob("*.py")}
    found = [name for name in sorted(names) if any(kernels.glob(f"{name}*_triton.py"))]
    yield Block(", ".join(f"`{name}`" for name in found if not name.endswith("_triton")))


_SECTIONS = {  # of docs/compatibility.md: title, and columns beside name, batch and classes
    "attached": (
        "Models of transformers under `mmaccel.attach`",
        ("model", "policies", "visual tokens", "CUDA graph", "int8 weights", "LoRA"),
    ),
    "pipelines": (
        "`TextToImage`, `TextToSpeech`, `ImageToVideo`",
        ("family", "policies", "CUDA graph"),
    ),
    "canvas": (
        "Masked and diffusion models",
        ("model", "policies", "CUDA graph", "int8 weights"),
    ),
}
_FIELDS = {
    "visual tokens": "visual_tokens",
    "CUDA graph": "cuda_graphs",
    "int8 weights": "int8",
    "LoRA": "lora",
    "batch": "batch",
}
_KINDS = {
    "Jacobi": "window",
    "LosslessUnmask": "canvas",
    "NextScale": "canvas",
    "Stepwise": "canvas, not LosslessUnmask",
}
_SOURCES = {"stand-in": "written for the tests", "mmaccel": "ours"}


def compatibility_tables(reports: Reports) -> Iterator[Block]:
    """What runs with what, by section; reasons are numbered below each table."""
    for report in (r for r in reports.values() if "compatibility" in r):
        versions = ", ".join(f"{k} {v}" for k, v in report["machine"]["versions"].items())
        yield Block(f"On a CPU with {versions}. Made by `{report['command']}`.")
        for section, (title, (first, *others)) in _SECTIONS.items():
            merged: dict[tuple[str, ...], Row] = {}  # rows that differ in nothing but the name
            for row in report["compatibility"]:
                if row["section"] == section:
                    same = tuple(value for key, value in row.items() if key != "name")
                    merged.setdefault(same, row | {"names": []})["names"].append(f"`{row['name']}`")
            reasons: list[str] = []
            heads = (first, "name", *others, "batch", "classes")
            lines = []
            for row in merged.values():
                line = [row["title"], ", ".join(row["names"])]
                line.append(_KINDS.get(row["policy"], row["policy"]))
                for head in heads[3:-1]:
                    value = row[_FIELDS[head]]
                    if value != "-" and not value.startswith(("yes", "all")):
                        if value not in reasons:
                            reasons.append(value)
                        value = f"no ({reasons.index(value) + 1})"
                    line.append(value)
                lines.append((*line, _SOURCES.get(row["source"], row["source"])))
            yield Block(f"### {title}", heads, lines)
            if reasons:
                yield Block("; ".join(f"({n}) {text}" for n, text in enumerate(reasons, 1)) + ".")


_OPTIONS = (GRAPHS, SHARING, chunks_of(512), PREFIX_TREE, *Engine(fused=True).parts)


def capabilities_table(_: Reports) -> Iterator[Block]:
    """The words by which parts of a run say what they do, and which do it or exclude it."""
    slots = {
        slot: {entry.class_name: named_part(entry.target) for entry in entries.values()}
        for slot, entries in METHODS.items()
    }
    slots["options"] = {repr(option): option for option in _OPTIONS}

    def list_parts(word: str, which: str) -> str:
        """Those that have a word; a slot's as one where all of them have it."""
        found = []
        for slot, parts in slots.items():
            having = [
                f"`{name}`" for name, part in parts.items() if word in getattr(part, which, ())
            ]
            found += [f"every `{slot}`"] if len(having) == len(parts) else having
        return ", ".join(found)

    rows = [
        (word, known.meaning, list_parts(word, "needs"), list_parts(word, "excludes"))
        for word, known in GLOSSARY.items()
        if list_parts(word, "needs") or list_parts(word, "excludes")
    ]
    yield Block("", ("word", "what a run does", "done by", "not beside"), rows)


def named_part(target: str) -> Any:
    """A method with its default fields; where it has none, its class with class variables alone."""
    cls = load(target)
    try:
        return cls()
    except (MMAccelError, TypeError):
        fixed = {
            name: value
            for name in ("needs", "excludes")
            if isinstance(value := getattr(cls, name, ()), frozenset | dict)
        }
        return SimpleNamespace(**({"needs": (), "excludes": ()} | fixed))


def sections(slot: str, _: Reports) -> Iterator[Block]:
    """What docstrings say of the methods of a slot."""
    yield from map(Block, method_sections(slot))


TABLES: dict[str, Callable[[Reports], Iterator[Block]]] = {  # by the name in the mark
    "capabilities": capabilities_table,
    "window": policy_tables,
    "first-screen": FIRST_SCREEN,
    "baselines": baseline_tables,
    "canvas": canvas_tables,
    "spoken": SPOKEN,
    "next-scale": NEXT_SCALE,
    "visual-tokens": visual_tokens_tables,
    "cache": cache_tables,
    "long-context": LONG_CONTEXT,
    "text-drafts": text_draft_tables,
    "text-trees": text_tree_tables,
    "voices-speed": media_table("voices"),
    "voices-depth-speed": media_table("voices-depth"),
    "moving-scenes-speed": media_table("moving-scenes"),
    "gpu-figures": figure_table,
    "gpu-kernels": partial(gpu_tables, key="timings"),
    **{f"gpu-{key}": partial(gpu_tables, key=key) for key in list(_GPU)[1:]},
    **{f"{slot.replace('_', '-')}-methods": partial(sections, slot) for slot in PAGES},
    "run-options": run_options_table,
    "fused-layers": fused_layers_list,
    "kernels": kernels_list,
    "layer-support": layer_support_table,
    "compatibility": compatibility_tables,
    "sizes": lambda _: iter([Block(make_table(read_budget()))]),
}
