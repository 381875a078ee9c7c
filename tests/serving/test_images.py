"""`/v1/images/generations`: OpenAI's shapes, and images that depend on their own request alone."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from mmaccel.batch.modalities import Images
from mmaccel.cli import main
from mmaccel.options import LoadOptions
from mmaccel.samplers.prefix_tree import PrefixTree
from mmaccel.serving.routes import ImageBody, ImageRoute
from tests.fixtures.tiny_model import CAPTIONS
from tests.serving.conftest import Start, run_server
from tests.serving.running import IMAGES, RED, Running, files


def test_the_official_client(server: Running) -> None:
    client = server.openai()
    made = client.images.generate(
        model="tiny", prompt=RED, n=2, size="16x16", quality="auto", extra_body={"seed": 7}
    )
    assert made.data is not None and made.size == "16x16"
    assert [each.seed for each in made.data] == [7, 8]  # type: ignore[attr-defined]
    assert made.output_format == "png" and made.background == "opaque"
    webp = client.images.generate(prompt=RED, output_format="webp", output_compression=80)
    with Image.open(io.BytesIO(files(webp)[0])) as image:
        assert image.format == "WEBP" and webp.output_format == "webp"
    assert made.usage is not None and made.usage.output_tokens == 32
    assert made.usage.total_tokens == 32 + made.usage.input_tokens
    for data in files(made):
        with Image.open(io.BytesIO(data)) as image:
            assert (image.format, image.size) == ("PNG", (16, 16))
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "mmaccel"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-image-1")
    for seed in ({}, {"seed": None}, {"seed": -1}):  # one is drawn
        free, other = (client.images.generate(prompt=RED, extra_body=seed) for _ in range(2))
        assert files(free) != files(other)
        drawn = free.data[0].seed  # type: ignore[attr-defined, index]
        assert 0 <= drawn < 2**32 and server.draw(seed=drawn) == files(free)


def test_nulls_and_a_slash_at_the_end_say_nothing(server: Running) -> None:
    wanted = server.draw(seed=7)
    names = (*ImageBody.model_fields.keys() - {"prompt", "seed"}, "instructions")
    assert server.draw(seed=7, **dict.fromkeys(names)) == wanted
    assert files(server.http.post(f"{IMAGES}/", json={"prompt": RED, "seed": 7})) == wanted
    assert server.http.get("/v1/models/tiny/").status_code == 200


def test_pages_of_other_origins_ask_where_they_may(start: Start) -> None:
    server = start(cors_origin="https://b.org,https://a.org", api_keys=("key",))
    for origin, status in (("https://a.org", 200), ("https://c.org", 400)):
        asked = {"origin": origin, "access-control-request-method": "POST"}
        assert server.http.options(IMAGES, headers=asked).status_code == status
    answer = server.http.post(IMAGES, headers={"origin": "https://a.org"})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == "https://a.org"


def test_files_are_those_of_the_command_line(
    server: Running, tiny_folder: Path, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": RED, "seed": 7, "n": 2},
        {"prompt": CAPTIONS[1], "seed": 2**63 + 5},
        {"prompt": CAPTIONS[1], "seed": 3, "size": "16x16"},
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


@pytest.mark.parametrize("way", ["as it is", "prompts in chunks", "prompts are kept"])
def test_a_seed_gives_the_same_bytes_in_company(
    server: Running, tiny_folder: Path, way: str
) -> None:
    """Of kept prompts, requests process what they do not share, in a later run, too."""
    asked = [(CAPTIONS[k % 3], 40 + k) for k in range(6)]
    alone = [server.draw(prompt, seed=seed)[0] for prompt, seed in asked]
    assert len(set(alone)) == 6
    size = 2 if way == "prompts in chunks" else None
    load = LoadOptions(device="cpu", dtype="float32", prefill_chunk_size=size)
    tree = PrefixTree(1000, chunk_size=2, least=1) if way == "prompts are kept" else None
    route = ImageRoute(Images(model=str(tiny_folder), load=load))
    with run_server(route) as other, other.gate(is_closed=True) as gate:
        other.engine.prefix_tree = tree
        together = [other.later(prompt, seed=seed) for prompt, seed in asked]
        gate.wait_for(1)
        gate.open()
        assert [files(each.result())[0] for each in together] == alone
        assert max(gate.rows) > 2
        read = other.metric("mmaccel_prefix_tokens_total")
        assert (read > 0) == (tree is not None)
        if tree is not None:
            again = other.post(asked[0][0], seed=asked[0][1])
            n_prompt = again.json()["usage"]["input_tokens"]
            assert files(again) == alone[:1]
            assert other.metric("mmaccel_prefix_tokens_total") - read >= n_prompt - 1 > 1


def test_a_request_joins_the_running_batch(server: Running) -> None:
    """Passes are counted: together they are fewer than one after the other."""
    with server.gate() as gate:
        first = server.draw(seed=1)
        n_first = gate.passes
        second = server.draw(CAPTIONS[1], seed=2)
        n_all = gate.passes
        assert min(n_first, n_all - n_first) > 3
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
        assert gate.passes < n_all
        assert gate.rows[:3] == [2, 2, 2] and max(gate.rows) == 4  # with guidance a row is two
        assert gate.rows[-1] == 2


def test_partial_images_are_streamed(server: Running) -> None:
    wanted = server.draw(seed=3)[0]
    asked: dict[str, Any] = {"model": "tiny", "prompt": RED, "extra_body": {"seed": 3}}
    events = server.openai().images.generate(**asked, stream=True, partial_images=3)
    *partial, last = list(events)
    assert [event.type for event in partial] == ["image_generation.partial_image"] * len(partial)
    assert [event.partial_image_index for event in partial] == [*range(len(partial))]
    assert 1 <= len(partial) <= 3 and last.type == "image_generation.completed"
    assert base64.b64decode(last.b64_json) == wanted and last.usage.output_tokens == 16
    shown = base64.b64decode(partial[-1].b64_json)
    with Image.open(io.BytesIO(shown)) as unfinished, Image.open(io.BytesIO(wanted)) as whole:
        assert unfinished.size == whole.size == (16, 16)
        assert unfinished.tobytes() != whole.tobytes()
    (event,) = server.openai().images.generate(**asked, stream=True)
    assert event.type == "image_generation.completed"


def test_metrics(start: Start) -> None:
    server = start(rows=2)
    requests = f'mmaccel_requests_total{{route="{IMAGES}",status='
    with server.gate(is_closed=True) as gate:
        asked = [server.later(seed=0)]
        gate.wait_for(1)
        asked += [server.later(seed=k) for k in range(1, 5)]
        server.wait_for(4)
        assert server.metric("mmaccel_queue_rows") == 4
        assert server.metric("mmaccel_running_rows") == 1
        gate.open()
        assert all(each.result().status_code == 200 for each in asked)
        server.post(n=0)
        passes = gate.passes
    names = ("mmaccel_passes_total", "mmaccel_tokens_total", f'{requests}"200"', f'{requests}"400"')
    assert [server.metric(name) for name in names] == [passes, 5 * 16, 5, 1]
