"""What prompts in chunks change for a server when long prompts arrive: seconds between tokens.

    python benchmarks/serving_prefill.py --json benchmarks/results/llama-cpu-serving-prefill.json

A Llama of random weights behind the server's decoding thread and its queue. Clients ask again as
soon as they are answered; every third prompt is long, and answers are of many lengths, so that rows
end and join at different times. All sizes of chunks get the same requests and have to make the same
tokens, or the script stops; rounds are run in turn.

- between tokens: seconds from a row's token to its next one, as the row's client sees them. A pass
  that gives several tokens counts once;
- first token: seconds from a request's arrival to its first token;
- throughput: tokens of all answers by the seconds of the round;
- counted at the model: passes, and the most prompt tokens that one pass has processed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from mmaccel import Autoregressive, CausalLMWindow, Jacobi, Noise, PrefixTree, SamplingParams
from mmaccel.contracts import Arrivals, ContinuousBatching, FinishedRow, Pass, Policy, Prompt
from mmaccel.outputs.machine import describe_machine
from mmaccel.outputs.whole_files import write_whole
from mmaccel.results import Progress
from mmaccel.serving.engine import Engine, Run
from mmaccel.serving.jobs import Event, Job, JobQueue
from mmaccel.serving.metrics import Metrics

_VOCAB = 2048


@dataclass
class Asked:
    """One request.

    Attributes:
        number: of the request, its seed.
        ids: `[T]` int64, its prompt.
        n_wanted: tokens of the answer.
        tokens: of the answer.
        times: when it arrived, and when each pass gave it tokens.
    """

    number: int
    ids: Tensor
    n_wanted: int
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


@dataclass
class Client:
    """Asks one request after another; it is the ticket of its own jobs.

    Attributes:
        client: its number.
        queue: of the server.
        requests: shared by all clients, the next one last.
        is_done: set when nothing is left to ask.
    """

    client: int
    queue: JobQueue
    requests: list[Asked]
    is_done: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        """Put the next request into the queue."""
        try:
            asked = self.requests.pop()
        except IndexError:
            self.is_done.set()
            return
        asked.times.append(time.perf_counter())
        self.queue.put([Job(asked, "text", len(asked.ids), self)])  # type: ignore[arg-type]

    def put(self, event: Event) -> None:
        """Called by the decoding thread when an answer is there."""
        if event.kind == "failed":
            raise SystemExit(f"a request failed: {event.value}")
        self.ask()


class Counted(CausalLMWindow):
    """Counts passes, and the most prompt tokens of one."""

    n_passes = 0
    n_most = 0

    def prefill(self, entries: Pass) -> None:
        self.n_passes += 1
        self.n_most = max(self.n_most, entries.tokens.numel())
        super().prefill(entries)

    def forward(self, entries: Pass) -> Tensor:
        self.n_passes += 1
        return super().forward(entries)


@dataclass
class TextBackend:
    """A causal LM behind the server's decoding thread.

    Attributes:
        window: the model.
        policy: decodes.
        length: tokens of an answer.
        prefix_tree: see `mmaccel.serving.engine.Backend`.
    """

    window: Counted
    policy: Policy
    length: int
    prefix_tree: PrefixTree | None = None

    def run(self, run: Run, rows: int) -> None:
        """See `mmaccel.serving.engine.Backend.run`."""
        answered: dict[int, Asked] = {}

        def join(jobs: Sequence[Job], width: int) -> tuple[Prompt, Noise]:
            items: list[Asked] = [job.item for job in jobs]
            answered.update(zip(range(len(answered), len(answered) + len(items)), items))
            tokens = torch.zeros(len(items), width, dtype=torch.int64)
            for row, item in enumerate(items):
                tokens[row, : len(item.ids)] = item.ids
            lengths = torch.tensor([len(item.ids) for item in items])
            seeds = [item.number for item in items]
            return Prompt(tokens, lengths), Noise.from_seed(seeds, len(seeds))

        def arrivals(most: int) -> Arrivals | None:
            jobs = run.arrivals(most)
            return Arrivals(*join(jobs, run.width)) if jobs else None

        def on_step(progress: Progress) -> Tensor | None:
            now = time.perf_counter()
            gained = (progress.lengths - progress.previous).tolist()
            for row, n_new in zip(progress.rows, gained):
                if n_new:
                    answered[row].times.append(now)
            limits = [answered[row].n_wanted for row in progress.rows]
            ends = progress.lengths.new_tensor(limits)
            cut = run.step(progress)
            return ends if cut is None else torch.minimum(ends, cut)

        def on_finish(row: FinishedRow) -> None:
            job = run.running[row.row]
            job.item.tokens = row.tokens.tolist()
            run.finish(job, None, len(row.tokens), row.passes)

        prompt, noise = join(run.jobs, run.width)
        batching = ContinuousBatching(rows, on_finish, arrivals)
        prompt = Prompt(prompt.tokens, prompt.lengths, batching=batching)
        with torch.no_grad():
            self.policy.sample(
                self.window,
                prompt,
                self.length,
                params=SamplingParams(),
                noise=noise,
                on_step=on_step,
            )

    def render_partial(self, job: Job, tokens: Tensor, is_known: Tensor) -> Any:
        """Nobody asks for unfinished answers."""


def build_model(hidden: int, layers: int, positions: int) -> Any:
    """A Llama of random weights."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=positions,
        initializer_range=0.05,
    )
    return hf.LlamaForCausalLM(config).eval()


