"""The gallery: its page in a real browser, by mouse and by keys, and the facts of the images."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from mmaccel.batch.manifest import sha256_of
from mmaccel.cli import main
from tests.fixtures.browser import open_browser
from tests.fixtures.special_files import time_limit

NASTY = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'"


def draw(file: Path, text: str, colour: str = "red") -> None:
    """An image with a text chunk of mmaccel."""
    info = PngInfo()
    info.add_text("mmaccel", text)
    Image.new("RGB", (4, 4), colour).save(file, pnginfo=info)


def note(run: Path, *records: dict[str, Any] | str) -> None:
    """Add records, or other lines, to a manifest; Python's JSON has NaN and surrogates too."""
    with (run / "manifest.jsonl").open("a") as manifest:
        for each in records:
            manifest.write((each if isinstance(each, str) else json.dumps(each)) + "\n")


def make_run(folder: Path, prompts: list[str], odd: str = "blue") -> Path:
    """A run's folder: red images, the last of another colour, and a manifest."""
    folder.mkdir()
    for k, prompt in enumerate(prompts):
        name = f"r{k}_0_{100 + k}.png"
        own = {"prompt": prompt, "seed": 2**64 - 1 - k, "policy": "jacobi"}
        facts = own | {"temperature": 0.5, "policy_options": {"window": 5}}
        draw(folder / name, json.dumps(facts), odd if k == len(prompts) - 1 else "red")
        own |= {"id": f"r{k}", "k": 0, "status": "ok", "file": name, "passes": 7 + k}
        note(folder, own | {"sha256": sha256_of(folder / name)})
    return folder


def first_record(run: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run / "manifest.jsonl").read_bytes().splitlines()[0])
    return record


def data_of(run: Path, *more: str) -> dict[str, Any]:
    """The data in the page of a run; JSON without NaN."""
    page = run.parent / "page.html"
    assert main(["gallery", str(run), "--out", str(page), *more]) == 0
    text = page.read_text("utf-8").split('id="data">')[1].split("</script>")[0]
    data: dict[str, Any] = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    return data


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    """One browser for this file."""
    opened = open_browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.quit()


def visit(browser: Any, run: Path, *more: str) -> None:
    page = run / "gallery.html"
    assert main(["gallery", str(run), "--out", str(page), *more]) == 0
    browser.get(page.as_uri())
    assert browser.get_log("browser") == []


