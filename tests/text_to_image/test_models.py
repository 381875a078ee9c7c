"""Checkpoints of every family that makes images: tokens, pixels, batches, guidance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.catalog import make_policy
from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.loading.checkpoint import read_weights
from mmaccel.pipelines.hosts.transformers_release import CACHE
from mmaccel.pipelines.text_to_image.model import choose_params
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.checkpoints import FAMILIES, LLAMAGEN_TEXTS, NUMBERS, SIZES, WORDS, captions
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.llamagen import Transformer
from tests.fixtures.tiny_lms import PassCounter

# tokens, and width and height of the pixels that the tiny decoder makes of them
WANTED = {
    "janus": (16, (8, 8)), "emu3": (15, (8, 6)), "chameleon": (64, (16, 16)),
    "lumina-mgpt": (10, (64, 32)), "imagegpt": (64, (8, 8)), "glm-image": (246, (128, 96)),
    "llamagen-c2i": (16, (64, 64)), "llamagen-t2i": (16, (64, 64)),
}  # fmt: skip
GUIDED = [family for family in FAMILIES if family not in ("imagegpt", "glm-image")]
Opener = Callable[[str], TextToImage]


@pytest.fixture(scope="module")
def opened(built: Callable[[str], Path]) -> Opener:
    """Opens a family's tiny checkpoint, once."""
    made: dict[str, TextToImage] = {}

    def open_family(family: str) -> TextToImage:
        if family not in made:
            made[family] = TextToImage.from_pretrained(built(family), size=SIZES.get(family))
            if family == "glm-image":
                made[family].image_model.diffusion_options = {"num_inference_steps": 1}  # type: ignore[attr-defined]
        return made[family]

    return open_family


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "janus", "imagegpt"))
def test_pixels_of_a_batch_are_those_of_its_images(opened: Opener, family: str) -> None:
    pipe, seeds = opened(family), [5, 6, 7]
    made = pipe(captions(family), seed=seeds, policy=mmaccel.Jacobi(window=40))
    n_tokens, pixels = WANTED[family]
    assert made.tokens.shape == (3, n_tokens) and [i.size for i in made.images] == [pixels] * 3
    assert made.stats.row_passes < 3 * n_tokens
    alone = pipe(captions(family)[1], seed=seeds[1:2])
    assert abs(_pixels(alone) - _pixels(made)[1]).max() <= 1  # rounding of batched convs
    assert len({tuple(row) for row in made.tokens.tolist()}) == 3


@pytest.mark.parametrize("family", mostly_slow(GUIDED, "janus"))
def test_without_guidance_no_second_branch_runs(opened: Opener, family: str) -> None:
    pipe = opened(family)
    guided = pipe(captions(family), seed=2)
    free = pipe(captions(family), seed=2, guidance_scale=1.0)
    assert (guided.stats.branches, free.stats.branches) == (2, 1)
    assert not torch.equal(free.tokens, guided.tokens)


