"""Visual tokens measured: answers, columns and operations against slow references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

import mmaccel
from mmaccel.catalog import REDUCERS
from mmaccel.demo.scenes_vqa.data import make_examples
from mmaccel.demo.scenes_vqa.processor import make_processor
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.evaluation import visual_tokens
from mmaccel.evaluation.answers import digest_weights, try_sides
from mmaccel.evaluation.questions import Question
from mmaccel.evaluation.visual_tokens import CONTROLS, METHODS, VisionModel, answer
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_vlms import IMAGE, build_vlm, build_vqa, draw_prompts
from tests.fixtures.tiny_vqa import save_vqa
from tests.vision_language.runs import reduces

pytestmark = reduces
N_VISUAL, N_ENDS = 520, 20  # of scenes-vqa; ends of the tiles' rows


@pytest.fixture(scope="module")
def vlm() -> VisionModel:
    return VisionModel(build_vqa(), make_processor(), True)


@pytest.fixture(scope="module")
def asked() -> list[Question]:
    made = make_examples(7, range(3), per_kind=1)
    pairs = zip(made.images, made.questions, strict=True)
    return [Question(q.kind, q.text, "", image=image) for image, row in pairs for q in row][:7]


def cost_of(vlm: VisionModel, method: Any, inputs: Any) -> Any:
    return answer(vlm, inputs, method, seeds=[3] * 2, max_new_tokens=2)[1]


def test_columns_of_each_layer(vlm: VisionModel, asked: list[Question]) -> None:
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
        visual = visual_tokens.count_visual(vlm.model, inputs, cost.columns)
        assert visual.tolist() == [per_layer] * 2
        config = vlm.model.config.get_text_config()
        slow = [
            visual_tokens.head_flops(config)
            + sum(float(visual_tokens.layer_flops(config, n)) for n in row[:, None])
            for row in wanted
        ]
        assert cost.flops.tolist() == pytest.approx(slow)
        assert 0 < cost.encoder_seconds + cost.prefill_seconds < cost.seconds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "internvl"])
def test_columns_of_other_models(name: str) -> None:
    """Windows that slide, and masks that see an image in both directions."""
    model = build_vlm(name)
    inputs = draw_prompts(name, model, (1, 1))
    vlm = VisionModel(model, None, False)
    object.__setattr__(vlm, "decode", lambda tokens: [""] * len(tokens))
    visual = (inputs["input_ids"] == IMAGE).sum(1)
    for method, kept in ((None, visual), (mmaccel.RandomTokens(n_keep=2), visual.clamp(max=2))):
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
        assert visual_tokens.layer_flops(config, torch.tensor([n])).tolist() == [wanted]
    with FlopCounterMode(display=False) as counter:
        model.get_output_embeddings()(hidden[:, -1])
    assert visual_tokens.head_flops(config) == counter.get_total_flops()


def sides_of(model: Any, names: Any, keeps: Any) -> Any:
    chosen = [side for side in VisionModel.list_sides([], keeps) if side.name in names]
    return try_sides(VisionModel(model, None, False), chosen, 0)


@pytest.mark.slow
def test_which_methods_a_model_takes() -> None:
    sides, left_out = sides_of(build_vqa(), METHODS, [0.5, 0.2])
    names = {side.name for side in sides}
    assert {"all tokens", *CONTROLS, "DART", "HiRED", "FastV"} <= names
    assert names.isdisjoint(left_out) and names | set(left_out) == {"all tokens", *METHODS}
    by_rule = [side.key for side in sides[1:] if side.level == 1]
    assert by_rule == [repr(mmaccel.PixelPrune())]
    assert "video" in left_out["EVS"] and len(sides) - len(by_rule) == 1 + 2 * (len(names) - 1)
    with pytest.raises(UnsupportedModelError, match="takes a method"):
        sides_of(build_vqa(), ("EVS",), [0.5])
    with pytest.raises(UnsupportedModelError, match="vision-language"):
        sides_of(build_lm("gpt2"), METHODS, [0.5])


def test_names() -> None:
    parse = visual_tokens.parse_methods
    assert parse(["fast-v", "Pyramid_drop"]) == [*CONTROLS, "FastV", "PyramidDrop"]
    assert {*parse(REDUCERS)} == {*METHODS} and parse([]) == list(METHODS)
    assert parse(["random"]) == parse(["RandomTokens"]) == list(CONTROLS)
    with pytest.raises(OptionError, match="dart, .*received 'fastw'.*fastv"):
        parse(["fastw"])


def test_weights_are_told_apart_and_whole(tmp_path: Path) -> None:
    first = build_vqa()
    digest = digest_weights(first)
    assert digest == digest_weights(build_vqa()) != digest_weights(build_vqa(1))
    folder = save_vqa(tmp_path / "vqa")
    assert not visual_tokens.open_model(str(folder), "cpu", torch.float32).is_demo
    tensors = load_file(folder / "model.safetensors")
    del tensors[next(name for name in tensors if name.endswith("linear_1.weight"))]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="1 missing, such as .*linear_1.weight"):
        visual_tokens.open_model(str(folder), "cpu", torch.float32)
