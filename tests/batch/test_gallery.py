"""The gallery: its page in a real browser, by mouse and by keys, and the facts of the images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from mmaccel.batch.manifest import sha256_of, to_line
from mmaccel.cli import main
from tests.architecture.source import ROOT
from tests.fixtures.browser import open_browser

NASTY = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'"


def make_run(folder: Path, prompts: list[str], colour: str = "red", odd: str = "blue") -> Path:
    """A run's folder: images of one colour, the last of another, and a manifest."""
    folder.mkdir()
    for k, prompt in enumerate(prompts):
        name, seed = f"r{k}_0_{100 + k}.png", 2**64 - 1 - k
        info = PngInfo()
        own = {"prompt": prompt, "seed": seed, "policy": "jacobi", "temperature": 0.5,
               "policy_options": {"window": 5}}  # fmt: skip
        info.add_text("mmaccel", json.dumps(own))
        shade = odd if k == len(prompts) - 1 else colour
        Image.new("RGB", (4, 4), shade).save(folder / name, pnginfo=info)
        record = {"id": f"r{k}", "k": 0, "status": "ok", "file": name, "prompt": prompt,
                  "seed": seed, "policy": "jacobi", "passes": 7 + k,
                  "sha256": sha256_of(folder / name)}  # fmt: skip
        with (folder / "manifest.jsonl").open("ab") as manifest:
            manifest.write(to_line(record))
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    """One browser for this file."""
    opened = open_browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.quit()


def data_of(page: Path) -> dict[str, Any]:
    """The data in a page; JSON without NaN."""
    text = page.read_text("utf-8").split('id="data">')[1].split("</script>")[0]
    data: dict[str, Any] = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    return data


def visit(browser: Any, page: Path) -> None:
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
def test_images_are_found_by_prompt_seed_and_policy(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ["a red fox", "A blue whale", "a red whale"])
    assert main(["gallery", str(run)]) == 0
    visit(browser, run / "gallery.html")
    assert texts(browser) == ["a red fox", "A blue whale", "a red whale"]
    widths = [browser.execute_script("return arguments[0].naturalWidth", i)
              for i in find(browser, ".card img")]  # fmt: skip
    assert widths == [4, 4, 4]
    prompt, seed = browser.find_element("id", "prompt"), browser.find_element("id", "seed")
    prompt.send_keys("whale BLUE")
    assert texts(browser) == ["A blue whale"]
    assert browser.find_element("id", "count").text == "1 of 3"
    prompt.clear()
    prompt.send_keys(" ")
    seed.send_keys(str(2**64 - 3))  # no number of JavaScript holds it
    assert texts(browser) == ["a red whale"]


@pytest.mark.slow
def test_everything_can_be_done_with_keys(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ["one", "two", "three"])
    assert main(["gallery", str(run)]) == 0
    visit(browser, run / "gallery.html")
    keys(browser, "/")
    assert browser.switch_to.active_element.get_attribute("id") == "prompt"
    keys(browser, "ENTER")
    assert "one" in browser.switch_to.active_element.text
    keys(browser, "ARROW_RIGHT", "ENTER")
    dialog, caption = browser.find_element("id", "details"), browser.find_element("id", "caption")
    assert dialog.is_displayed() and caption.text == "two"
    rows = {row.find_element("tag name", "th").text: row.find_element("tag name", "td").text
            for row in find(browser, "#facts tr")}  # fmt: skip
    assert (rows["seed"], rows["passes"], rows["temperature"]) == (str(2**64 - 2), "8", "0.5")
    assert rows["policy options"] == '{"window":5}'
    keys(browser, "ARROW_RIGHT")
    assert caption.text == "three"
    keys(browser, "ESCAPE")
    assert not dialog.is_displayed()
    wait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait(browser, 10)
    wait.until(lambda page: "three" in page.switch_to.active_element.text)  # after the close event
    keys(browser, "HOME")
    assert "one" in browser.switch_to.active_element.text
    tabs = [card.get_attribute("tabindex") for card in find(browser, ".card")]
    assert tabs == ["0", "-1", "-1"]  # one stop on the way through the page


