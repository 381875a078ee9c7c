"""The gallery: its page in a real browser, by mouse and by keys, and the facts of the images.

Hostile folders and names are among the cases of tests/fuzz.
"""

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


def draw(file: Path, facts: str, colour: str = "red") -> None:
    """An image with a text chunk of mmaccel."""
    info = PngInfo()
    info.add_text("mmaccel", facts)
    Image.new("RGB", (4, 4), colour).save(file, pnginfo=info)


def note(run: Path, **fields: Any) -> None:
    """Add a record to a manifest; Python's JSON has NaN too."""
    own = {"id": "r0", "k": 0, "status": "ok", "file": "r0.png"} | fields
    if (run / own["file"]).is_file():
        own["sha256"] = sha256_of(run / own["file"])
    with (run / "manifest.jsonl").open("a") as manifest:
        manifest.write(json.dumps(own) + "\n")


def make_run(folder: Path, *prompts: str, odd: str = "blue") -> Path:
    """A run's folder: red images, the last of another colour, and a manifest."""
    folder.mkdir()
    for k, prompt in enumerate(prompts):
        own = {"prompt": prompt, "seed": 2**64 - 1 - k, "policy": "jacobi"}
        facts = own | {"temperature": 0.5, "policy_options": {"window": 5}}
        draw(folder / f"r{k}.png", json.dumps(facts), odd if prompt == prompts[-1] else "red")
        note(folder, id=f"r{k}", file=f"r{k}.png", passes=7 + k, **own)
    return folder