@pytest.mark.parametrize(
    "family", mostly_slow([each for each in FAMILIES if each != "emu3"], "janus", "imagegpt")
)
def test_negative_prompts_are_refused_where_the_authors_have_none(
    opened: Opener, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, text = opened(family), captions(family)[0]
    with monkeypatch.context() as patch:
        patch.setattr(pipe.model, "reserve", lambda *_: pytest.fail("a run was begun"))
        with pytest.raises(OptionError, match="prompt: expected none for .*; leave it out"):
            pipe([text, text], negative_prompt=[None, "blue"])
    assert pipe(text, negative_prompt="", seed=3).tokens.equal(pipe(text, seed=3).tokens)


@pytest.mark.parametrize("family", ["imagegpt", "janus"])
def test_a_window_may_be_wider_than_the_model(opened: Opener, family: str) -> None:
    pipe = opened(family)
    greedy = pipe(captions(family)[0], temperature=0.0, policy=make_policy("sjd", window=200))
    assert torch.equal(greedy.tokens, pipe(captions(family)[0], temperature=0.0).tokens)


@pytest.mark.parametrize("family", ["emu3", "lumina-mgpt"])
def test_row_ends_stand_where_they_belong(opened: Opener, family: str) -> None:
    pipe = opened(family)
    grid = pipe.image_model.layout
    made = pipe(captions(family), seed=3, policy=make_policy("mc-sjd", window=7))
    tokens = made.tokens.view(3, grid.rows, grid.columns)
    ends = pipe.image_model.window.ids[tokens[..., -1]]  # type: ignore[attr-defined]
    assert (ends == {"emu3": 5, "lumina-mgpt": 8}[family]).all() and (tokens[..., :-1] < 16).all()


def test_prompts_are_what_the_authors_wrote(opened: Opener) -> None:
    """Ids by hand; 32 x 24 pixels are 3 rows of 4 tokens, 64 x 32 one step high and two wide."""
    emu3: Any = opened("emu3").image_model
    words = {word: 27 + k for k, word in enumerate([*WORDS, *NUMBERS])}
    closing = [6, words["3"], words["*"], words["4"], 8]  # "<boi>3*4<wrapper>", height first
    start = emu3.encode("blue cat")
    assert start[:3] == [1, words["blue"], words["cat"]] and start[-5:] == closing
    assert emu3._negative[0] == 1 and emu3._negative[-5:] == closing
    chameleon: Any = opened("chameleon").image_model
    said = chameleon.tokenizer("blue cat", add_special_tokens=False)["input_ids"]
    assert chameleon.encode("blue cat") == [1, *said, 7, 5]
    assert chameleon.unconditional() == [1, 5]
    lumina: Any = opened("lumina-mgpt").image_model
    assert lumina.unconditional() == [5, 28, 29] and lumina.encode("cat")[-4:] == [7, 5, 28, 29]
    said = "Generate an image of 64x32 according to the following prompt:\na cat"
    assert lumina.message("a cat") == said


@pytest.mark.parametrize("negative", [None, "blue cat on grass"])
def test_emu3_is_the_librarys_own(opened: Opener, negative: str | None) -> None:
    """Greedy, against `generate` with the constraint of its manual and a negative prompt."""
    pipe = opened("emu3")
    source: Any = pipe.image_model
    model, caption, (width, height) = source.model, captions("emu3")[0], SIZES["emu3"]
    names, grid = model.model.vocabulary_mapping, pipe.image_model.layout
    ids, unguided = torch.tensor([source.encode(caption)]), torch.tensor([source._negative])
    opening = source.processor.tokenizer.image_wrapper_token_id
    if negative is not None:
        unguided = source.processor(
            text=[negative], return_for_image_generation=True, ratio=f"{width}:{height}",
            image_area=width * height, return_tensors="pt",
        )["input_ids"]  # fmt: skip

    def allowed(_: int, sentence: Tensor) -> list[int]:
        offset = len(sentence) - int((sentence == opening).nonzero()[0])
        is_end = offset % (grid.width + 1) == 0
        return [names.eol_token_id] if is_end else names.image_tokens

    with PassCounter(model) as counter:
        plain = model.generate(
            ids, do_sample=False, max_new_tokens=grid.frame, prefix_allowed_tokens_fn=allowed,
            guidance_scale=3.0, negative_prompt_ids=unguided,
            eos_token_id=None,
        )  # fmt: skip
    policy = mmaccel.Jacobi(window=6)
    made = pipe(caption, temperature=0.0, policy=policy, negative_prompt=negative)
    usual = pipe(caption, temperature=0.0)
    ours = source.window.ids[made.tokens]
    assert torch.equal(ours, plain[:, ids.shape[1] :])
    assert torch.equal(made.tokens, usual.tokens) is (negative is None)
    assert made.stats.passes + made.stats.prefill_passes < counter.passes == 2 * grid.frame
    pixels = model.decode_image_tokens(
        image_tokens=torch.cat([ours, torch.zeros(1, 3).long()], 1),
        height=grid.rows,
        width=grid.width,
    )
    theirs = source.processor.postprocess(list(pixels), return_tensors="PIL.Image.Image")
    assert abs(_pixels(made)[0] - _array(theirs["pixel_values"][0])).max() <= 1  # they cut off


def test_janus_is_the_librarys_own(opened: Opener) -> None:
    from transformers import DynamicCache

    pipe = opened("janus")
    source: Any = pipe.image_model
    texts = [
        source.processor.apply_chat_template([turn(caption)], add_generation_prompt=True)
        for caption in captions("janus")
    ]
    inputs = source.processor(
        text=texts, generation_mode="image", padding=True, return_tensors="pt"
    )
    plain = source.model.generate(
        **inputs, generation_mode="image", do_sample=False, guidance_scale=5,
        **{CACHE: DynamicCache()},
    )  # fmt: skip
    made = pipe(captions("janus"), temperature=0.0)
    assert torch.equal(made.tokens, plain)
    pixels = source.model.decode_image_tokens(plain)
    wanted = source.processor.postprocess(
        list(pixels.permute(0, 3, 1, 2).float()), return_tensors="PIL.Image.Image"
    )
    for image, other in zip(made.images, wanted["pixel_values"]):
        assert abs(_array(image) - _array(other)).max() <= 1


@pytest.mark.parametrize("family", ["chameleon", "lumina-mgpt"])
def test_chameleon_samples_from_its_unmasked_logits(opened: Opener, family: str) -> None:
    """Greedy and guided, against full passes of the body and the head by hand."""
    pipe = opened(family)
    source: Any = pipe.image_model
    body, head, grid = (
        source.window.model.model,
        source.window.model.lm_head,
        pipe.image_model.layout,
    )
    caption, ids = captions(family)[1], source.window.ids.tolist()
    branches, tokens = [source.encode(caption), source.unconditional()], []
    for slot in range(grid.frame):
        if grid.row_end is not None and slot % grid.columns == grid.width:
            tokens.append(ids[grid.row_end])
            continue
        with torch.no_grad():
            c, u = (
                head(body(torch.tensor([b + tokens])).last_hidden_state)[0, -1] for b in branches
            )
        scores = u + source.params.guidance_scale * (c - u)
        tokens.append(max(ids[:16], key=lambda i: float(scores[i])))
    made = pipe(caption, temperature=0.0, top_p=1.0)
    assert source.window.ids[made.tokens[0]].tolist() == tokens
    codes = torch.tensor([body.vocabulary_mapping.bpe2img[i] for i in tokens if i in ids[:16]])
    assert codes.tolist() != [
        i - 10 for i in tokens if i in ids[:16]
    ]  # ids and codes differ in order
    pixels = source.decoder.decode(codes[None])
    assert abs(_pixels(made)[0] - pixels[0].permute(1, 2, 0).mul(255)).max() <= 0.51


def test_chameleons_codes_are_the_librarys_own(opened: Opener) -> None:
    """Our VQGAN, filled from `vqgan.ckpt`, against transformers' encoder of the checkpoint."""
    source: Any = opened("chameleon").image_model
    body = source.window.model.model
    torch.manual_seed(0)
    images = torch.rand(3, 3, 16, 16)
    wanted = body.get_image_tokens(images * 2 - 1)
    codes = torch.tensor([body.vocabulary_mapping.bpe2img[int(i)] for i in wanted.flatten()])
    assert (
        torch.equal(source.decoder.encode(images).flatten(), codes) and len(set(codes.tolist())) > 7
    )


def test_imagegpt_is_the_librarys_own(opened: Opener) -> None:
    pipe = opened("imagegpt")
    source: Any = pipe.image_model
    plain = source.window.model.generate(
        torch.tensor([[32]]), do_sample=False, max_new_tokens=64, eos_token_id=None
    )
    made = pipe("", temperature=0.0)
    assert torch.equal(made.tokens, plain[:, 1:])
    colour = source._palette[made.tokens[0, 9]]  # row 1, column 1
    assert list(made.images[0].getpixel((1, 1))) == [round(float(c + 1) * 127.5) for c in colour]


@pytest.mark.slow
def test_glm_image_is_the_librarys_own(opened: Opener) -> None:
    """Greedy, against `generate` as in the pipeline; then the input of the diffusion model."""
    pipe = opened("glm-image")
    source: Any = pipe.image_model
    inputs = source.pipe.processor.apply_chat_template(
        [[turn(caption)] for caption in captions("glm-image")], tokenize=True, padding=True,
        target_h=96, target_w=128, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    plain = source.model.generate(
        **inputs, do_sample=False, max_new_tokens=246, suppress_tokens=list(range(16, 24))
    )
    made = pipe(captions("glm-image"), temperature=0.0, seed=0)
    assert torch.equal(made.tokens, plain[:, inputs["input_ids"].shape[1] :])
    _, offset, rows, columns = source.pipe._compute_generation_params(
        inputs["image_grid_thw"][:2], is_text_to_image=True
    )
    large = made.tokens[0, offset : offset + rows * columns]
    upsampled = source.pipe._upsample_token_ids(large, rows, columns)
    wanted = source.pipe(
        prompt=captions("glm-image")[0], width=128, height=96, prior_token_ids=upsampled,
        generator=torch.Generator().manual_seed(0), num_inference_steps=1,
    ).images[0]  # fmt: skip
    assert abs(_pixels(made)[0] - _array(wanted)).max() <= 1
    pair = pipe("blue cat", num_images_per_prompt=2, seed=4, temperature=0.0)
    assert torch.equal(*pair.tokens) and pair.images[0].tobytes() != pair.images[1].tobytes()


def test_llamagens_texts_are_those_of_the_authors(built: Callable[[str], Path]) -> None:
    """Greedy tokens of full passes over T5's features with zeros on the left, as in the authors'
    sampling script.
    """
    pipe = TextToImage.from_pretrained(built("llamagen-t2i"), size=SIZES["llamagen-t2i"])
    source: Any = pipe.image_model
    said = captions("llamagen-t2i")
    made = pipe(said, temperature=0.0, guidance_scale=1.0, top_k=0, output_type="tokens")
    model = Transformer(LLAMAGEN_TEXTS)
    model.load_state_dict(read_weights(built("llamagen-t2i")))
    rows, seen = [], torch.zeros(len(said), 8, dtype=torch.bool)
    with torch.no_grad():
        for row, caption in enumerate(said):
            ids = torch.tensor([source.words(caption)["input_ids"]])
            features = source.encoder(ids).last_hidden_state[0]
            rows.append(torch.cat([torch.zeros(8 - len(features), 16), features]))
            seen[row, 8 - len(features) :] = True
        logits = model(model.cls_embedding(torch.stack(rows)), made.tokens, seen)
    assert len(set(seen.sum(1).tolist())) > 1  # of different lengths
    assert torch.equal(logits.argmax(-1), made.tokens)


def test_what_is_recommended_and_what_is_asked_for(opened: Opener) -> None:
    params = {family: opened(family).image_model.params for family in FAMILIES}
    assert {f: (x.guidance_scale, x.temperature, x.top_k, x.top_p) for f, x in params.items()} == {
        "janus": (5.0, 1.0, None, None), "emu3": (3.0, 1.0, 2048, None),
        "chameleon": (3.0, 0.7, None, 0.9), "lumina-mgpt": (4.0, 1.0, 2000, None),
        "imagegpt": (1.0, 1.0, 40, None), "glm-image": (1.0, 0.9, 50, 0.75),
        "llamagen-c2i": (4.0, 1.0, 2000, None), "llamagen-t2i": (7.5, 1.0, 1000, None),
    }  # fmt: skip
    given = choose_params(SamplingParams(3.0, 0.7, 5, 0.9), top_k=0, guidance_scale=None, top_p=1)
    assert given == SamplingParams(3.0, 0.7, None, 1.0)
    pipe = opened("chameleon")
    narrow, wide = pipe("blue cat", seed=1), pipe("blue cat", seed=1, top_p=1.0)
    assert not torch.equal(narrow.tokens, wide.tokens)


def turn(caption: str) -> dict[str, Any]:
    """A prompt as a user message."""
    return {"role": "user", "content": [{"type": "text", "text": caption}]}


def _pixels(made: Any) -> Tensor:
    return torch.stack([_array(image) for image in made.images])


def _array(image: Any) -> Tensor:
    return torch.tensor(list(image.tobytes())).view(image.height, image.width, 3).float()
