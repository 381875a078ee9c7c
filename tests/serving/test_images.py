"""`/v1/images/generations`: OpenAI's shapes, and images that depend on their own request alone."""

from __future__ import annotations

import base64
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from mmaccel.cli import main
from mmaccel.options import LoadOptions
from mmaccel.samplers.prefix_tree import PrefixTree
from mmaccel.serving import engine
from mmaccel.serving.images import ImageBackend, make_setup
from tests.fixtures.tiny_model import CAPTIONS
from tests.serving.conftest import Start, run_server
from tests.serving.running import IMAGES, RED, Running, files, wait_until


def test_the_official_client(server: Running) -> None:
    client = server.openai()
    made = client.images.generate(
        model="tiny", prompt=RED, n=2, size="16x16", quality="auto", extra_body={"seed": 7}
    )
    assert made.data is not None and len(made.data) == 2 and made.size == "16x16"
    assert [each.seed for each in made.data] == [7, 8]  # type: ignore[attr-defined]
    assert made.output_format == "png" and made.background == "opaque"
    assert made.usage is not None and made.usage.output_tokens == 32
    assert made.usage.total_tokens == 32 + made.usage.input_tokens
    for data in files(made):
        with Image.open(io.BytesIO(data)) as image:
            assert (image.format, image.size) == ("PNG", (16, 16))
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "mmaccel"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-image-1")
    free, other = (client.images.generate(prompt=RED) for _ in range(2))  # without a seed
    assert files(free) != files(other)
    assert server.draw(seed=free.data[0].seed) == files(free)  # type: ignore[attr-defined, index]


def test_curl(server: Running) -> None:
    """The command of docs/serving.md."""
    body = json.dumps({"prompt": RED, "seed": 7})
    command = ["curl", "-sS", f"{server.url}{IMAGES}", "-d", body]
    command += ["-H", "content-type: application/json"]
    ran = subprocess.run(command, capture_output=True, check=True, timeout=30)
    found = base64.b64decode(json.loads(ran.stdout)["data"][0]["b64_json"])
    assert [found] == server.draw(seed=7)


def test_files_are_those_of_the_command_line(
    server: Running, tiny_folder: Path, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": RED, "seed": 7, "n": 2},
        {"prompt": CAPTIONS[1], "seed": 2**63 + 5},
        {"prompt": CAPTIONS[1], "seed": 2**64 - 3, "size": "16x16"},
        {"prompt": RED, "seed": 7, "negative_prompt": "blue square"},
    ]
    file, out = tmp_path / "p.jsonl", tmp_path / "out"
    file.write_text("\n".join(map(json.dumps, rows)))
    command = ["generate", "--model", str(tiny_folder), "--prompts", str(file), "--out", str(out)]
    assert main(command) == 0
    notes = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    wanted = sorted((out / note["file"]).read_bytes() for note in notes)
    made = [data for row in rows for data in server.draw(**row)]
    assert sorted(made) == wanted and len(set(made)) == 5


def test_a_seed_gives_the_same_bytes_in_company(server: Running) -> None:
    asked = [(CAPTIONS[k % 3], 40 + k) for k in range(6)]
    alone = [server.draw(prompt, seed=seed)[0] for prompt, seed in asked]
    with server.gate(is_closed=True) as gate:
        together = [server.later(prompt, seed=seed) for prompt, seed in asked]
        wait_until(lambda: len(server.service.queue) + gate.passes >= 2)
        gate.open()
        assert [files(each.result())[0] for each in together] == alone
        assert max(gate.rows) > 2
    assert len(set(alone)) == 6


def test_prompts_in_chunks_give_the_same_bytes(server: Running, tiny_folder: Path) -> None:
    asked = [(CAPTIONS[k % 3], 40 + k) for k in range(5)]
    alone = [server.draw(prompt, seed=seed)[0] for prompt, seed in asked]
    load = LoadOptions(device="cpu", dtype="float32", prefill_chunk_size=2)
    backend = ImageBackend(make_setup(str(tiny_folder), load=load))
    assert backend.pipe.engine.prefill_chunk_size == 2
    with run_server(images=backend) as chunked:
        together = [chunked.later(prompt, seed=seed) for prompt, seed in asked]
        assert [files(each.result())[0] for each in together] == alone


def test_prompts_that_are_kept_give_the_same_bytes(server: Running, tiny_folder: Path) -> None:
    """Requests that begin alike process their prompt once, in a later run, too; it is counted."""
    asked = [(CAPTIONS[k % 2], 40 + k) for k in range(6)]
    alone = [server.draw(prompt, seed=seed)[0] for prompt, seed in asked]
    name = "mmaccel_prefix_tokens_total"
    tree = PrefixTree(1000, chunk_size=2, least=1)
    backend = ImageBackend(make_setup(str(tiny_folder)), prefix_tree=tree)
    with run_server(images=backend) as keeping:
        together = [keeping.later(prompt, seed=seed) for prompt, seed in asked]
        assert [files(each.result())[0] for each in together] == alone
        n_read = keeping.metric(name)
        assert n_read > 0
        again = keeping.post(asked[0][0], seed=asked[0][1])  # in a run of its own
        assert files(again) == alone[:1]
        n_prompt = again.json()["usage"]["input_tokens"]
        assert keeping.metric(name) - n_read >= n_prompt - 1 > 1
    assert server.metric(name) == 0