def data_of(run: Path, *more: str) -> Any:
    """The items in the page of a run; JSON without NaN."""
    page = run.parent / "page.html"
    assert main(["gallery", str(run), "--out", str(page), *more]) == 0
    text = page.read_text("utf-8").split('id="data">')[1].split("</script>")[0]
    return json.loads(text, parse_constant=lambda name: pytest.fail(name))["items"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    """One browser for this file."""
    opened = open_browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.quit()


def visit(browser: Any, run: Path, *more: str) -> None:
    assert main(["gallery", str(run), *more]) == 0
    browser.get((run / "gallery.html").as_uri())
    assert browser.get_log("browser") == []


def texts(browser: Any, selector: str = ".card .text") -> list[str]:
    return [found.text for found in browser.find_elements("css selector", selector)]


def keys(browser: Any, *pressed: str) -> str:
    """Press keys where the focus is; returns the text of where it is then."""
    from selenium.webdriver import ActionChains, Keys

    for key in pressed:
        ActionChains(browser).send_keys(getattr(Keys, key, key)).perform()
    return str(browser.switch_to.active_element.text)


def test_images_are_found_and_read_by_keys(browser: Any, tmp_path: Path) -> None:
    visit(browser, make_run(tmp_path / "run", "a red fox", "A blue whale", "a red whale"))
    assert texts(browser) == ["a red fox", "A blue whale", "a red whale"]
    width = "return document.querySelector('.card img').naturalWidth"
    assert browser.execute_script(width) == 4
    keys(browser, "/", *"whale BLUE")
    assert texts(browser) == ["A blue whale"] and texts(browser, "#count") == ["1 of 3"]
    browser.find_element("id", "prompt").clear()
    browser.find_element("id", "seed").send_keys(str(2**64 - 3))  # no number of JavaScript holds it
    assert texts(browser) == ["a red whale"]
    keys(browser, *["BACKSPACE"] * 20, "ENTER", "ARROW_RIGHT", "ENTER")
    assert texts(browser, "#caption") == ["A blue whale"]
    rows = dict(zip(texts(browser, "#facts tr th"), texts(browser, "#facts tr td"), strict=True))
    assert (rows["seed"], rows["passes"], rows["temperature"]) == (str(2**64 - 2), "8", "0.5")
    assert rows["policy options"] == '{"window":5}'
    keys(browser, "ARROW_RIGHT")
    assert texts(browser, "#caption") == ["a red whale"]
    keys(browser, "ESCAPE")
    assert not browser.find_element("id", "details").is_displayed()


def test_prompts_are_text_and_nothing_else(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run & <b>co", NASTY, "%DATA% \u2028")
    note(run, id="bad", status="failed", error=NASTY, prompt=NASTY)
    visit(browser, run)
    browser.find_element("css selector", ".card").click()
    assert texts(browser, "#caption") == [NASTY] == texts(browser)[:1]
    (failure,) = browser.find_elements("css selector", "#failures li")
    assert failure.get_attribute("textContent") == f"bad, image 0: {NASTY}"
    assert browser.title == "run & <b>co" and browser.get_log("browser") == []
    assert browser.execute_script("return document.scripts.length") == 2


def test_two_runs_side_by_side(browser: Any, tmp_path: Path) -> None:
    second = make_run(tmp_path / "second", "one", "two", "three", "four", odd="red")
    visit(browser, make_run(tmp_path / "first", "one", "two", "three"), "--against", str(second))
    browser.find_element("id", "unlike").click()
    assert texts(browser) == ["three", "four"]
    browser.find_element("css selector", ".card").click()
    assert texts(browser, "#shown figcaption") == ["first: r2.png", "second: r2.png"]


def test_two_thousand_images_are_a_few_cards_at_a_time(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "number 0")
    for k in range(1, 2000):
        (run / f"r{k}.png").write_bytes((run / "r0.png").read_bytes())
        note(run, id=f"r{k}", prompt=f"number {k}", file=f"r{k}.png")
    visit(browser, run)
    assert texts(browser, "#count") == ["2000 of 2000"]
    assert texts(browser)[:3] == ["number 0", "number 1", "number 2"]  # not number 10
    assert 0 < len(texts(browser)) < 100
    browser.find_element("css selector", ".card").click()
    assert "number 1999" in keys(browser, "ESCAPE", "END") and 0 < len(texts(browser)) < 100


def test_a_folder_without_images_and_a_page_over_other_files_are_refused(
    tmp_path: Path, capsys: Any
) -> None:
    assert main(["gallery", str(tmp_path)]) == 2
    assert "mmaccel: folder: expected" in capsys.readouterr().err
    run = make_run(tmp_path / "run", "one")
    manifest = run / "manifest.jsonl"
    before = manifest.read_bytes()
    assert main(["gallery", str(run), "--out", str(manifest)]) == 2
    assert "expected a new file or a page to replace" in capsys.readouterr().err
    assert manifest.read_bytes() == before and len(list(run.iterdir())) == 2


def test_broken_images_and_lines_are_left_out_and_named(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / os.fsdecode(b"\xff"), "one", "two", "three")
    (run / "r1.png").write_bytes((run / "r1.png").read_bytes()[:80])
    os.mkfifo(run / "a.png")  # a pipe, and a link to it, hold up no gallery
    os.mkfifo(run / "manifest.old.jsonl")
    (run / "b.png").symlink_to("a.png")
    draw(tmp_path / "secret.png", '{"prompt": "hostile"}')
    note(run, id="odd", prompt=json.loads("[" * 600 + "]" * 600))
    note(run, id="gone", file="gone.png")
    note(run, id="out", file="../secret.png")
    note(run, passes=float("nan"), prompt="one")
    with time_limit(20):
        items = data_of(run)
    assert {item["prompt"] for item in items} == {"one", "three"}
    (side,) = [item["sides"][0] for item in items if item["prompt"] == "one"]
    assert side["own"]["passes"] == "nan" and side["src"] == "%FF/r0.png"
    said = capsys.readouterr().err
    for name in ("manifest.jsonl, line 4", "r1.png", "a.png", "b.png", "gone, image 0"):
        assert f"left out: {name}" in said


def test_images_without_a_manifest_show_their_own_facts(tmp_path: Path) -> None:
    """Images of other programs, and those whose facts cannot be read, are left out; those that
    differ in settings alone are all shown.
    """
    for name, policies in (("a", ["jacobi", "sjd", "gsd"]), ("b", ["plain", "sjd"])):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / name / "other.png")
        draw(tmp_path / name / "deep.png", "[" * 100_000)
        for policy in policies:
            facts = {"prompt": "x", "seed": 3, "policy": policy}
            draw(tmp_path / name / f"{policy}.png", json.dumps(facts))
    items = data_of(tmp_path / "a", "--against", str(tmp_path / "b"))
    shown = [[side and side["policy"] for side in item["sides"]] for item in items]
    assert shown == [["gsd", "plain"], ["jacobi", "sjd"], ["sjd", None]]