def find(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements("css selector", selector)


def texts(browser: Any) -> list[str]:
    return [found.text for found in find(browser, ".card .text")]


def keys(browser: Any, *pressed: str) -> None:
    """Press keys where the focus is."""
    from selenium.webdriver import ActionChains, Keys

    for key in pressed:
        ActionChains(browser).send_keys(getattr(Keys, key, key)).perform()


@pytest.mark.slow
def test_everything_can_be_done_with_keys(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    visit(browser, make_run(tmp_path / "run", ["one", "two", "three"]))
    keys(browser, "/")
    assert browser.switch_to.active_element.get_attribute("id") == "prompt"
    keys(browser, "ENTER")
    assert "one" in browser.switch_to.active_element.text
    keys(browser, "ARROW_RIGHT", "ENTER")
    dialog, caption = browser.find_element("id", "details"), browser.find_element("id", "caption")
    assert dialog.is_displayed() and caption.text == "two"
    heads, cells = find(browser, "#facts tr th"), find(browser, "#facts tr td")
    rows = {head.text: cell.text for head, cell in zip(heads, cells, strict=True)}
    assert (rows["seed"], rows["passes"], rows["temperature"]) == (str(2**64 - 2), "8", "0.5")
    assert rows["policy options"] == '{"window":5}'
    keys(browser, "ARROW_RIGHT")
    assert caption.text == "three"
    keys(browser, "ESCAPE")
    assert not dialog.is_displayed()
    is_back = lambda page: "three" in page.switch_to.active_element.text  # noqa: E731
    WebDriverWait(browser, 10).until(is_back)  # after the close event
    keys(browser, "HOME")
    assert "one" in browser.switch_to.active_element.text
    browser.find_element("id", "prompt").send_keys("TWO")
    browser.find_element("id", "seed").send_keys(str(2**64 - 2))  # no number of JavaScript holds it
    assert texts(browser) == ["two"] and browser.find_element("id", "count").text == "1 of 3"
    assert [i.size["width"] > 3 for i in find(browser, ".card img")] == [True]


@pytest.mark.slow
def test_prompts_are_text_and_nothing_else(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run & <b>co", [NASTY, "%DATA% \u2028"])
    note(run, {"id": "bad", "k": 0, "status": "failed", "error": NASTY, "prompt": NASTY})
    visit(browser, run)
    assert texts(browser)[0] == NASTY and browser.title == "run & <b>co"
    find(browser, ".card")[0].click()
    assert browser.find_element("id", "caption").text == NASTY
    (failure,) = find(browser, "#failures li")
    assert failure.get_attribute("textContent") == f"bad, image 0: {NASTY}"
    assert browser.title == "run & <b>co" and browser.get_log("browser") == []
    assert browser.execute_script("return document.scripts.length") == 2


def test_a_folder_without_images_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gallery", str(tmp_path)]) == 2
    assert "mmaccel: folder: expected" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_broken_images_and_lines_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", ["one", "two", "three"])
    whole = (run / "r1_0_101.png").read_bytes()
    text = whole.index(b"tEXt")
    broken = {
        "r1_0_101.png": whole[: len(whole) // 2],
        "no.png": b"no image",
        "header.png": whole[:8] + b"\0\0\0\1IHDR\0" + whole[16:],
        "chunk.png": whole[: text - 4] + b"\0\0\0\0pHYs" + whole[text + 4 :],
    }
    for name, data in broken.items():
        (run / name).write_bytes(data)
    os.mkfifo(run / "a.png")  # a pipe, and a link to it, hold up no gallery
    os.mkfifo(run / "manifest.old.jsonl")
    (run / "b.png").symlink_to("a.png")
    own, deep = first_record(run), json.loads("[" * 600 + "]" * 600)
    note(run, "{no record")
    for name, value in (("sha256", []), ("temperature", deep), ("prompt", deep)):
        note(run, own | {"id": f"odd {name}", name: value})
    note(run, {"id": "f", "k": 0, "status": "failed", "error": deep})
    note(run, own | {"id": "gone", "file": "gone.png"})
    with time_limit(20):
        assert [item["prompt"] for item in data_of(run)["items"]] == ["one", "three"]
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'page.html'}\n"
    named = {line.removeprefix("left out: ").partition(":")[0] for line in said.err.splitlines()}
    lines = {f"manifest.jsonl, line {n}" for n in range(4, 9)}
    assert named == {*lines, *broken, "a.png", "b.png", "gone, image 0"}


def test_no_file_outside_the_folder_and_no_nan(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ["one"])
    draw(tmp_path / "secret.png", json.dumps(first_record(run)))
    own = first_record(run)
    for name in ("../secret.png", str(tmp_path / "secret.png"), "..", "\ud800.png"):
        note(run, own | {"id": name[:5].replace("/", "-"), "file": name, "prompt": "hostile"})
    infinite = [float("inf"), {"a": -float("inf")}]
    note(run, own | {"passes": float("nan"), "temperature": infinite})
    data = data_of(run)
    (one,) = data["items"]
    assert (one["prompt"], one["sides"][0]["facts"]["passes"]) == ("one", "NaN")
    assert one["sides"][0]["facts"]["temperature"] == ["Infinity", {"a": "-Infinity"}]


def test_images_that_differ_in_settings_alone_are_all_shown(tmp_path: Path) -> None:
    """Of folders without a manifest, where images tell prompt and seed; in order of names."""
    for name, policies in (("a", ["jacobi", "sjd", "gsd"]), ("b", ["plain", "sjd"])):
        (tmp_path / name).mkdir()
        draw(tmp_path / name / "deep.png", "[" * 100_000)  # of another program
        for policy in policies:
            facts = {"prompt": "x", "seed": 3, "policy": policy}
            draw(tmp_path / name / f"{policy}.png", json.dumps(facts))
    data = data_of(tmp_path / "a", "--against", str(tmp_path / "b"))
    items = data["items"]
    assert data["sides"] == ["a", "b"] and [item["differs"] for item in items] == [False] * 3
    shown = [[side and side["policy"] for side in item["sides"]] for item in items]
    assert shown == [["gsd", "plain"], ["jacobi", "sjd"], ["sjd", None]]