def test_a_request_joins_the_running_batch(server: Running) -> None:
    """Passes are counted: together they are fewer than one after the other."""
    with server.gate() as gate:
        first = server.draw(seed=1)
        n_first = gate.passes
        second = server.draw(CAPTIONS[1], seed=2)
        n_second = gate.passes - n_first
        assert min(n_first, n_second) > 3
        gate.rows.clear()
        gate.close()
        one = server.later(seed=1)
        gate.wait_for(1)
        gate.permit(2)
        gate.wait_for(3)
        other = server.later(CAPTIONS[1], seed=2)  # its prompt is longer than that of the first
        server.wait_for(1)
        gate.open()
        assert files(one.result()) == first and files(other.result()) == second
        assert gate.passes < n_first + n_second
        rows = gate.rows
        assert rows[:3] == [2, 2, 2] and max(rows) == 4  # with guidance a row is two
        assert rows[-1] == 2


def test_a_prompt_without_room_waits_for_the_next_run(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And from then on there is room for it."""
    monkeypatch.setattr(engine, "_WIDTHS", 1)
    for seed, rows in ((1, {2}), (2, {2, 4})):
        with server.gate(is_closed=True) as gate:
            one = server.later("red", seed=seed)
            gate.wait_for(1)
            other = server.later(CAPTIONS[1], seed=seed)
            server.wait_for(1)
            gate.open()
            assert len(files(one.result()) + files(other.result())) == 2
            assert set(gate.rows) == rows


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_output_formats(server: Running, kind: str) -> None:
    answer = server.post(seed=1, size="auto", output_format=kind, output_compression=80)
    with Image.open(io.BytesIO(files(answer)[0])) as image:
        assert image.format == kind.upper() and image.size == (16, 16)
    assert answer.json()["output_format"] == kind


def test_partial_images_are_streamed(server: Running) -> None:
    client, wanted = server.openai(), server.draw(seed=3)[0]

    def stream(partial_images: int) -> list[Any]:
        return list(
            client.images.generate(
                model="tiny",
                prompt=RED,
                stream=True,
                partial_images=partial_images,
                extra_body={"seed": 3},
            )
        )

    *partial, last = stream(3)
    assert [event.type for event in partial] == ["image_generation.partial_image"] * len(partial)
    assert [event.partial_image_index for event in partial] == [*range(len(partial))]
    assert 1 <= len(partial) <= 3 and last.type == "image_generation.completed"
    assert base64.b64decode(last.b64_json) == wanted and last.usage.output_tokens == 16
    shown = [base64.b64decode(event.b64_json) for event in partial]
    for data in shown:
        with Image.open(io.BytesIO(data)) as image:
            assert image.size == (16, 16) == (int(last.size[:2]), int(last.size[3:]))
    with Image.open(io.BytesIO(shown[-1])) as unfinished, Image.open(io.BytesIO(wanted)) as whole:
        assert unfinished.tobytes() != whole.tobytes()
    assert [event.type for event in stream(0)] == ["image_generation.completed"]


def test_metrics(start: Start) -> None:
    server = start(rows=2)
    requests = f'mmaccel_requests_total{{route="{IMAGES}",status='
    with server.gate(is_closed=True) as gate:
        asked = [server.later(seed=0)]
        gate.wait_for(1)
        asked += [server.later(seed=k) for k in range(1, 5)]
        wait_until(lambda: server.metric("mmaccel_queue_rows") == 4)
        gate.permit(1)
        wait_until(lambda: server.metric("mmaccel_queue_rows") == 3)
        assert server.metric("mmaccel_running_rows") <= 2
        gate.open()
        assert all(each.result().status_code == 200 for each in asked)
        server.post(n=0)
        passes = gate.passes
    for name, value in {
        "mmaccel_passes_total": passes,
        "mmaccel_tokens_total": 5 * 16,
        'mmaccel_rows_total{end="done"}': 5,
        "mmaccel_tokens_per_pass_count": 5,
        f'{requests}"200"': 5,
        f'{requests}"400"': 1,
        "mmaccel_queue_rows": 0,
        "mmaccel_running_rows": 0,
        f'mmaccel_request_seconds_count{{route="{IMAGES}"}}': 6,
        "mmaccel_queue_seconds_count": 5,
    }.items():
        assert server.metric(name) == value, name
    assert server.metric("mmaccel_row_passes_total") >= passes