@pytest.mark.slow
def test_prompts_are_text_and_nothing_else(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run & <b>co", [NASTY, "%DATA% \u2028"])
    failed = {"id": "bad", "k": 0, "status": "failed", "error": NASTY, "prompt": NASTY}
    with (run / "manifest.jsonl").open("ab") as manifest:
        manifest.write(to_line(failed))
    assert main(["gallery", str(run)]) == 0
    visit(browser, run / "gallery.html")
    assert texts(browser)[0] == NASTY and browser.title == "run & <b>co"
    find(browser, ".card")[0].click()
    assert browser.find_element("id", "caption").text == NASTY
    assert browser.find_element("css selector", "#failures li").get_attribute("textContent") == (
        f"bad, image 0: {NASTY}"
    )
    assert browser.title == "run & <b>co" and browser.get_log("browser") == []
    assert browser.execute_script("return document.scripts.length") == 2


@pytest.mark.slow
def test_two_runs_side_by_side(browser: Any, tmp_path: Path) -> None:
    prompts = ["one", "two", "three"]
    first = make_run(tmp_path / "first", prompts)
    second = make_run(tmp_path / "second", [*prompts, "four"], odd="red")
    page = tmp_path / "pages" / "both.html"
    assert main(["gallery", str(first), "--against", str(second), "--out", str(page)]) == 0
    visit(browser, page)
    images = [len(card.find_elements("css selector", "img")) for card in find(browser, ".card")]
    assert images == [2, 2, 2, 1]
    sources = [i.get_attribute("src") for i in find(browser, ".card img")[:2]]
    assert sources == [(run / "r0_0_100.png").as_uri() for run in (first, second)]
    browser.find_element("id", "unlike").click()
    assert texts(browser) == ["three", "four"]
    find(browser, ".card")[0].click()
    figures = [f.text for f in find(browser, "#shown figcaption")]
    assert figures == ["first: r2_0_102.png", "second: r2_0_102.png"]


@pytest.mark.slow
def test_ten_thousand_images_are_a_few_cards_at_a_time(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ["seed"])
    own = (run / "r0_0_100.png").read_bytes()
    with (run / "manifest.jsonl").open("ab") as manifest:
        for k in range(1, 10_000):
            name = f"r{k}_0_{k}.png"
            (run / name).write_bytes(own)
            record = {"id": f"r{k}", "k": 0, "status": "ok", "file": name, "seed": k,
                      "prompt": f"number {k}", "policy": "jacobi", "sha256": "0"}  # fmt: skip
            manifest.write(to_line(record))
    assert main(["gallery", str(run)]) == 0
    visit(browser, run / "gallery.html")
    assert browser.find_element("id", "count").text == "10000 of 10000"
    assert 0 < len(find(browser, ".card")) < 100
    assert texts(browser)[:3] == ["seed", "number 1", "number 2"]  # not number 10
    find(browser, ".card")[0].click()
    keys(browser, "ESCAPE", *["PAGE_DOWN"] * 12)
    assert 0 < len(find(browser, ".card")) < 100
    keys(browser, "END")
    assert "number 9999" in browser.switch_to.active_element.text
    assert 0 < len(find(browser, ".card")) < 100


def test_a_folder_without_images_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert main(["gallery", str(folder)]) == 2
        assert "mmaccel: folder: expected" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_broken_images_and_lines_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", ["one", "two", "three"])
    whole = (run / "r1_0_101.png").read_bytes()
    (run / "r1_0_101.png").write_bytes(whole[: len(whole) // 2])
    (run / "no.png").write_bytes(b"no image")
    (run / "header.png").write_bytes(whole[:8] + b"\0\0\0\1IHDR\0" + whole[16:])
    text = whole.index(b"tEXt")
    (run / "chunk.png").write_bytes(whole[: text - 4] + b"\0\0\0\0pHYs" + whole[text + 4 :])
    own = json.loads((run / "manifest.jsonl").read_bytes().splitlines()[0])
    deep = json.loads("[" * 600 + "]" * 600)
    with (run / "manifest.jsonl").open("a") as manifest:
        manifest.write("{no record\n")
        for name, value in (("sha256", []), ("temperature", deep), ("prompt", deep)):
            manifest.write(json.dumps(own | {"id": f"odd {name}", name: value}) + "\n")
        failed = {"id": "f", "k": 0, "status": "failed", "error": deep}
        manifest.write(json.dumps(failed) + "\n")
        manifest.write(json.dumps(own | {"id": "gone", "file": "gone.png"}) + "\n")
    assert main(["gallery", str(run)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{run / 'gallery.html'}\n"
    items = data_of(run / "gallery.html")["items"]
    assert [item["prompt"] for item in items] == ["one", "three"]
    named = {line.removeprefix("left out: ").partition(":")[0] for line in said.err.splitlines()}
    assert named == {
        *(f"manifest.jsonl, line {n}" for n in (4, 6, 7, 8)), "r1_0_101.png", "no.png",
        "header.png", "chunk.png",
        "gone, image 0", "odd sha256, image 0",
    }  # fmt: skip


def test_pipes_in_a_folder_hold_up_no_gallery(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ["one"])
    os.mkfifo(run / "a.png")
    os.mkfifo(run / "manifest.old.jsonl")
    (run / "b.png").symlink_to("a.png")
    done = subprocess.run(
        [sys.executable, "-m", "mmaccel.cli", "gallery", str(run)],
        cwd=ROOT, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and len(data_of(run / "gallery.html")["items"]) == 1
    said = done.stderr.splitlines()
    assert len(said) == 2
    for name, line in zip("ab", said, strict=True):
        assert line.startswith(f"left out: {name}.png: image: expected a file, received")


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / os.fsdecode(b"\xff"), ["one"])
    assert main(["gallery", str(run), "--out", str(tmp_path / "page.html")]) == 0
    (item,) = data_of(tmp_path / "page.html")["items"]
    assert item["sides"][0]["src"] == "%FF/r0_0_100.png"


def test_images_without_a_manifest_show_their_own_facts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ["one", "two"])
    (run / "manifest.jsonl").unlink()
    Image.new("RGB", (4, 4)).save(run / "other.png")
    (run / "broken.png").write_bytes(b"no image")
    assert main(["gallery", str(run)]) == 0
    items = data_of(run / "gallery.html")["items"]
    assert [item["prompt"] for item in items] == ["one", "two"]
    assert [item["sides"][0]["file"] for item in items] == ["r0_0_100.png", "r1_0_101.png"]


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ["one"])
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    for name in ("../secret.png", str(tmp_path / "secret.png"), ".."):
        record = {"id": name.replace("/", "-"), "k": 0, "status": "ok", "file": name, "seed": 1,
                  "prompt": "x", "sha256": "0"}  # fmt: skip
        with (run / "manifest.jsonl").open("ab") as manifest:
            manifest.write(to_line(record))
    assert main(["gallery", str(run)]) == 0
    assert "secret.png" not in (run / "gallery.html").read_text(encoding="utf-8").replace(
        "..-secret.png", ""
    )


def test_images_of_other_programs_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ["one"])
    deep = PngInfo()
    deep.add_text("mmaccel", "[" * 100_000)
    Image.new("RGB", (4, 4)).save(run / "deep.png", pnginfo=deep)
    Image.new("RGB", (4, 4)).save(run / "bare.png")
    known = {"k": 0, "status": "ok", "seed": 1, "policy": "jacobi"}
    with (run / "manifest.jsonl").open("ab") as manifest:
        manifest.write(to_line({"id": "x", "k": 0, "status": "ok", "file": "bare.png"}))
        long = {"id": "9" * 5000, "prompt": "long", "file": "r0_0_100.png"}
        manifest.write(to_line(known | long))
    assert main(["gallery", str(run)]) == 0
    items = data_of(run / "gallery.html")["items"]
    assert sorted(item["prompt"] for item in items) == ["long", "one"]


def test_infinite_numbers_and_long_names(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ["a red fox"])
    with (run / "manifest.jsonl").open("a") as manifest:
        for name in ("é" * 130 + ".png", "a\0b.png", "\ud800.png"):
            other = {"id": name[:5], "k": 0, "status": "ok", "file": name, "prompt": "y"}
            manifest.write(json.dumps({**other, "seed": 1, "policy": "jacobi"}) + "\n")
        again = json.loads((run / "manifest.jsonl").read_text().splitlines()[0])
        again |= {"passes": float("nan"), "temperature": [float("inf"), {"a": -float("inf")}]}
        manifest.write(json.dumps(again) + "\n")
    assert main(["gallery", str(run)]) == 0
    data = data_of(run / "gallery.html")
    (item,) = data["items"]
    assert item["sides"][0]["own"]["passes"] == "nan"
    assert data["settings"][0]["temperature"] == ["inf", {"a": "-inf"}]


def test_images_that_differ_in_settings_alone_are_all_shown(tmp_path: Path) -> None:
    """Of folders without a manifest, where images tell prompt and seed; in order of names."""
    sides = []
    for name, policies in (("a", ["jacobi", "sjd", "gsd"]), ("b", ["plain", "sjd"])):
        (tmp_path / name).mkdir()
        sides.append(tmp_path / name)
        for policy in policies:
            info = PngInfo()
            info.add_text("mmaccel", json.dumps({"prompt": "x", "seed": 3, "policy": policy}))
            Image.new("RGB", (4, 4)).save(sides[-1] / f"{policy}.png", pnginfo=info)
    page = tmp_path / "page.html"
    assert main(["gallery", str(sides[0]), "--against", str(sides[1]), "--out", str(page)]) == 0
    shown = [[side and side["policy"] for side in item["sides"]]
             for item in data_of(page)["items"]]  # fmt: skip
    assert shown == [["gsd", "plain"], ["jacobi", "sjd"], ["sjd", None]]
