"""How long the gallery of many images takes to open in Chromium.

    python benchmarks/gallery.py --images 10000 --json benchmarks/results/gallery-cpu.json

Images are a few, written again under many names. The time is the browser's own, from
the navigation to the first frame after the load event; the page is opened anew each time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from mmaccel.batch.gallery import draw_page, read_side
from mmaccel.batch.manifest import sha256_of, to_line
from mmaccel.cli import main as generate
from mmaccel.outputs.machine import describe_machine
from mmaccel.outputs.whole_files import write_whole
from tests.fixtures.browser import open_browser

_SHOWN = """
const done = arguments[arguments.length - 1];
requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now())));
"""


def multiply(source: Path, folder: Path, count: int) -> None:
    """Fill a folder with `count` images of another, each with an id of its own."""
    made, _ = read_side(source)
    with (folder / "manifest.jsonl").open("wb") as manifest:
        for k, record in enumerate(islice(cycle(made.values()), count)):
            name = f"p{k}_0_{k}.png"
            (folder / name).write_bytes((source / record["file"]).read_bytes())
            own = {"id": f"p{k}", "k": 0, "status": "ok", "file": name, "seed": k}
            sha = {"sha256": sha256_of(folder / name)}
            manifest.write(to_line({**record, **own, **sha}))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="folder of a run; by default 8 are made")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        run, profile, source = Path(home) / "run", Path(home) / "profile", options.source
        run.mkdir()
        if source is None:
            source = Path(home) / "source"
            if generate(["generate", "--out", str(source)]):
                raise SystemExit("no images were made")
        multiply(source, run, options.images)
        page = run / "gallery.html"
        page.write_text(draw_page(run, None, page), encoding="utf-8")
        browser = open_browser(profile)
        seconds = []
        for _ in range(options.runs):
            browser.get("about:blank")
            browser.get(page.as_uri())
            seconds.append(browser.execute_async_script(_SHOWN) / 1000)
        assert browser.find_element("id", "count").text.endswith(f"of {options.images}")
        version = browser.capabilities["browserVersion"]
        size = page.stat().st_size
        browser.quit()
    found: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "pictures": options.images,
        "page_bytes": size,
        "chromium": version,
        "runs": options.runs,
        "seconds_median": round(statistics.median(seconds), 3),
        "seconds_most": round(max(seconds), 3),
        "machine": describe_machine("cpu"),
    }
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        write_whole(options.json, lambda path: path.write_text(text + "\n", encoding="utf-8"))


if __name__ == "__main__":
    main()
