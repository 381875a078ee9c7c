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
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from mmaccel.capabilities import GLOSSARY
from mmaccel.catalog import METHODS, Entry, load, make
from mmaccel.errors import MMAccelError, OptionError
from mmaccel.evaluation.measure import tabulate
from mmaccel.evaluation.tables import (
    CACHE_COLUMNS,
    VISUAL_COLUMNS,
    grid,
    kind_cells,
)
from mmaccel.pipelines.hosts.runner.engine import GRAPHS, SHARING, Engine, chunks_of
from mmaccel.reduction.visual_tokens.contract import PromptReducer
from mmaccel.results import EXACT_DTYPE, exactness_in
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


def or_dash(cell: str, field: str, dash: str = "-") -> Cell:
    """A cell where the field has a value."""
    return lambda row: dash if row.get(field) is None else cell.format_map(row)


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
    "guidance": "{guidance:g}",
    "policy": _policy,
    "passes": "{passes:.1f}",
    "tokens a pass": _tokens_a_pass,
    "s an image": "{seconds:.3f}",
    "speed-up": "{speed_up:.2f}×",
    "sampler's share": lambda row: f"{100 * row['sampler_share']:.0f} %",
}
_VARIATION: Columns = {"total variation a token": "{total_variation:.3f}"}


def policy_tables(reports: Reports, policies: tuple[str, ...]) -> Iterator[Block]:
    """A policy's page: the rows of each report that has more of them than the plain loop's."""
    for report in reports.values():
        if "rows" not in report or "baselines" in report:
            continue
        rows = [row for row in report["rows"] if row["policy"] in policies]
        if {row["policy"] for row in rows} <= {"autoregressive"}:
            continue
        is_relaxed = any(row["exactness"] == "relaxed" for row in rows)
        columns = {**_POLICY, **_VARIATION} if is_relaxed else _POLICY
        yield fill_block(_describe_policies(report), columns, rows)


