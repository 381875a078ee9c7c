"""What the server gains by continuous batching: images asked for one by one, and by many clients.

    python -m benchmarks.serving --json benchmarks/results/scenes-cpu-serving.json

The same captions (caption k has seed k) are asked of one `mmaccel serve` over HTTP, in turn. The
images of both have to be the same bytes, or the script stops.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from benchmarks.rows import read_arguments, write_measured
from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions
from mmaccel.evaluation.measure import Case, measure, summarise


@contextmanager
def serving(model: str, rows: int, threads: int) -> Iterator[int]:
    """The port of a server of a model that decodes so many rows at a time."""
    command = [sys.executable, "-m", "mmaccel.cli", "serve", "--model", model, "--port", "0"]
    command += ["--batch-size", str(rows), "--queue", "4096", "--threads", str(threads)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            found = next(filter(None, (re.search(r"http://[^:]+:(\d+)", x) for x in server.stderr)))
            threading.Thread(target=server.stderr.read, daemon=True).start()  # its log
            yield int(found[1])
        finally:
            server.terminate()


def ask(port: int, caption: str, seed: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"content-type": "application/json"}
    body = json.dumps({"prompt": caption, "seed": seed})
    connection.request("POST", "/v1/images/generations", body, headers)
    answer = json.loads(connection.getresponse().read())
    image: str = answer["data"][0]["b64_json"]
    return image


def ask_all(port: int, captions: Sequence[str], clients: int) -> dict[str, Any]:
    """All captions' images, by so many clients at once."""
    with ThreadPoolExecutor(clients) as pool:
        asked = pool.map(ask, [port] * len(captions), captions, range(len(captions)))
        return {"images": list(asked)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="scenes")
    parser.add_argument("--count", type=int, default=64, help="fresh captions")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    given = read_arguments(parser)
    captions = make_captions(EVALUATION_SEED, range(given.count))
    with serving(given.model, given.clients, given.threads) as port:
        cases = [
            Case(name, lambda _, clients=clients: ask_all(port, captions, clients))
            for name, clients in (("one by one", 1), ("together", given.clients))
        ]
        runs = list(measure(cases, given.repeat))
    if any(run["images"] != runs[0]["images"] for run in runs):
        raise SystemExit("the images are not the same")
    rows = [
        {
            "way": row["side"],
            "seconds": row["seconds"]["median"],
            "images_per_second": given.count / row["seconds"]["median"],
            "times": row["speed_up"],
        }
        for row in summarise(runs)
    ]
    print(*rows, sep="\n")
    facts = {"model": given.model, "images": given.count, "clients": given.clients}
    write_measured(given.json, **facts, serving=rows)


if __name__ == "__main__":
    main()