def make_requests(options: argparse.Namespace) -> list[Asked]:
    """The requests, the first one last."""
    random = torch.Generator().manual_seed(1)
    made = []
    for number in range(options.requests):
        low, high = options.short, options.short + 1
        if number % options.long_every == options.long_every - 1:
            low, high = options.long_from, options.long_to + 1
        n = int(torch.randint(low, high, (), generator=random))
        ids = torch.randint(0, _VOCAB, (n,), generator=random)
        wanted = torch.randint(options.tokens // 2, options.tokens + 1, (), generator=random)
        made.append(Asked(number, ids, int(wanted)))
    return made[::-1]


def measure(
    backend: TextBackend, size: int | None, options: argparse.Namespace
) -> tuple[dict[str, Any], list[list[int]]]:
    """One round with one size of chunks: figures, and the tokens of all answers."""
    window = backend.window
    window.prefill_chunk_size = size
    window.n_passes = window.n_most = 0
    requests = make_requests(options)
    asked = requests[::-1]
    queue = JobQueue(4 * options.rows)
    engine = Engine(backend, queue, Metrics(lambda: len(queue)), options.rows)
    engine.widest = options.long_to  # so that every prompt has room in the first run
    clients = [Client(k, queue, requests) for k in range(options.clients)]
    began = time.perf_counter()
    for client in clients:
        client.ask()
    engine.start()
    for client in clients:
        client.is_done.wait()
    queue.close()
    engine.has_stopped.wait()
    seconds = time.perf_counter() - began
    gaps = [b - a for each in asked for a, b in zip(each.times[1:], each.times[2:])]
    first = [each.times[1] - each.times[0] for each in asked]
    n_tokens = sum(len(each.tokens) for each in asked)
    figures = {
        "seconds": seconds,
        "tokens_per_second": n_tokens / seconds,
        "between_tokens": _describe(gaps),
        "first_token": _describe(first),
        "passes": window.n_passes,
        "most_prompt_tokens_of_a_pass": window.n_most,
    }
    return figures, [each.tokens for each in asked]


def _describe(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds at the median, the 90th and the 99th hundredth, and the most."""
    cuts = statistics.quantiles(seconds, n=100)
    named = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "most": max(seconds)}
    return {name: 1000 * value for name, value in named.items()}


def summarize(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over rounds, and each size beside whole prompts."""
    found: dict[str, Any] = {}
    for name, own in rounds.items():
        found[name] = {
            "tokens_per_second": statistics.median(each["tokens_per_second"] for each in own),
            "between_tokens_p99": statistics.median(each["between_tokens"]["p99"] for each in own),
            "first_token_p50": statistics.median(each["first_token"]["p50"] for each in own),
            "passes": own[0]["passes"],
            "most_prompt_tokens_of_a_pass": own[0]["most_prompt_tokens_of_a_pass"],
        }
    whole = found["whole"]
    for own in found.values():
        own["p99_of_whole_to_own"] = whole["between_tokens_p99"] / own["between_tokens_p99"]
        own["throughput_to_whole"] = own["tokens_per_second"] / whole["tokens_per_second"]
    return found


def main() -> None:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--long-every", type=int, default=3, help="every so many prompts")
    parser.add_argument("--long-from", type=int, default=2048)
    parser.add_argument("--long-to", type=int, default=4096)
    parser.add_argument("--short", type=int, default=64, help="tokens of the other prompts")
    parser.add_argument(
        "--tokens", type=int, default=96, help="of the longest answer; half at least"
    )
    parser.add_argument("--rows", type=int, default=8, help="decoded at a time")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--sizes", default="128,256,512", help="of chunks, with commas")
    parser.add_argument("--window", type=int, default=1, help="1 is Autoregressive, else Jacobi")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the report here")
    options = parser.parse_args()
    policy = Autoregressive() if options.window == 1 else Jacobi(options.window)
    positions = options.long_to + options.tokens + 64
    window = Counted(build_model(options.hidden, options.layers, positions))
    backend = TextBackend(window, policy, options.tokens)
    sizes: dict[str, int | None] = {"whole": None}
    sizes |= {text: int(text) for text in options.sizes.split(",")}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sizes}
    wanted: list[list[int]] = []
    order = list(sizes)
    for turn in range(options.repeat):
        shift = turn % len(order)
        for name in order[shift:] + order[:shift]:
            figures, made = measure(backend, sizes[name], options)
            if (wanted := wanted or made) != made:
                raise SystemExit(f"chunks of {name}: the tokens are not the same")
            rounds[name].append(figures)
            shown = {k: round(v, 1) for k, v in figures["between_tokens"].items()}
            print(name, f"{figures['tokens_per_second']:.1f} tokens/s,", shown, file=sys.stderr)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine("cpu"),
        "model": f"a Llama of {options.layers} layers of {options.hidden}, random weights",
        "policy": repr(policy),
        "dtype": "float32",
        "summary": summarize(rounds),
        "rounds": rounds,
    }
    print(text := json.dumps(report, indent=1) + "\n")
    if options.json is not None:
        write_whole(options.json, lambda path: path.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    main()
