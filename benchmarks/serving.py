"""What the server gains by continuous batching, and what it adds to a request.

    python benchmarks/serving.py --json benchmarks/results/scenes-cpu-serving.json

- throughput: the same captions (caption k has seed k) asked for one by one, and by `--clients`
  clients at once, in turn. The images of both have to be the same bytes, or the script stops.
- added: seconds of a request whose image needs no decoding: a model stands in whose image is ready,
  so that what is left is HTTP, checks, queue, both threads, the PNG file and base64. The PNG file
  alone is timed too.

Client and server are one process, so that the client's work counts against the server. Forward
passes are counted at the model; they do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from mmaccel.batch.worker import Setup
from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions
from mmaccel.outputs.machine import describe_machine
from mmaccel.outputs.whole_files import write_whole
from mmaccel.pipelines.text_to_image.outputs import Request, RequestOutput
from mmaccel.serving.engine import Run
from mmaccel.serving.images import ImageBackend
from mmaccel.serving.server import Server
from mmaccel.serving.service import Service
from mmaccel.serving.settings import ServerSettings


class Ready(ImageBackend):
    """The model with an image that is ready; it decodes nothing."""

    made: RequestOutput

    def run(self, run: Run, rows: int) -> None:
        """Hand the image to every job."""
        jobs = list(run.jobs)
        while jobs:
            for job in jobs:
                planned = job.item
                request = Request(planned.item.row.prompt, planned.item.seed, job)
                made = RequestOutput(request, self.made.image, self.made.tokens, 1)
                run.finish(job, made)
            jobs = run.arrivals(rows)


class Served:
    """A server in a thread."""

    def __init__(self, backend: ImageBackend, rows: int) -> None:
        settings = ServerSettings(name="scenes", port=0, rows=rows, queue=4096)
        self.service = Service(settings, backend)
        self.server = Server(self.service)
        self.service.engine.start()
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self._local = threading.local()

    def ask(self, caption: str, seed: int) -> str:
        """The image of a caption, in base64, over a connection of this thread."""
        if not hasattr(self._local, "connection"):
            port = self.server.port
            self._local.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        body = json.dumps({"prompt": caption, "seed": seed})
        headers = {"content-type": "application/json"}
        self._local.connection.request("POST", "/v1/images/generations", body, headers)
        answer = json.loads(self._local.connection.getresponse().read())
        image: str = answer["data"][0]["b64_json"]
        return image

    def close(self) -> None:
        """Drain."""
        self.server.drain()
        self._thread.join()
        self.service.engine.close()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and its result."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def measure_throughput(
    backend: ImageBackend, captions: Sequence[str], clients: int, repeat: int
) -> dict[str, Any]:
    """Seconds and forward passes of all captions, one by one and by several clients."""
    passes = [0]

    def count(*_: Any) -> None:
        passes[0] += 1

    model: Any = backend.pipe.model
    hook = model.model.register_forward_pre_hook(count)
    served = Served(backend, clients)
    seconds: dict[str, list[float]] = {"one by one": [], "together": []}
    counted, images = dict.fromkeys(seconds, 0), {}
    pool = ThreadPoolExecutor(clients)
    ways: dict[str, Callable[[], list[str]]] = {
        "one by one": lambda: [served.ask(text, k) for k, text in enumerate(captions)],
        "together": lambda: list(pool.map(served.ask, captions, range(len(captions)))),
    }
    for turn in range(repeat):
        for way in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            passes[0] = 0
            spent, made = timed(ways[way])
            seconds[way].append(spent)
            counted[way] = passes[0]
            if images.setdefault("", made) != made:
                raise SystemExit(f"{way}: the images are not the same")
            print(way, f"{spent:.2f} s,", passes[0], "passes", file=sys.stderr)
    served.close()
    hook.remove()
    pool.shutdown()
    best = {way: min(own) for way, own in seconds.items()}
    return {
        "images": len(captions),
        "clients": clients,
        "seconds": seconds,
        "passes": counted,
        "images_per_second": {way: len(captions) / own for way, own in best.items()},
        "speed_up": best["one by one"] / best["together"],
    }


def measure_added(backend: ImageBackend, caption: str, requests: int) -> dict[str, Any]:
    """Milliseconds that the server adds to a request, and those of the PNG file among them."""
    made: list[RequestOutput] = []
    backend.pipe.serve(
        [Request(caption, 0)], backend.pipe.image_model.params, deliver=made.append, rows=1
    )
    backend.__class__ = Ready
    assert isinstance(backend, Ready)
    backend.made = made[0]
    served, own = Served(backend, 16), backend.to_bytes
    files: list[float] = []

    def to_bytes(*arguments: Any) -> bytes:
        spent, data = timed(lambda: own(*arguments))
        files.append(spent)
        return bytes(data)

    backend.to_bytes = to_bytes  # type: ignore[method-assign]
    for k in range(20):
        served.ask(caption, k)
    files.clear()
    seconds = [timed(lambda: served.ask(caption, 0))[0] for _ in range(requests)]
    served.close()
    cuts = statistics.quantiles(seconds, n=100)
    return {
        "requests": requests,
        "milliseconds_median": 1000 * statistics.median(seconds),
        "milliseconds_99": 1000 * cuts[98],
        "png_milliseconds_median": 1000 * statistics.median(files),
    }


def main() -> None:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="scenes")
    parser.add_argument("--count", type=int, default=64, help="fresh captions")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--requests", type=int, default=500, help="of what the server adds")
    parser.add_argument("--json", type=Path, help="write the report here")
    options = parser.parse_args()
    captions = make_captions(EVALUATION_SEED, range(options.count))
    backend = ImageBackend(Setup(options.model, Path()))
    backend.warm_up()
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine("cpu"),
        "model": options.model,
        "dtype": "float32",
        "throughput": measure_throughput(backend, captions, options.clients, options.repeat),
        "added": measure_added(backend, captions[0], options.requests),
    }
    print(text := json.dumps(report, indent=1) + "\n")
    if options.json is not None:
        write_whole(options.json, lambda path: path.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    main()
