"""`ImageToText`: the tokens of transformers' own `generate`, what was kept, prompts, bad input."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mmaccel
from mmaccel import ImageToText, OptionError
from mmaccel.demo import loading as demo_loading
from mmaccel.demo.scenes_vqa.processor import IMAGE, make_processor
from mmaccel.pipelines.image_to_text.prompts import make_inputs, read_image
from tests.fixtures.tiny_vlms import build_vlm, encodes_first
from tests.fixtures.tiny_vqa import QUESTION, build_vqa, save_scenes, save_vqa, scene
from tests.fixtures.vlm_processors import PROCESSORS
from tests.vision_language.runs import reduces

QUESTIONS = [QUESTION, "how many stars are there?", "what number is on the green sign ?"]
N_NEW = 9


@pytest.fixture(scope="module")
def model() -> Any:
    return build_vqa()


@pytest.fixture(scope="module")
def processor() -> Any:
    return make_processor()


@pytest.fixture(scope="module")
def pipe(model: Any, processor: Any) -> ImageToText:
    return ImageToText(model, processor)


def plain_tokens(model: Any, processor: Any, prompts: list[str], images: list[Any]) -> list[Any]:
    """New tokens of each row by transformers' own loop, up to the end."""
    inputs = processor(images=images, text=prompts, padding=True, return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=N_NEW, do_sample=False)
    rows = made[:, inputs["input_ids"].shape[1] :].tolist()
    end = model.generation_config.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def ask_all(pipe: ImageToText, **options: Any) -> Any:
    return pipe(scene(), QUESTIONS, max_new_tokens=N_NEW, **options)


def tokens_of(answers: Any) -> list[list[int]]:
    return [answer.tokens.tolist() for answer in answers]


def test_answers_are_those_of_the_models_own_loop(
    pipe: ImageToText, model: Any, processor: Any
) -> None:
    out = ask_all(pipe)
    prompts = [f"<image> {question}" for question in QUESTIONS]
    wanted = plain_tokens(model, processor, prompts, [scene()] * 3)
    assert tokens_of(out) == wanted
    assert len({tuple(row) for row in wanted}) > 1
    for answer, row in zip(out.answers, wanted, strict=True):
        assert answer.text == processor.tokenizer.decode(row, skip_special_tokens=True)
        assert answer.is_finished == (row[-1] == model.generation_config.eos_token_id)
        assert (answer.n_visual, answer.n_kept, answer.images) == (520, 520, [])
        assert answer.passes == out.stats.passes + 1
    assert [answer.question for answer in out.answers] == QUESTIONS
    assert out.stats.exactness == "bitwise" and not out.stats.fallbacks
    assert 0 < out.first_seconds <= out.seconds and len(out) == 3 and out[1].index == 1


