"""The data of every model is what it was trained on, and the same on every machine."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmaccel.demo.moving_scenes.data import make_clips
from mmaccel.demo.recall.documents import list_questions as ask_documents
from mmaccel.demo.recall.documents import make_document
from mmaccel.demo.recall.words import ANSWERED, WORDS, make_tokenizer, to_text
from mmaccel.demo.scenes.data import make_scenes
from mmaccel.demo.scenes_vqa.data import KINDS, list_questions, make_examples
from mmaccel.demo.scenes_vqa.processor import BOS, N_WORDS, UNKNOWN, make_processor
from scripts.training import grammar_tasks as tasks
from scripts.training.grammar_tasks import CANVAS, END, MASK, encode_answer
from scripts.training.voices_words import make_sentence
from scripts.training.vqa_tower import split_views

BUSY = make_examples(7, range(30), per_kind=4)
PROCESSOR: Any = make_processor()


def describe(made: tuple[list[Any], list[str], Any]) -> Any:
    scenes, captions, _ = made
    tracks = [[(t.colour, t.shape, t.track, t.radius) for t in s.objects] for s in scenes]
    return captions, tracks


DATA: dict[str, tuple[Callable[[], Any], str]] = {  # what is made, and its digest
    "scenes": (lambda: describe(make_scenes(11, range(60))), "f267b3cf7eeb7dd4"),
    "moving-scenes": (lambda: describe(make_clips(11, range(60))), "78127a85ff0cd574"),
    "scenes-vqa": (
        lambda: [[(q.text, q.answer) for q in row] for row in BUSY.questions],
        "bf534bb935b9621c",
    ),
    "maps": (lambda: BUSY.maps.flatten().bincount().tolist(), "64c278fb6073983b"),
    "recall": (
        lambda: [
            (d.tokens, [(q.prompt, q.answer) for q in d.questions])
            for d in (make_document(7, k, 64 * (1 + k)) for k in range(20))
        ],
        "33e29c8e8fe225f0",
    ),
    "grammar-masked": (
        lambda: [(*tasks.make_example(1, k),) for k in range(200)],
        "45a0564abd513053",
    ),
    "voices": (lambda: [make_sentence(3, k) for k in range(200)], "45c9c6b61aa1ec46"),
}


@pytest.mark.parametrize("name", DATA)
def test_a_seed_gives_the_same_data_for_ever(name: str) -> None:
    make, digest = DATA[name]
    assert hashlib.sha256(repr(make()).encode()).hexdigest()[:16] == digest


PIXELS = {  # of each world, means and deviations of red, green and blue
    "scenes": (make_scenes, 2, (103.2549, 103.2202, 91.8191, 73.547, 65.6747, 63.6169)),
    "moving-scenes": (make_clips, 2, (105.374, 116.4186, 103.5895, 69.4277, 58.8443, 64.9641)),
    "scenes-vqa": (make_examples, 1, (104.0648, 114.4821, 109.3407, 72.7727, 58.0566, 58.4793)),
}


@pytest.mark.parametrize("name", PIXELS)
def test_a_seed_gives_the_same_pixels(name: str) -> None:
    """But for the last bits of a machine's sines and roots."""
    make, place, wanted = PIXELS[name]
    pixels = make(11, range(20))[place].float().movedim(-3, -1).flatten(0, -2)
    found = [*pixels.mean(0).tolist(), *pixels.std(0).tolist()]
    assert found == pytest.approx(wanted, abs=1e-3)


def test_a_busy_scene_depends_on_seed_and_index_alone() -> None:
    some, alone = make_examples(5, [3, 9, 4], 2), make_examples(5, [9], 2)
    assert some.scenes[1] == alone.scenes[0] and some.questions[1] == alone.questions[0]
    assert torch.equal(some.images[1], alone.images[0])
    assert torch.equal(some.maps[1], alone.maps[0])
    assert not torch.equal(make_examples(6, [9], 0).images, alone.images)
    assert Counter(q.kind for _, q in list_questions(3)) == dict.fromkeys(KINDS, 3)
    asked = Counter(question.task for _, question in ask_documents(3, 96))
    assert asked == dict.fromkeys(ANSWERED, 3)


def test_the_processor_knows_every_word_and_cuts_views() -> None:
    images = [*BUSY.images[:12]]
    inputs = PROCESSOR(images=images, text=["<image>"] * 12, padding=True, return_tensors="pt")
    assert torch.allclose(inputs["pixel_values"], split_views(BUSY.images[:12]), atol=1e-6)
    tokenizer = PROCESSOR.tokenizer
    assert len(tokenizer) == N_WORDS
    for question in (q for row in BUSY.questions for q in row):
        text = f"{question.text} {question.answer}"
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == BOS and UNKNOWN not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("?", " ?")


def test_words_of_recall_and_back() -> None:
    tokenizer, document = make_tokenizer(), make_document(7, 0, 128)
    text = to_text(document.tokens[1:])
    ids = tokenizer(text)["input_ids"]
    assert tuple(ids) == document.tokens and len(tokenizer) == len(WORDS)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_grammar_refuses_what_is_almost_right() -> None:
    answers = tasks.right_answers(("replace", "a", "b", "c"))
    right = encode_answer(("a", "z", "c"))
    assert tasks.decode_answer(right) in answers
    for wrong in (
        encode_answer(("z", "z", "c")),
        [*right[:-1], right[0]],  # something behind the end
        [right[0]] * CANVAS,  # no end
        [MASK, *right[1:]],
        [END] * CANVAS,
    ):
        assert tasks.decode_answer(wrong) not in answers