def _describe_policies(report: Report) -> str:
    bits = report.get("card", {}).get("generator", {}).get("validation_bits_per_token")
    loss = "" if bits is None else f" ({bits:.2f} bits a token on validation data)"
    routes = {row.get("route") for row in report["rows"]}
    route = next((f", {name} passes" for name in ("compiled", "fused") if name in routes), "")
    return (
        f"`{report['model']}`{loss}, {len(report['captions'])} captions, batch "
        f"{report['batch_size']}, temperature {report['temperature']:g}; "
        f"{TORCH.format_map(report)}, float32 where nothing else is said{route}. "
        f"Made by `{report['command']}`."
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


_BATCH_1, _BATCH_8 = "scenes-cpu-batch1", "scenes-cpu-batch8"
_MASKED, _GRAMMAR = "scenes-masked-cpu-canvas-exact", "grammar-masked-cpu-canvas"
_CHOSEN = (  # report, heading, policy and window, or the plain canvas policy and another
    (_BATCH_1, "images token by token, batch 1", "jacobi", 32, "float32"),
    (_BATCH_1, "", "mc-sjd", 32, "float32"),
    (_BATCH_1, "", "gsd", 32, "float32"),
    (_BATCH_8, "the same, batch 8", "jacobi", 8, "float32"),
    (_BATCH_8, "", "jacobi", 32, "float32"),
    (_BATCH_8, "", "jacobi", 32, "bfloat16"),
    (_MASKED, "masked images", "stepwise halton", "lossless-unmask halton", ""),
    (_GRAMMAR, "masked text", "stepwise", "lossless-unmask", ""),
    (_GRAMMAR, "", "stepwise", "entropy-bounded 0.5", ""),
)


def choosing_table(reports: Reports) -> Iterator[Block]:
    """A row for each kind of model and policy, at guidance 2 where there is guidance.

    Seconds of canvas runs are left out: they were not taken in turn with those of the plain loop.
    """
    lines = []
    for name, heading, first, second, dtype in _CHOSEN:
        report = reports.get(name, {})
        if dtype:
            rows = [row for row in report.get("rows", ()) if row["guidance"] == 2]
            plain = [row for row in rows if row["policy"] == "autoregressive"]
            own = [
                row
                for row in rows
                if (row["policy"], row["window"], row["dtype"]) == (first, second, dtype)
            ]
            words = "" if dtype == EXACT_DTYPE else f", {dtype}"
            label = f"`{first}`, window {second}{words}"
        else:
            rows = report.get("canvas", ())
            plain, own = ([row for row in rows if row["policy"] == p] for p in (first, second))
            label = f"`{second}`"
        for row in own:
            passes = f"{plain[0]['passes']:.{0 if dtype else 1}f}"
            exactness = exactness_in(row["exactness"], dtype or EXACT_DTYPE)
            gain = f"{row['speed_up']:.2f}×" if dtype else "–"
            lines.append((heading, label, exactness, passes, f"{row['passes']:.1f}", gain))
    heads = ("generated", "policy", "exactness", "passes without", "passes with", "in seconds")
    if lines:
        yield Block("", heads, lines)


# --- canvases, visual tokens, caches --------------------------------------------------------------

_CANVAS: Columns = {
    "policy": "{policy}",
    "exactness": "{exactness}",
    "passes": "{passes:.2f}",
    "tokens a pass": "{tokens_per_pass:.2f}",
    "positions": "{positions:.0f}",
    "nats": "{nats:.3f}",
    "same tokens": or_dash("{same} of {rows}", "same", ""),
}


def canvas_tables(reports: Reports) -> Iterator[Block]:
    """A block for each model of every report of canvas policies."""
    for report in (r for r in reports.values() if "canvas" in r):
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
            if "differ" in rows[0]:  # of tokens, from the same blocks without a cache
                shown = {"other tokens": or_dash("{differ:.3f}", "differ", ""), **shown}
            yield fill_block(text, {**_CANVAS, **shown}, rows)


def visual_tokens_tables(reports: Reports) -> Iterator[Block]:
    """What each reducer costs, and its right answers by kind."""
    says = (
        "`{model}`, {questions} questions of {kinds} kinds, batch {batch}, {dtype}; " + TORCH
    ) + ". Made by `{command}`."
    for report in (r for r in reports.values() if "sides" in r):
        rows, kinds = report["sides"], report["kind_names"]
        yield fill_block(says.format_map(report | {"kinds": len(kinds)}), VISUAL_COLUMNS, rows)
        by_kind = [(r["method"], f"{r['keep']:g}", *kind_cells(r, kinds)) for r in rows]
        yield Block("Right answers by kind, %:", ("method", "keep", *kinds), by_kind)


def cache_tables(reports: Reports) -> Iterator[Block]:
    """What each cache policy and selector costs, and its right answers by task."""
    says = (
        "`{model}`, {count} questions of {tasks} tasks, prompts of {prompt_tokens[0]} to "
        "{prompt_tokens[1]} tokens, batch {batch}, {dtype}; " + LIBRARIES
    ) + ". Made by `{command}`.{noted}"
    for report in (r for r in reports.values() if "cache_sides" in r):
        tasks = report["task_names"]
        rows = [{"blocks": None, **row} for row in report["cache_sides"]]  # old ones lack it
        count = str(report["questions"])
        if report.get("suite"):
            answered = rows[0]["accuracy"]["all"]["questions"]
            count = f"of {report['suite']} the {answered} that the full cache answers of {count}"
        noted = f" {report['note']}" if "note" in report else ""
        own = {"count": count, "tasks": len(tasks), "noted": noted}
        yield fill_block(says.format_map(report | own), CACHE_COLUMNS, rows)
        named = tabulate({name: CACHE_COLUMNS[name] for name in ("method", "budget")}, rows)
        by_task = [(*cells, *kind_cells(row, tasks)) for cells, row in zip(named, rows)]
        yield Block("Right answers by task, %:", ("method", "budget", *tasks), by_task)


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
    return f"{says}, float32, one row; {source(report)}"


TEXT_DRAFTS = Table(
    "text_drafts",
    {
        "prompts": "{kind}",
        "temperature": "{temperature:g}",
        "decoding": code("way"),
        "tokens a pass": or_dash("{tokens_a_pass:.2f}", "tokens_a_pass", ""),
        "ms a token": "{ms_a_token:.2f}",
        "times as fast": "{times:.2f}×",
        "exactness": or_dash("{exactness}", "exactness", ""),
    },
    _describe_drafts,
    {"prompts": "kind"},
)


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
        "captured step of one token: memory floor (weights and keys read once at the speed of a "
        "copy) over its time", "{:.0%}", "at least 75 % at 7B, 60 % at 1B",
    ),
    "eager_step_ratio": Figure(
        "step of transformers' own `generate` over the captured step", "{:.2f}×", "at least 5×"
    ),
    "compiled_step_ratio": Figure(
        "step of `generate` with a static cache and transformers' compiled pass over the captured "
        "step", "{:.2f}×", "–",
    ),
    "window_32_step_ratio": Figure(
        "captured step of a window of 32 over that of one token at the same positions",
        "{:.2f}×", "at most 1.15×", max,
    ),
    "window_64_step_ratio": Figure(
        "captured step of a window of 64 over that of one token at the same positions",
        "{:.2f}×", "at most 1.25×", max,
    ),
    "window_attention_share_of_copy": Figure(
        "`window_attention`, more than 128 MB of keys and values: share of the copy bandwidth",
        "{:.0%}", "at least 75 %",
    ),
    "window_attention_over_sdpa": Figure(
        "`window_attention`: time of SDPA with a mask over its time", "{:.2f}×", "at least 1×"
    ),
    "window_attention_ragged_gain": Figure(
        "`window_attention`, one of 8 rows 16 times as long: time of equal splits over that of "
        "splits by lengths",
        "{:.2f}×",
        "at least 1×",
    ),
    "window_attention_over_flex": Figure(
        "`window_attention`: time of FlexAttention over its time", "{:.2f}×", "at least 1×"
    ),
    "sample_64x131k_ms": Figure(
        "`sample`, 64 rows x 131072 ids: no filters, top-k, top-p", "{:.3f} ms", "at most 0.35 ms",
        max,
    ),
    "scenes_images_per_s": Figure(
        "`scenes`, Jacobi in a captured step, batch 64", "{:.1f} images/s", "–"
    ),
    "product": Figure(
        "`scenes`, batch 1, fewer passes times faster passes: time an image of transformers' own "
        "`generate` over that of a captured Jacobi run", "{:.2f}×", "at least 20×",
    ),
    "product_compiled": Figure(
        "the same against `generate` with a static cache and transformers' compiled pass",
        "{:.2f}×", "–",
    ),
    "scenes_outside": Figure(
        "`scenes`, batch 1: share of a captured Jacobi run outside its steps", "{:.0%}",
        "at most 10 %", max,
    ),
    "canvas_lossless_speed_up": Figure(
        "`scenes-masked`, batch 1 and 8: time an image of `Stepwise` over that of "
        "`LosslessUnmask`, Halton order, the same tokens", "{:.2f}×", "–",
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


def _flex(row: Row) -> str:
    reason = row["flex_reason"].replace("|", "/")
    return f"none: {reason[:60]}" if row["flex_ms"] is None else f"{row['flex_ms']:.3f}"


_LIBRARY = {
    "library": "transformers alone",
    "library-static": "transformers, static cache, compiled pass",
}
_TIMES: Columns = {
    "first call, s an image": "{first_seconds:.4f}",
    "s an image": "{seconds:.4f}",
    "images/s": "{images_per_s:.2f}",
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
        "nodes": or_dash("{nodes}", "nodes", "–"),
        "context": "{context}",
        "floor ms": "{floor_ms:.2f}",
        "one token ms": "{step_ms:.2f}",
        "of the floor": share("share_of_floor"),
        "window 32 ms": _window("windows_ms", "32", "{:.2f}"),
        "window 64 ms": _window("windows_ms", "64", "{:.2f}"),
        "ratios": _ratios,
        "`generate` ms": "{generate_ms:.2f}",
        "its ratio": "{generate_ratio:.2f}×",
        "compiled ms": or_dash("{compiled_ms:.2f}", "compiled_ms", "–"),
        "ratio of compiled": or_dash("{compiled_ratio:.2f}×", "compiled_ms", "–"),
    },
    "attention": {
        "model": "{model}",
        "window": "{width}",
        "keys": "{room}",
        "ours ms": "{ours_ms:.3f}",
        "of a copy": share("share_of_copy"),
        "SDPA ms": "{sdpa_ms:.3f}",
        "FlexAttention ms": _flex,
        "slower": lambda row: "yes" if row["loses"] else "",
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

_FOLDERS = {
    "visual_tokens": "reducers", "prompt_tokens": "reducers",
    "kv_cache": "layers", "attention": "layers",
}  # fmt: skip
_SHARED = {  # slot -> page of the methods that have none of their own
    "drafts": "policies/jacobi.md",
    "tree": "policies/trees.md",
    "siblings": "policies/trees.md",
    "visual_tokens": "reducers/controls.md",
}
_SLOTS = {
    "window": "window policies, for models decoded token after token",
    "canvas": "canvas policies, for masked and diffusion models",
    "drafts": "where drafts come from: `Jacobi(drafts=…)`",
    "tree": "branches beside the drafts: `Jacobi(tree=…)`",
    "siblings": "which of several drafts of a slot is accepted: `Speculative(siblings=…)`",
    "visual_tokens": "which visual tokens stay: `visual_tokens=`",
    "prompt_tokens": "which words of a text prompt are computed: `prompt_tokens=`",
    "kv_cache": "which entries of a prompt stay in the caches: `kv_cache=`",
    "attention": "which cached keys a pass attends to: `attention=`",
}
_DEPTH = 24  # layers of a tower, for tables
_STAGES = {
    "pixels": "before the encoder",
    "encoder_layer": "encoder layers",
    "encoder_exit": "encoder exit",
    "llm_layer": "LLM layers",
}
_LOOKS = {  # what a method needs -> what it looks at
    "pixels": "pixels",
    "keys": "keys",
    "cls_attention": "class token's attention",
    "all_attention": "all attention",
    "last_attention": "last token's attention",
    "text_attention": "text's attention",
    "text": "text",
    "grid": "grid",
    "tiles": "tiles",
    "frames": "frames",
}
_PAPER = re.compile(r"arXiv:(\d{4}\.\d{5})")
_UNCHANGED = "the policy's"  # guarantee under drafts and trees


def classes(slot: str) -> dict[str, tuple[str, Entry]]:
    """Class -> its first short name, and the entry; a class may have several names."""
    found: dict[str, tuple[str, Entry]] = {}
    is_of_words = slot == "prompt_tokens"
    for name, entry in METHODS["visual_tokens" if is_of_words else slot].items():
        if is_of_words and not issubclass(load(entry.target), PromptReducer):
            continue
        found.setdefault(entry.class_name, (name, entry))
    return found


def page_of(slot: str, name: str, entry: Entry) -> str:
    """The page about a method below docs/: it is named like the method or its file."""
    folder = _FOLDERS.get(slot, "policies")
    stem = entry.module.rpartition(".")[2].replace("_", "-")
    pages = (f"{folder}/{name}.md", f"{folder}/{stem}.md")
    return next((page for page in pages if (DOCS / page).is_file()), _SHARED.get(slot, pages[0]))


def methods_table(_: Reports) -> Iterator[Block]:
    """The README's table: the methods of each slot by their guarantee."""
    rows = []
    for slot, title in _SLOTS.items():
        by_guarantee: dict[str, list[str]] = {}
        for public, (name, entry) in classes(slot).items():
            shown = name if slot == "drafts" else public  # most sources are given by name
            guarantee = getattr(load(entry.target), "exactness", _UNCHANGED)
            if isinstance(guarantee, property):  # it depends on a field
                guarantee = load(entry.target)().exactness
            link = f"[`{shown}`](docs/{page_of(slot, name, entry)})"
            by_guarantee.setdefault(guarantee, []).append(link)
        rows += [(title, guarantee, ", ".join(links)) for guarantee, links in by_guarantee.items()]
    yield Block("", ("slot", "guarantee", "methods"), rows)


def layers_table(_: Reports) -> Iterator[Block]:
    """The methods of a model's layers."""
    rows = [
        (f"[`{public}`]({page_of(slot, name, entry)})", f"`{slot}`", entry.summary)
        for slot in ("kv_cache", "attention", "prompt_tokens")
        for public, (name, entry) in classes(slot).items()
    ]
    yield Block("", ("method", "keyword", "keeps"), rows)


def drafts_table(_: Reports) -> Iterator[Block]:
    """Draft sources by name."""
    rows = [(f"`{name}`", entry.summary) for name, entry in METHODS["drafts"].items()]
    yield Block("", ("drafts", "where they come from"), rows)


def reducers_table(_: Reports) -> Iterator[Block]:
    """The reducers, where they work, what they look at, and the papers that their files name."""
    rows = []
    for public, (name, entry) in classes("visual_tokens").items():
        method: Any = make("visual_tokens", name, keep=0.5)
        link = f"[`{public}`]({page_of('visual_tokens', name, entry)})"
        layers, stage = method.layers_in(_DEPTH), _STAGES[method.stage]
        if layers:
            is_span = len(layers) > 2 and layers == tuple(range(layers[0], layers[-1] + 1))
            listed = f"{layers[0]} to {layers[-1]}" if is_span else ", ".join(map(str, layers))
            stage += f": {listed}"
        looks = ", ".join(word for need, word in _LOOKS.items() if need in method.needs) or "-"
        head = str(import_module(load(entry.target).__module__).__doc__).partition("Departures")[0]
        papers = dict.fromkeys(_PAPER.findall(head))
        source = ", ".join(f"arXiv:{paper}" for paper in papers) or "control"
        rows.append((link, entry.summary, stage, looks, source))
    yield Block("", ("method", "keeps", "works", "looks at", "source"), rows)


LAYER_SUPPORT = Table(
    "layer_support",
    {
        "method": lambda row: (
            f"[`{row['method']}`]"
            f"({page_of(row['slot'], row['name'], METHODS[row['slot']][row['name']])})"
        ),
        "windows of drafts": "{window}",
        "guidance pair": "{guidance}",
        "batch": "{batch}",
        "frees memory": "{memory}",
    },
    "Made by `{command}`.",
)

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
_KINDS = {"Jacobi": "window", "LosslessUnmask": "canvas", "Stepwise": "canvas, not LosslessUnmask"}
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
        slot: {public: named_part(entry.target) for public, (_, entry) in classes(slot).items()}
        for slot in METHODS
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


TABLES: dict[str, Callable[[Reports], Iterator[Block]]] = {  # by the name in the mark
    "capabilities": capabilities_table,
    "jacobi": partial(policy_tables, policies=("autoregressive", "jacobi")),
    "speculative-jacobi": partial(policy_tables, policies=("sjd", "mc-sjd", "gumbel-sjd")),
    "speculative": partial(policy_tables, policies=("autoregressive", "prompt-lookup")),
    "grouped-speculative": partial(policy_tables, policies=("gsd",)),
    "first-screen": FIRST_SCREEN,
    "baselines": baseline_tables,
    "canvas": canvas_tables,
    "choosing": choosing_table,
    "visual-tokens": visual_tokens_tables,
    "cache": cache_tables,
    "long-context": LONG_CONTEXT,
    "text-drafts": TEXT_DRAFTS,
    "text-trees": text_tree_tables,
    "voices-speed": media_table("voices"),
    "voices-depth-speed": media_table("voices-depth"),
    "moving-scenes-speed": media_table("moving-scenes"),
    "gpu-figures": figure_table,
    "gpu-kernels": partial(gpu_tables, key="timings"),
    **{f"gpu-{key}": partial(gpu_tables, key=key) for key in list(_GPU)[1:]},
    "methods": methods_table,
    "layers": layers_table,
    "drafts": drafts_table,
    "reducers": reducers_table,
    "layer-support": LAYER_SUPPORT,
    "compatibility": compatibility_tables,
    "sizes": lambda _: iter([Block(make_table(read_budget()))]),
}
