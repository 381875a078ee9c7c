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
from mmaccel.serving import engine
from tests.fixtures.tiny_model import CAPTIONS
from tests.serving.conftest import Start
from tests.serving.running import IMAGES, Running, wait_until

RED = CAPTIONS[0]


def files(answer: Any) -> list[bytes]:
    """The images of an answer, of httpx or of the openai client."""
    if isinstance(answer, openai.BaseModel):
        return [base64.b64decode(each.b64_json) for each in answer.data]  # type: ignore[attr-defined]
    assert answer.status_code == 200, answer.text
    return [base64.b64decode(each["b64_json"]) for each in answer.json()["data"]]


def draw(server: Running, prompt: str = RED, **fields: Any) -> list[bytes]:
    return files(server.post(prompt, **fields))


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


def test_curl(server: Running, tmp_path: Path) -> None:
    """The command of docs/serving.md."""
    body = json.dumps({"prompt": RED, "seed": 7})
    command = ["curl", "-sS", f"{server.url}{IMAGES}", "-d", body]
    command += ["-H", "content-type: application/json"]
    ran = subprocess.run(command, capture_output=True, check=True, timeout=30)
    found = base64.b64decode(json.loads(ran.stdout)["data"][0]["b64_json"])
    assert [found] == draw(server, seed=7)


def test_files_are_those_of_the_command_line(
    server: Running, tiny_folder: Path, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": RED, "seed": 7, "n": 2},
        {"prompt": CAPTIONS[1], "seed": 2**63 + 5},
        {"prompt": CAPTIONS[1], "seed": -3, "size": "16x16"},
        {"prompt": RED, "seed": 7, "negative": "blue square"},
    ]
    file, out = tmp_path / "p.jsonl", tmp_path / "out"
    file.write_text("\n".join(map(json.dumps, rows)))
    command = ["generate", "--model", str(tiny_folder), "--prompts", str(file), "--out", str(out)]
    assert main(command) == 0
    notes = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    wanted = sorted((out / note["file"]).read_bytes() for note in notes)
    made = []
    for row in rows:
        row = {"n": 1, **row}
        if "negative" in row:
            row["negative_prompt"] = row.pop("negative")
        made += draw(server, row.pop("prompt"), **row)
    assert sorted(made) == wanted and len(set(made)) == 5


def test_a_seed_gives_the_same_bytes_in_company(server: Running) -> None:
    asked = [(CAPTIONS[k % 3], 40 + k) for k in range(9)]
    alone = [draw(server, prompt, seed=seed)[0] for prompt, seed in asked]
    with server.gate() as gate:
        gate.close()
        together = [server.later(prompt, seed=seed) for prompt, seed in asked]
        wait_until(lambda: len(server.service.queue) + gate.passes >= 2)
        gate.open()
        assert [files(each.result())[0] for each in together] == alone
        assert max(gate.rows) > 2
    assert len(set(alone)) == 9


def test_without_a_seed_images_differ_and_say_theirs(server: Running) -> None:
    first, second = (server.post(RED).json()["data"][0] for _ in range(2))
    assert first["seed"] != second["seed"] and first["b64_json"] != second["b64_json"]
    again = draw(server, seed=first["seed"])[0]
    assert base64.b64encode(again).decode() == first["b64_json"]


def test_a_request_joins_the_running_batch(server: Running) -> None:
    """Passes are counted: together they are fewer than one after the other."""
    with server.gate() as gate:
        first = draw(server, seed=1)
        n_first = gate.passes
        second = draw(server, CAPTIONS[1], seed=2)
        n_second = gate.passes - n_first
        assert min(n_first, n_second) > 3
        gate.rows.clear()
        gate.close()
        one = server.later(RED, seed=1)
        wait_until(lambda: gate.passes == 1)
        gate.permit(2)
        wait_until(lambda: gate.passes == 3)
        other = server.later(CAPTIONS[1], seed=2)  # its prompt is longer than that of the first
        wait_until(lambda: len(server.service.queue) == 1)
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

    def passes(seed: int) -> set[int]:
        with server.gate() as gate:
            gate.close()
            one = server.later("red", seed=seed)
            wait_until(lambda: gate.passes == 1)
            other = server.later(CAPTIONS[1], seed=seed)
            wait_until(lambda: len(server.service.queue) == 1)
            gate.open()
            assert len(files(one.result()) + files(other.result())) == 2
            return set(gate.rows)

    assert passes(1) == {2}
    assert passes(2) == {2, 4}


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_output_formats(server: Running, kind: str) -> None:
    answer = server.post(RED, seed=1, output_format=kind, output_compression=80)
    with Image.open(io.BytesIO(files(answer)[0])) as image:
        assert image.format == kind.upper() and image.size == (16, 16)
    assert answer.json()["output_format"] == kind


def test_partial_images_are_streamed(server: Running) -> None:
    client, wanted = server.openai(), draw(server, seed=3)[0]
    events = list(
        client.images.generate(
            model="tiny", prompt=RED, stream=True, partial_images=3, extra_body={"seed": 3}
        )
    )
    partial, last = events[:-1], events[-1]
    assert [event.type for event in partial] == ["image_generation.partial_image"] * len(partial)
    assert [event.partial_image_index for event in partial] == [*range(len(partial))]  # type: ignore[union-attr]
    assert 1 <= len(partial) <= 3 and last.type == "image_generation.completed"
    assert base64.b64decode(last.b64_json) == wanted and last.usage.output_tokens == 16
    for event in partial:
        with Image.open(io.BytesIO(base64.b64decode(event.b64_json))) as image:
            assert image.size == (16, 16)
    # the part that is known is drawn as in the finished image
    with (
        Image.open(io.BytesIO(base64.b64decode(partial[-1].b64_json))) as shown,
        Image.open(io.BytesIO(wanted)) as whole,
    ):
        assert shown.tobytes() != whole.tobytes()
    none = client.images.generate(model="tiny", prompt=RED, stream=True, extra_body={"seed": 3})
    assert [event.type for event in none] == ["image_generation.completed"]


def test_metrics(server: Running) -> None:
    with server.gate() as gate:
        draw(server, seed=1, n=3)
        server.post(RED, n=0)
        passes = gate.passes
    assert server.metric("mmaccel_passes_total") == passes
    assert server.metric("mmaccel_tokens_total") == 3 * 16
    assert server.metric('mmaccel_rows_total{end="done"}') == 3
    assert server.metric("mmaccel_tokens_per_pass_count") == 3
    assert server.metric("mmaccel_row_passes_total") >= passes
    for status, count in (("200", 1), ("400", 1)):
        route = f'mmaccel_requests_total{{route="{IMAGES}",status="{status}"}}'
        assert server.metric(route) == count
    assert server.metric("mmaccel_queue_rows") == server.metric("mmaccel_running_rows") == 0
    assert server.metric(f'mmaccel_request_seconds_count{{route="{IMAGES}"}}') == 2
    assert server.metric("mmaccel_queue_seconds_count") == 3


def test_metrics_while_rows_run_and_wait(start: Start) -> None:
    server = start(rows=2)
    with server.gate() as gate:
        gate.close()
        asked = [server.later(RED, seed=0)]
        wait_until(lambda: gate.passes == 1)
        asked += [server.later(RED, seed=k) for k in range(1, 5)]
        wait_until(lambda: server.metric("mmaccel_queue_rows") == 4)
        gate.permit(1)
        wait_until(lambda: server.metric("mmaccel_queue_rows") == 3)
        assert server.metric("mmaccel_running_rows") <= 2
        gate.open()
        assert all(each.result().status_code == 200 for each in asked)
