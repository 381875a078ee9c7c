"""Visual tokens measured: answers, columns and operations against slow references; statistics."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

import mmaccel
from mmaccel.catalog import REDUCERS
from mmaccel.demo.scenes_vqa.data import make_examples
from mmaccel.demo.scenes_vqa.processor import make_processor
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.evaluation.quality.report import wilson
from mmaccel.evaluation.shares import paired_difference
from mmaccel.evaluation.visual_tokens import measure, prefill, questions, summary
from mmaccel.evaluation.visual_tokens.methods import (
    CONTROLS,
    METHODS,
    Side,
    list_sides,
    parse_keeps,
    parse_methods,
)
from mmaccel.evaluation.visual_tokens.questions import ImageQuestion, VisionModel
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_vlms import IMAGE, build_vlm, build_vqa, draw_prompts, encodes_first
from tests.fixtures.tiny_vqa import save_vqa

needs_encoding = pytest.mark.skipif(
    not encodes_first(), reason="this transformers encodes images in its first pass"
)
N_VISUAL, N_ENDS = 520, 20  # of scenes-vqa; ends of the tiles' rows
EXAMPLES = make_examples(7, range(3), per_kind=1)


@pytest.fixture(scope="module")
def vlm() -> VisionModel:
    return VisionModel(build_vqa(), make_processor(), True)


@pytest.fixture(scope="module")
def asked(vlm: VisionModel) -> list[ImageQuestion]:
    """Seven; the model, asked each alone, answers the first two and the fifth rightly."""
    pairs = [
        (image, question)
        for image, row in zip(EXAMPLES.images, EXAMPLES.questions, strict=True)
        for question in row
    ][:7]
    found = []
    for k, (image, question) in enumerate(pairs):
        inputs = vlm.processor(
            images=[image], text=[f"<image> {question.text}"], return_tensors="pt"
        )
        made = vlm.model.generate(**inputs, max_new_tokens=4, do_sample=False)
        (text,) = vlm.decode(made[:, inputs["input_ids"].shape[1] :])
        answer = f" {text.upper()}. " if k in (0, 1, 4) else "something else"
        found.append(ImageQuestion("ab"[k % 3 == 0], question.text, answer, image))
    return found


def run(vlm: VisionModel, asked: Any, sides: Any, records: Any, batch: int = 3) -> Iterator[str]:
    return measure.measure_sides(
        vlm, asked, sides, records, batch=batch, max_new_tokens=4, seed=11, session=0
    )


@needs_encoding
def test_a_batch_answers_what_each_question_alone_is_answered(
    vlm: VisionModel, asked: list[ImageQuestion]
) -> None:
    method = mmaccel.RandomTokens(keep=0.3)
    sides = [Side(), Side("RandomTokens", 0.3, method)]
    records = {side.key: measure.new_record() for side in sides}
    keys = list(run(vlm, asked, sides, records))
    assert keys == [sides[k].key for k in (0, 1, 1, 0, 0, 1)]  # they change places
    assert records["all tokens"]["right"] == "1100100"
    alone = ""
    for k, question in enumerate(asked):
        inputs = vlm.encode([question])
        with mmaccel.attach(vlm.model, "autoregressive", seed=[11 + k], visual_tokens=method):
            made = vlm.model.generate(**inputs, max_new_tokens=4, do_sample=False)
        (text,) = vlm.decode(made[:, inputs["input_ids"].shape[1] :])
        alone += "01"[text.strip().lower() == question.answer.lower().strip(" .")]
    assert records[sides[1].key]["right"] == alone != "1100100"
    assert not vlm.model._forward_hooks and "_prepare" not in " ".join(vars(vlm.model))


@needs_encoding
def test_finished_rounds_are_not_answered_again(
    vlm: VisionModel, asked: list[ImageQuestion], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, answer = [], measure.answer

    def count(vlm: Any, inputs: Any, method: Any, **options: Any) -> Any:
        calls.append((repr(method), options["seeds"]))
        return answer(vlm, inputs, method, **options)

    monkeypatch.setattr(measure, "answer", count)
    sides = [Side(), Side("UniformTokens", 0.3, mmaccel.UniformTokens(keep=0.3))]
    whole = {side.key: measure.new_record() for side in sides}
    list(run(vlm, asked, sides, whole))
    assert len(calls) == 2 * 3 + 1  # the first warms up
    assert calls[-1] == ("UniformTokens(keep=0.3, n_keep=None)", [17])
    calls.clear()
    records = {side.key: measure.new_record() for side in sides}
    stopped = run(vlm, asked, sides, records)
    for _ in range(3):
        next(stopped)
    stopped.close()
    records = json.loads(json.dumps(records))
    list(run(vlm, asked, sides, records))
    assert len(calls) == 2 * 3 + 2
    assert [records[key]["right"] for key in records] == [whole[key]["right"] for key in whole]
    assert all(len(records[key][name]) == 3 for key in records for name in measure.PER_ROUND)
    calls.clear()
    list(run(vlm, asked, sides, records))
    assert calls == []


def cost_of(vlm: VisionModel, method: Any, inputs: Any) -> Any:
    return measure.answer(vlm, inputs, method, seeds=[3] * 2, max_new_tokens=2)[1]


@needs_encoding
def test_columns_of_each_layer(vlm: VisionModel, asked: list[ImageQuestion]) -> None:
    by_length = sorted(asked, key=lambda question: len(question.text))
    inputs = vlm.encode([by_length[0], by_length[-1]])
    lengths = inputs["attention_mask"].sum(1)
    assert lengths[0] != lengths[1]
    kept = (N_VISUAL - N_ENDS) // 5
    for method, per_layer in (
        (None, [N_VISUAL] * 4),
        (mmaccel.RandomTokens(keep=0.2), [kept] * 4),
        (mmaccel.FastV(keep=0.2, layer=2), [N_VISUAL] * 2 + [N_VISUAL // 5] * 2),
        (
            [mmaccel.RandomTokens(keep=0.2), mmaccel.FastV(keep=0.5, layer=3)],
            [kept] * 3 + [kept // 2],
        ),
    ):
        cost = cost_of(vlm, method, inputs)
        wanted = (lengths - N_VISUAL)[:, None] + torch.tensor(per_layer)
        assert torch.equal(cost.columns, wanted)
        visual = measure.count_visual(vlm.model, inputs, cost.columns)
        assert visual.tolist() == [per_layer] * 2
        config = vlm.model.config.get_text_config()
        slow = [
            prefill.head_flops(config)
            + sum(float(prefill.layer_flops(config, n)) for n in row[:, None])
            for row in wanted
        ]
        assert cost.flops.tolist() == pytest.approx(slow)
        assert 0 < cost.encoder_seconds + cost.prefill_seconds < cost.seconds


@needs_encoding
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "internvl"])
def test_columns_of_other_models(name: str) -> None:
    """Windows that slide, and masks that see an image in both directions."""
    model = build_vlm(name)
    inputs = draw_prompts(name, model, (1, 1))
    vlm = VisionModel(model, None, False)
    object.__setattr__(vlm, "decode", lambda tokens: [""] * len(tokens))
    visual = (inputs["input_ids"] == IMAGE).sum(1)
    for method, kept in (
        (None, visual),
        (mmaccel.RandomTokens(n_keep=2), visual.clamp(max=2)),
    ):
        cost = cost_of(vlm, method, inputs)
        lengths = inputs["attention_mask"].sum(1) - visual + kept
        assert torch.equal(cost.columns, lengths[:, None].expand(cost.columns.shape))


@torch.no_grad()
def test_operations_are_those_that_torch_counts() -> None:
    model = build_vqa()
    model.set_attn_implementation("eager")  # whose products torch counts
    config, decoder = model.config.get_text_config(), model.get_decoder()
    for n in (7, 40):
        hidden = torch.randn(1, n, config.hidden_size)
        angles = decoder.rotary_emb(hidden, torch.arange(n)[None])
        with FlopCounterMode(display=False) as counter:
            decoder.layers[0](hidden, position_embeddings=angles)
        wanted = counter.get_total_flops()
        assert prefill.layer_flops(config, torch.tensor([n])).tolist() == [wanted]
    with FlopCounterMode(display=False) as counter:
        model.get_output_embeddings()(hidden[:, -1])
    assert prefill.head_flops(config) == counter.get_total_flops()


def test_the_published_example_of_the_paired_interval() -> None:
    """`ci.prop.ps(.05, 12, 26, 4, 6)` of statpsych, by the same authors."""
    first = "0" * 12 + "1" * 26 + "0" * 4 + "1" * 6
    second = "0" * 12 + "0" * 26 + "1" * 4 + "1" * 6
    found = paired_difference(first, second)
    assert found is not None
    assert (found["low"], found["high"]) == pytest.approx((0.2548067, 0.6251933), abs=1e-5)
    assert found["difference"] == pytest.approx(22 / 48, abs=1e-5)
    assert (found["only_first"], found["only_second"]) == (26, 4)
    back = paired_difference(second, first)
    assert back is not None and back["high"] == pytest.approx(-found["low"])
    assert paired_difference("", second) is None
    same = paired_difference("1111", "1111")
    assert same is not None and same["low"] == -same["high"] < 0 == same["difference"]


def test_informative_questions() -> None:
    whole, down, own = "11110000", "10101010", "01100110"
    assert summary.keep_informative(own, whole, down) == "10"  # questions 1 and 3
    assert summary.keep_informative(down, whole, down) == "00"
    assert summary.keep_informative(whole, whole, down) == "11"
    assert summary.keep_informative(own, down, down) == ""


def test_rows_against_a_slow_reference() -> None:
    rng = random.Random(3)
    names, keeps, kinds = (
        ("Downsample", "RandomTokens", "DART"),
        (0.5, 0.2),
        rng.choices("xyz", k=8),
    )
    sides = [Side()]
    sides += [Side(n, keep, getattr(mmaccel, n)(keep=keep)) for n in names for keep in keeps]
    records = {}
    for side in sides:
        records[side.key] = {
            "right": "".join(rng.choices("01", k=8)),
            **{name: [rng.random() for _ in range(3)] for name in measure.PER_ROUND},
            "sessions": [0, 0, 1],
        }
    rows = {row["side"]: row for row in summary.summarise(sides, records, kinds, batch=3)}
    assert list(rows) == [side.key for side in sides]
    for side in sides:
        record, row = records[side.key], rows[side.key]
        for kind in "xyz":
            own = [record["right"][k] == "1" for k in range(8) if kinds[k] == kind]
            assert row["accuracy"][kind]["right"] == pytest.approx(sum(own) / len(own), abs=1e-5)
            assert row["accuracy"][kind]["questions"] == len(own)
        share = record["right"].count("1") / 8
        low, high = wilson(share, 8)
        assert row["accuracy"]["all"] == dict(
            right=round(share, 5), low=round(low, 5), high=round(high, 5), questions=8
        )
        for name in ("visual_tokens", "layer_tokens", "flops"):
            a, b, c = record[name]
            assert row[name] == pytest.approx((3 * a + 3 * b + 2 * c) / 8)
        for name in ("seconds", "encoder_seconds", "prefill_seconds"):
            assert row[name] == pytest.approx(median(record[name][:2]) / 3)  # full rounds alone
        assert row["sessions"] == [0, 1]
        if side.method is None:
            assert row["to_all"] is row["to_random"] is row["informative"] is None
            continue
        whole = records["all tokens"]["right"]
        random_key = repr(mmaccel.RandomTokens(keep=side.keep))
        down = records[repr(mmaccel.Downsample(keep=side.keep))]["right"]
        assert row["to_all"] == paired_difference(record["right"], whole)
        if side.name == "RandomTokens":
            assert row["to_random"] is None
        else:
            other = records[random_key]["right"]
            assert row["to_random"] == paired_difference(record["right"], other)
        some = [k for k in range(8) if (whole[k], down[k]) == ("1", "0")]
        assert row["informative"]["questions"] == len(some) > 0
        right = sum(record["right"][k] == "1" for k in some)
        assert row["informative"]["right"] == pytest.approx(right / len(some), abs=1e-5)


def test_pixels_decide_what_is_informative_where_they_are_measured() -> None:
    names = ("Downsample", "DownsamplePixels", "DART")
    sides = [Side(), *(Side(name, 0.5, mmaccel.DART(n_keep=k + 1)) for k, name in enumerate(names))]
    costs = {name: [1.0] for name in measure.PER_ROUND}
    rights = zip(sides, ("1111", "0000", "1100", "0110"), strict=True)
    records = {side.key: costs | {"right": right} for side, right in rights}
    rows = summary.summarise(sides, records, "aaaa", batch=4)
    assert [row["informative"]["questions"] for row in rows[1:]] == [2, 2, 2]
    assert [row["informative"]["right"] for row in rows[1:]] == [0, 0, 0.5]
    some = summary.summarise([s for s in sides if "Pixels" not in s.name], records, "aaaa", batch=4)
    assert [row["informative"]["questions"] for row in some[1:]] == [4, 4]


def test_sides_without_controls_and_unfinished_ones() -> None:
    sides = [Side(), Side("DART", 0.5, mmaccel.DART(keep=0.5)), Side("FastV", 0.5, None)]
    records = {side.key: measure.new_record() for side in sides}
    records[sides[0].key] |= {name: [1.0, 1.0] for name in measure.PER_ROUND} | {"right": "1101"}
    records[sides[1].key] |= {name: [1.0] for name in measure.PER_ROUND} | {"right": "10"}
    rows = summary.summarise(sides[:2], records, "aabb", batch=2)
    assert rows[1]["accuracy"]["b"] is None and rows[1]["informative"] is None
    assert rows[1]["to_random"] is None
    assert (rows[1]["to_all"]["only_first"], rows[1]["to_all"]["only_second"]) == (0, 1)
    records[sides[1].key] = measure.new_record()
    assert len(summary.summarise(sides[:2], records, "aabb", batch=2)) == 1


@needs_encoding
def test_which_methods_a_model_takes() -> None:
    sides, left_out = list_sides(build_vqa(), METHODS, [0.5, 0.2])
    names = {side.name for side in sides}
    assert {"all tokens", *CONTROLS, "DART", "HiRED", "FastV"} <= names
    assert names.isdisjoint(left_out) and names | set(left_out) == {"all tokens", *METHODS}
    by_rule = [side for side in sides if side.method is not None and side.keep == 1]
    assert [repr(side.method) for side in by_rule] == [repr(mmaccel.PixelPrune())]
    assert "video" in left_out["EVS"] and len(sides) - len(by_rule) == 1 + 2 * (len(names) - 1)
    assert [side.key for side in sides[:2]] == ["all tokens", repr(sides[1].method)]
    with pytest.raises(UnsupportedModelError, match="takes a method"):
        list_sides(build_vqa(), ("EVS",), [0.5])
    with pytest.raises(UnsupportedModelError, match="vision-language"):
        list_sides(build_lm("gpt2"), METHODS, [0.5])


def test_names_and_fractions() -> None:
    assert parse_methods(["fast-v", "Pyramid_drop"]) == [*CONTROLS, "FastV", "PyramidDrop"]
    assert {*parse_methods(REDUCERS)} == {*METHODS}
    assert parse_methods(["random"]) == parse_methods(["RandomTokens"]) == list(CONTROLS)
    assert parse_methods([]) == list(METHODS)
    assert {"DART", "EVS", "ToMe", "LazyLLM"} <= set(METHODS) and METHODS[
        : len(CONTROLS)
    ] == CONTROLS
    assert all(issubclass(getattr(mmaccel, name), TokenReducer) for name in METHODS)
    with pytest.raises(OptionError, match="dart, .*received 'fastw'.*fastv"):
        parse_methods(["fastw"])
    assert parse_keeps(["0.5", ".11", "0.50"]) == [0.5, 0.11]
    for wrong in (["1"], ["0"], ["x"], [], ["nan"]):
        with pytest.raises(OptionError, match="--keep: expected a number in"):
            parse_keeps(wrong)


def test_right_answers() -> None:
    question = ImageQuestion("a", "?", "Red  Star.", None)
    for text in ("red star", " RED star ", "red\nstar!?", "Red star ."):
        assert questions.is_right(text, question)
    for text in ("red stars", "redstar", "", "a red star", ".red star"):
        assert not questions.is_right(text, question)


def test_questions_of_a_file(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    line = {"image": "a.png", "question": "what?", "answer": "x", "kind": "k"}
    file = tmp_path / "q.jsonl"
    lines = [line, line | {"kind": "l"}, line | {"answer": "y"}, line]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    found = questions.read_questions(file, 2)
    assert [(q.kind, q.answer) for q in found] == [("k", "x"), ("l", "x"), ("k", "y")]
    assert found[0].image == tmp_path / "a.png"
    digest = questions.digest_questions(found)
    assert digest != questions.digest_questions(found[::-1])
    for wrong, said in (
        ({"kind": "all"}, "on line 2"),
        ({"answer": 3}, "on line 2"),
        ({"image": "b.png"}, "b.png' on line 2"),
    ):
        file.write_text("\n".join(map(json.dumps, (line, line | wrong))))
        with pytest.raises(OptionError, match=said):
            questions.read_questions(file, 2)
    file.write_text("\n")
    with pytest.raises(OptionError, match="received none"):
        questions.read_questions(file, 2)


def test_weights_are_told_apart() -> None:
    first = build_vqa()
    digest = questions.digest_weights(first)
    assert digest == questions.digest_weights(build_vqa()) != questions.digest_weights(build_vqa(1))


def test_a_checkpoint_without_a_tensor_is_not_measured(tmp_path: Path) -> None:
    folder = save_vqa(tmp_path / "vqa")
    opened = questions.open_model(str(folder), "cpu", torch.float32)
    assert not opened.is_demo and opened.model.dtype == torch.float32
    tensors = load_file(folder / "model.safetensors")
    del tensors[next(name for name in tensors if name.endswith("linear_1.weight"))]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="1 missing, such as .*linear_1.weight"):
        questions.open_model(str(folder), "cpu", torch.float32)