def test_an_answer_ends_where_the_model_ends_it(
    pipe: ImageToText, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask_all(pipe)
    first = whole[0].tokens.tolist()
    end = next(token for token in first if token != first[0])
    other = max(model.config.text_config.vocab_size - 1, end)
    monkeypatch.setattr(model.generation_config, "eos_token_id", [end, other])
    for before, after in zip(whole.answers, ask_all(pipe).answers):
        tokens = before.tokens.tolist()
        n = tokens.index(end) + 1 if end in tokens else len(tokens)
        assert after.tokens.tolist() == tokens[:n]
        assert after.is_finished == (end in tokens)
    assert after.tokens.dtype == torch.int64 and len(first) > first.index(end) + 1


def test_a_models_generation_config_asks_for_no_beams(
    pipe: ImageToText, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some checkpoints have beams, several sequences or output objects as their defaults."""
    plain = ask_all(pipe)
    own = dict(num_beams=3, num_return_sequences=2, return_dict_in_generate=True, do_sample=True)
    for name, value in own.items():
        monkeypatch.setattr(model.generation_config, name, value)
    made = ask_all(pipe)
    assert tokens_of(made) == tokens_of(plain)
    assert not made.stats.fallbacks


def test_images_of_each_question_and_places_in_it(
    pipe: ImageToText, model: Any, processor: Any
) -> None:
    images = [[scene(0)], [scene(1), scene(2)]]
    asked = ["what colour?", "is <image> the colour of <image> ?"]
    out = pipe(images, asked, max_new_tokens=N_NEW)
    prompts = ["<image> what colour?", asked[1]]
    flat = [image for own in images for image in own]
    wanted = plain_tokens(model, processor, prompts, flat)
    assert tokens_of(out) == wanted
    assert [answer.n_visual for answer in out.answers] == [520, 1040]
    both = pipe([scene(1), scene(2)], "what colour?", max_new_tokens=N_NEW)
    (alone,) = plain_tokens(model, processor, ["<image> <image> what colour?"], flat[1:])
    assert both[0].tokens.tolist() == alone


def test_batches_change_the_cost_alone(pipe: ImageToText) -> None:
    whole = ask_all(pipe, temperature=1.0, seed=5)
    parts = ask_all(pipe, temperature=1.0, seed=5, batch_size=2)
    alone = pipe(scene(), QUESTIONS[2], max_new_tokens=N_NEW, temperature=1.0, seed=7)
    listed = ask_all(pipe, temperature=1.0, seed=[5, 6, 7])
    assert tokens_of(whole) == tokens_of(parts)
    assert tokens_of(whole) == tokens_of(listed)
    assert whole[2].tokens.tolist() == alone[0].tokens.tolist()
    assert [a.seed for a in parts.answers] == [5, 6, 7] and parts[2].index == 2
    assert parts.stats.prefill_passes == 2 and parts.stats.tokens == whole.stats.tokens
    other = ask_all(pipe, temperature=1.0, seed=50)
    assert tokens_of(whole) != tokens_of(other)


def test_sampling_parameters_reach_the_model(pipe: ImageToText) -> None:
    greedy = pipe(scene(), QUESTION, max_new_tokens=N_NEW)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        made = pipe(scene(), QUESTION, max_new_tokens=N_NEW, temperature=1.0, **narrow)
        assert torch.equal(made[0].tokens, greedy[0].tokens)
    free = pipe(scene(), QUESTION, max_new_tokens=N_NEW, temperature=3.0, top_k=0, seed=0)
    assert not torch.equal(free[0].tokens, greedy[0].tokens)


def test_without_a_seed_torchs_generator_draws_one(pipe: ImageToText) -> None:
    ask = partial(ask_all, pipe, batch_size=2)
    state = torch.get_rng_state()
    assert ask().stats.seed is None and torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    first, second = (ask(temperature=3.0) for _ in range(2))
    torch.manual_seed(2)
    assert ask(temperature=3.0).stats.seed == first.stats.seed != second.stats.seed
    again = ask(temperature=3.0, seed=second.stats.seed)
    assert tokens_of(again) == tokens_of(second)
    assert tokens_of(first) != tokens_of(second)


def test_it_saves_model_and_processor(tmp_path: Path) -> None:
    pipe = ImageToText(build_vqa(), make_processor(), fused=True)
    made = pipe(scene(), QUESTION, max_new_tokens=N_NEW)  # its weights are packed now
    assert made.stats.route == "fused"
    pipe.save_pretrained(tmp_path / "saved")
    again = ImageToText.from_pretrained(tmp_path / "saved", fused=False)
    assert again(scene(), QUESTION, max_new_tokens=N_NEW)[0].tokens.equal(made[0].tokens)
    assert again.components == {"model": again.model, "processor": again.processor}


@reduces
def test_a_reducer_keeps_what_it_says(model: Any, processor: Any) -> None:
    method = mmaccel.HiRED(keep=0.25)
    pipe = ImageToText(model, processor, policy="autoregressive", visual_tokens=method)
    out = pipe([scene(0), scene(1)], QUESTION, max_new_tokens=N_NEW)
    inputs = make_inputs(processor, [QUESTION], [[scene(0), scene(1)]])
    with mmaccel.attach(model, "jacobi", seed=[0], visual_tokens=method) as run:
        made = model.generate(**inputs, max_new_tokens=N_NEW, do_sample=False)
    answer = out[0]
    assert (
        answer.tokens.tolist()
        == made[0, inputs["input_ids"].shape[1] :].tolist()[: len(answer.tokens)]
    )
    assert len(answer.images) == 2 and answer.n_visual == 1040 and answer.n_kept == 250
    assert [tokens.n_kept for tokens in answer.images] == [125, 125]
    for tokens, kept in zip(answer.images, run.kept_tokens, strict=True):
        assert torch.equal(tokens.kept, kept.kept) and tokens.n_all == 520
    assert "250 of 1040 visual tokens" in out.stats.reference
    assert out.stats.exactness == "relaxed"


@reduces
def test_an_llm_layers_kept_tokens_are_those_of_its_last_stage(model: Any, processor: Any) -> None:
    method = mmaccel.PyramidDrop(keep=0.25, layers=(1, 2))
    pipe = ImageToText(model, processor, visual_tokens=method)
    answer = pipe(scene(), QUESTION, max_new_tokens=2)[0]
    assert answer.n_kept == answer.images[0].n_kept == 130


def test_a_chat_template_is_used(model: Any) -> None:
    processor = make_processor()
    processor.chat_template = (
        "{% for m in messages %}{% for c in m.content %}"
        "{% if c.type == 'image' %}<image>{% else %} {{ c.text }} {% endif %}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}yes{% endif %}"
    )
    first = make_inputs(processor, ["what colour?", "how many stars?"], [[scene()], [scene(1)]])
    plain = make_processor()
    prompts = ["<image> what colour? yes", "<image> how many stars? yes"]
    wanted = plain(images=[scene(), scene(1)], text=prompts, padding=True, return_tensors="pt")
    for name in ("input_ids", "attention_mask", "pixel_values"):
        assert torch.equal(first[name], wanted[name])
    between = make_inputs(processor, ["is <image> above <image>"], [[scene(), scene(1)]])
    wanted = plain(
        images=[scene(), scene(1)], text=["is <image> above <image> yes"], return_tensors="pt"
    )
    assert torch.equal(between["input_ids"], wanted["input_ids"])
    assert int((between["input_ids"] == IMAGE).sum()) == 1040
    out = ImageToText(model, processor)(scene(), "what colour?", max_new_tokens=3)
    assert len(out[0].tokens) <= 3


def test_from_a_folder(tmp_path: Path, model: Any, pipe: ImageToText) -> None:
    (file,) = save_scenes(tmp_path, 1)
    opened = ImageToText.from_pretrained(save_vqa(tmp_path / "vqa"))
    made = opened(file, QUESTION, max_new_tokens=N_NEW)
    again = opened([str(file)], QUESTION, max_new_tokens=N_NEW)
    wanted = pipe(scene(), QUESTION, max_new_tokens=N_NEW)
    assert made[0].tokens.tolist() == wanted[0].tokens.tolist() == again[0].tokens.tolist()
    assert opened.source == tmp_path / "vqa" and opened.processor.tokenizer.padding_side == "left"


def test_the_embedded_model_has_its_own_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_loading, "WEIGHTS", tmp_path)
    build_vqa().save_pretrained(tmp_path / "scenes-vqa")
    opened = ImageToText.from_pretrained("scenes-vqa", dtype=torch.float64)
    assert opened.model.dtype == torch.float64 and opened.source == tmp_path / "scenes-vqa"
    assert opened(scene(), QUESTION, max_new_tokens=2)[0].n_visual == 520


def test_words_that_a_small_vocabulary_lacks_are_named(pipe: ImageToText) -> None:
    said = (
        "question: expected words the model knows, received 'describe'; it knows: a above .*; ask"
    )
    with pytest.raises(OptionError, match=said):
        pipe(scene(), ["how many objects are there?", "Describe the <image> sign 7."])


def test_images_are_upright_and_of_known_brightness(tmp_path: Path) -> None:
    image = Image.new("RGB", (20, 10), "red")
    exif = image.getexif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").size == (10, 20)
    assert read_image(Image.new("RGBA", (2, 2))).mode == "RGB"


def test_the_model_is_left_as_it_was(pipe: ImageToText, model: Any) -> None:
    pipe(scene(), QUESTION, max_new_tokens=2)
    assert not mmaccel.detach(model)
    with mmaccel.attach(model, "jacobi"), pytest.raises(mmaccel.AttachError):
        pipe(scene(), QUESTION, max_new_tokens=2)


def test_the_forward_is_the_one_that_was_asked_for(model: Any, processor: Any) -> None:
    """Packed weights stay packed between calls, which so check nothing again."""
    own = ImageToText(model, processor, fused=False)
    assert own(scene(), QUESTION, max_new_tokens=2).stats.route == "model"
    pipe = ImageToText(model, processor)
    linear = model.get_decoder().layers[0].mlp.up_proj
    linear.weight.data = linear.weight.data.clone()
    for _ in range(2):
        assert pipe(scene(), QUESTION, max_new_tokens=2).stats.route == "fused"
        assert linear.weight.untyped_storage().nbytes() > linear.weight.nbytes


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_of_other_families(name: str) -> None:
    """Two images a row, questions of two lengths, with and without a chat template."""
    model, processor = build_vlm(name), PROCESSORS[name]()
    images, asked = [scene(0), scene(1)], ["what colour ?", "is the <image> the <image> star ?"]
    processor.tokenizer.padding_side = "right"  # of the caller's own calls
    inputs = make_inputs(processor, asked, [images, images])
    assert processor.tokenizer.padding_side == "right"
    assert inputs["input_ids"].shape[0] == 2 and not bool(inputs["attention_mask"][0, 0])
    made = model.generate(**inputs, max_new_tokens=N_NEW, do_sample=False)
    wanted = made[:, inputs["input_ids"].shape[1] :]
    out = ImageToText(model, processor)(images, asked, max_new_tokens=N_NEW)
    for row, answer in zip(wanted.tolist(), out.answers, strict=True):
        assert row[: len(answer.tokens)] == answer.tokens.tolist() and not out.stats.fallbacks
    if not encodes_first():
        return
    fewer = ImageToText(model, processor, visual_tokens=mmaccel.RandomTokens(keep=0.5))
    answer = fewer(images, asked, max_new_tokens=2)[1]
    assert 2 * answer.n_kept == answer.n_visual == out[1].n_visual
    has_places = [tokens.pixels is not None for tokens in answer.images]
    assert has_places == ([True, True] if name == "llava" else [False])
