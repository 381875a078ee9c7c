"""What a policy costs when it is attached to a transformers model: three ways to the same images.

    python benchmarks/routes.py --count 40 --json benchmarks/results/scenes-cpu-routes.json

- library: the model's own `generate`, nothing attached;
- transformers: the same call with a policy attached;
- direct: `mmaccel.TextToImage`, which computes the image ids of the head alone.

All run on the same captions, interleaved, the order turning from batch to batch. Seconds are those
of the tokens: attaching is in them, pixels are not. Ctrl-C keeps what every way has finished.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import typer

from benchmarks.route_runs import FORWARDS, Piece, Routes, Way, make_ways, summarize
from mmaccel.commands.files import open_folder
from mmaccel.commands.options import check_count
from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions
from mmaccel.errors import MMAccelError, OptionError
from mmaccel.options import read_text
from mmaccel.outputs.machine import describe_machine
from mmaccel.outputs.whole_files import write_whole


def main(
    json_file: Annotated[Path, typer.Option("--json", help="write the results here")],
    model: Annotated[str, typer.Option(help="demo model or folder")] = "scenes",
    count: Annotated[int, typer.Option(help="number of fresh captions")] = 40,
    batch_sizes: Annotated[str, typer.Option(help="with commas")] = "1,8",
    guidance: Annotated[str, typer.Option(help="scales with commas")] = "1.0,2.0",
    windows: Annotated[str, typer.Option(help="of Jacobi, with commas")] = "16,32,adaptive",
    drafts: Annotated[str, typer.Option(help="of Jacobi")] = "neighbour",
    forwards: Annotated[str, typer.Option(help=f"of {', '.join(FORWARDS)}; with commas")] = "auto",
    compiled_library: Annotated[
        bool, typer.Option("--compiled-library", help="also generate with a compiled pass")
    ] = False,
) -> None:
    """Measures and writes the report, whole or not at all."""
    try:
        check_count("count", count, 1000)
        sizes = _numbers("batch-sizes", batch_sizes, int)
        for size in sizes:
            check_count("batch-sizes", size, 64)
        unknown = [name for name in forwards.split(",") if name not in FORWARDS]
        if unknown:
            raise OptionError(
                f"--forwards: expected some of {', '.join(FORWARDS)}, received {unknown[0]!r}; "
                "write for example model,compiled"
            )
        ways = make_ways(
            sizes,
            _numbers("guidance", guidance, float),
            [read_text("--windows", width, int | str) for width in windows.split(",")],
            drafts,
            forwards.split(","),
            compiled_library,
        )
        open_folder(json_file.parent, "--json")
        routes = Routes(model)
    except MMAccelError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    captions = make_captions(EVALUATION_SEED, range(count))
    rows = summarize(measure(routes, ways, captions))
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine("cpu"),
        "model": model,
        "captions": captions[: max((row["images"] for row in rows), default=0)],
        "temperature": 1.0,
        "dtype": "float32",
        "routes": rows,
    }
    text = json.dumps(report, indent=1) + "\n"
    print(text)
    if rows:
        write_whole(json_file, lambda path: path.write_text(text, encoding="utf-8"))


def _numbers(name: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    refusal = f"--{name}: expected numbers with commas, received {text!r}; write for example 1,2"
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(refusal) from error
    if not all(isfinite(number) for number in numbers):
        raise OptionError(refusal)
    return numbers


def measure(routes: Routes, ways: Sequence[Way], captions: Sequence[str]) -> dict[Way, list[Piece]]:
    """Every way on every caption (caption k has seed k), in chunks of the largest batch, so that
    all batch sizes see the machine at the same hours; ends early at Ctrl-C.
    """
    made: dict[Way, list[Piece]] = {way: [] for way in ways}
    sizes, turn = list(dict.fromkeys(way.batch_size for way in ways)), 0
    try:
        whole, routes.length = routes.length, min(8, routes.length)
        for way in ways:  # the first pass of a shape pays for allocations
            part = captions[: way.batch_size]
            routes.run(way, part, list(range(len(part))))
        routes.length = whole
        for chunk in range(0, len(captions), max(sizes)):
            end = min(chunk + max(sizes), len(captions))
            for size in sizes:
                cells = [way for way in ways if way.batch_size == size]
                for first in range(chunk, end, size):
                    seeds = range(first, min(first + size, end))
                    at, turn = turn % len(cells), turn + 1
                    for way in cells[at:] + cells[:at]:
                        part = [captions[k] for k in seeds]
                        made[way].append(routes.run(way, part, list(seeds)))
            print(f"{end} of {len(captions)} captions", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped; what every way has finished is kept", file=sys.stderr)
    return made


if __name__ == "__main__":
    typer.run(main)
