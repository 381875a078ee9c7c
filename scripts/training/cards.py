"""The cards of the embedded models, each written from the figures of its `card.json` alone.

A card is Markdown, the `README.md` next to the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mmaccel.demo.grammar.tasks import CANVAS, TASKS

_VERDICTS = ("background", "colours", "shapes", "sizes", "relations", "whole")
_VERDICT_HEADS = ("ground", "colours", "shapes", "sizes", "relations", "whole caption")

_SCENES = """# scenes

A small text-to-image model made by this repository on images it draws itself: captioned
scenes of 64x64 pixels. It exists so that decoding policies can be tried, compared and proved on
a real model without a download. It knows nothing of the world beyond seven colours, five shapes
and five grounds.

* **Image tokenizer**: convolutional autoencoder with finite scalar quantization
  (arXiv 2309.15505), 4x4 pixels to one of {vocab} codes, 256 tokens an image,
  {tokenizer_parameters} parameters.
* **Generator**: `LlamaForCausalLM`, {parameters} parameters, float16 on disk. Ids 0..{last_code}
  are image tokens, then bos, boi, pad and the words (`words.json`). A prompt is
  `[bos, words..., boi]`; the unconditional prompt is `[bos, boi]`.
* **Captions**: `a small red circle above a large blue square on grass`. The first object may
  stand in relation to two others (`... and left of a white star`). Sizes, articles and the
  ground may be left out. Colours do not repeat within a caption.

## Figures

"""


def write_scenes_card(card: dict[str, Any]) -> str:
    """The card of `scenes`.

    Args:
        card: content of `card.json`.

    Returns:
        Markdown.
    """
    tokenizer, generator, cost = card["tokenizer"], card["generator"], card["training"]
    text = _SCENES.format(
        vocab=tokenizer["vocab_size"],
        last_code=tokenizer["vocab_size"] - 1,
        parameters=_millions(card["parameters"]),
        tokenizer_parameters=_millions(card["tokenizer_parameters"]),
    )
    psnr = f"tokenizer PSNR, {tokenizer['psnr_pictures']} unseen images"
    text += _table(
        ("what", "value"),
        [
            (psnr, f"{tokenizer['psnr_db']} dB"),
            ("codes in use", f"{tokenizer['codes_used']} of {tokenizer['vocab_size']}"),
            ("validation loss", _loss(generator)),
            (
                "tokenizer training",
                f"{cost['tokenizer_steps']} steps, {cost['tokenizer_minutes']} min",
            ),
            ("generator training", _cost(cost)),
            ("device", _device(card)),
        ],
    )
    text += "\n## The checker's verdicts\n\nShares of captions, %. "
    text += "The checker is measured on real images too: it errs as well.\n\n"
    count = str(tokenizer["checker_pictures"])
    real = [f"{100 * tokenizer['checker_on_pictures'][k]:.1f}" for k in _VERDICTS]
    again = [f"{100 * tokenizer['checker_on_reconstructions'][k]:.1f}" for k in _VERDICTS]
    drawn = [
        (
            f"`{sample['policy']}`, guidance {sample['guidance_scale']:g}",
            str(sample["captions"]),
            *_verdicts(sample),
        )
        for sample in card["samples"]
    ]
    text += _table(
        ("images", "captions", *_VERDICT_HEADS),
        [
            ("drawn by the data maker", count, *real),
            ("the same through the tokenizer", count, *again),
            *drawn,
        ],
    )
    text += "\nGenerated at temperature 1; ± is half of the 95 % interval.\n"
    text += _unseen(card["samples"][1])
    text += "\n## Validation loss while training\n\n" + _by_step(cost, "nats per token")
    text += "\n## Acceptance against training step\n\nTokens a pass, 16 fresh captions.\n\n"
    text += _table(card["acceptance"][0], [map(str, row.values()) for row in card["acceptance"]])
    return text + _made_by(card)


def _unseen(sample: dict[str, Any]) -> str:
    """How the captions that training never had, as text, come out."""
    new = sample.get("unseen", {"captions": 0})
    if not new["captions"]:
        return ""
    return (
        f"\nShort captions repeat: {sample['captions'] - new['captions']} of the "
        f"{sample['captions']} occur, word by word, among the training captions too (with "
        f"other images). Of the {new['captions']} that do not, colours are right in "
        f"{100 * new['colours']:.1f} % and whole captions in {100 * new['whole']:.1f} % "
        f"(`{sample['policy']}`, guidance {sample['guidance_scale']:g}).\n"
    )


_SCENES_MASKED = """# scenes-masked

A small masked text-to-image model, made by this repository: the images, captions, image
tokens, words and checker of [`scenes`](../scenes/README.md), filled in any order instead of one
after the other. It exists so that window and canvas decoding can be compared on equal ground.

* **Generator**: `LlamaForCausalLM`, {parameters} parameters, float16 on disk, run with an
  explicit attention mask of four dimensions that hides nothing but padding. Ids are those of
  `scenes` and one more, {mask}, the mask (`mask_token_id`).
* **Logits** of the token at position i stand at position i - {shift} (`logit_shift`).
* **Trained** from the weights of `scenes`: a number of slots, uniform on 1..256 and spread evenly
  over the batch, is hidden in each image, and the loss is the cross-entropy there. {weighting}
* **Image tokenizer**: that of `scenes`; it is not copied here.

The conditional distributions for different sets of hidden slots come from one network and need not
agree with one joint distribution. The distribution of this model is that of a decoder that it is
used with.

## Figures

"""
_WEIGHTINGS = {
    1.0: "Images weigh the same whatever the number, so its expectation bounds the negative "
    "log-likelihood per token.",
    0.0: "Hidden tokens weigh the same, so images with many weigh more.",
}


def write_masked_card(card: dict[str, Any]) -> str:
    """The card of `scenes-masked`.

    Args:
        card: content of `card.json`.

    Returns:
        Markdown.
    """
    loss, cost = card["generator"], card["training"]
    text = _SCENES_MASKED.format(
        parameters=_millions(card["parameters"]),
        mask=card["mask_token_id"],
        shift=card["logit_shift"],
        weighting=_WEIGHTINGS.get(card["power"], ""),
    )
    bound = f"bound on the validation loss, {loss['validation_pictures']} images"
    text += _table(
        ("what", "value"),
        [(bound, _loss(loss)), ("training", _cost(cost)), ("device", _device(card))],
    )
    text += "\n## Loss by share of hidden slots\n\n"
    shares = loss["bits_per_hidden_token"].items()
    text += _table(
        ("hidden", "bits per hidden token"), [(f"{float(k):.0%}", str(v)) for k, v in shares]
    )
    text += "\n## The checker's verdicts\n\n"
    text += "Shares of captions, %, with ± half of the 95 % interval. "
    text += "Decoder: the slots of a pass are chosen first, then drawn.\n\n"
    rows = [
        (
            s["order"],
            str(s["passes"]),
            f"{s['guidance_scale']:g}",
            str(s["captions"]),
            *_verdicts(s),
        )
        for s in card["samples"]
    ]
    text += _table(("order", "passes", "guidance", "captions", *_VERDICT_HEADS), rows)
    text += "\n## Validation bound while training\n\n" + _by_step(cost, "nats per token")
    return text + _made_by(card)


_GRAMMAR_MASKED = """# grammar-masked

A tiny masked text model, made by this repository on prompts it writes itself. It exists because
confidence rules for unmasking several positions at once break on tasks whose positions depend on
each other, and because here the true distribution is known.

* **Model**: `LlamaForCausalLM`, {parameters} parameters, float16 on disk, run with an
  explicit attention mask of four dimensions that hides nothing but padding. Logits stand at the
  position of their token.
* **Input**: `[bos, task, words..., ask]`, then a canvas of {canvas} slots: the answer, and `end` in
  every slot after it. Words and ids are in `words.json`.

| task | prompt | answers | right ones |
| --- | --- | --- | --- |
| copy | `copy d a d b` | `d a d b` | one |
| reverse | `reverse d a d b` | `b d a d` | one |
| sort | `sort d a d b` | `a b d d` | one |
| replace | `replace d a d b` | `d z d b`, ... | one for each letter |
| shuffle | `shuffle d a b` | `b d a`, ... | every order |
| add | `add 0 7 + 9 5` | `1 0 2` | one |
| tell | `tell ann cat` | `the red cat likes ann .`, ... | three stories, four colours |

Where several answers are right, the data's distribution is uniform over them.

## Figures

"""


def write_grammar_card(card: dict[str, Any]) -> str:
    """The card of `grammar-masked`.

    Args:
        card: content of `card.json`.

    Returns:
        Markdown.
    """
    loss, cost = card["generator"], card["training"]
    text = _GRAMMAR_MASKED.format(parameters=_millions(card["parameters"]), canvas=CANVAS)
    bound = f"bound on the validation loss, {loss['validation_examples']} examples"
    training = f"{cost['generator_steps']} steps, {cost['generator_pictures']} examples, "
    text += _table(
        ("what", "value"),
        [
            (bound, f"{loss['validation_nats_per_slot']} nats per slot"),
            (
                "entropy of the true distribution",
                f"{loss['entropy_nats_per_slot']} nats per slot",
            ),
            ("training", f"{training}{cost['generator_minutes']} min"),
            ("device", _device(card)),
        ],
    )
    text += "\n## Right answers\n\nShares, %, of "
    text += f"{card['prompts_per_task']} fresh prompts a task, temperature 1. Decoder: the slots "
    text += "of a pass are chosen first, then drawn.\n\n"
    text += _table(
        ("order", "slots a pass", *TASKS),
        [
            (row["order"], str(row["per_step"]), *(f"{100 * row[task]:.1f}" for task in TASKS))
            for row in card["answers"]
        ],
    )
    text += "\n## Distance from the true distribution\n\nMean total variation, one slot a pass, "
    text += "exact by enumeration of the right answers, "
    text += f"{card['laws_prompts']} fresh prompts a task.\n\n"
    text += _table(card["laws"][0], [map(str, row.values()) for row in card["laws"]])
    text += "\n## Validation bound while training\n\n" + _by_step(cost, "nats per slot")
    return text + _made_by(card)


_SCENES_FEATURES = """# scenes-features

Features of 64x64 images of captioned scenes, for Fréchet and kernel distances without a
download. A network of {parameters} parameters (float16 on disk) was trained by this repository, on
images it draws itself, to name what is in them; what its heads read are 64 numbers an image. It
knows scenes and nothing else, and its distances compare with none over other features, such as FID.

## What it reads right

Of {count} unseen images, %.

"""
_READ = {
    "ground": "ground, of images",
    "colours": "which colours are there, all of an image",
    "shapes": "shape, of objects",
    "sizes": "size, of objects",
    "directions": "which of two objects is above, below, left or right, of pairs",
}


def write_features_card(card: dict[str, Any]) -> str:
    """The card of `scenes-features`.

    Args:
        card: content of `card.json`.

    Returns:
        Markdown.
    """
    count, cost = card["pictures"], card["training"]
    parameters = f"{card['parameters']:,}".replace(",", " ")
    text = _SCENES_FEATURES.format(parameters=parameters, count=count)
    right = card["right"].items()
    text += _table(("what", "right"), [(_READ[k], f"{100 * v:.1f}") for k, v in right])
    text += f"\n## What it sees\n\nDistances of {count} images, damaged, from {count} others.\n\n"
    distances = card["distances"].items()
    text += _table(
        ("damage", "Fréchet distance", "KID"),
        [(name, f"{row['frechet']:.3f}", f"{row['kid']:.5f}") for name, row in distances],
    )
    text += (
        "\nNoise: standard deviation in 0..1 of full range; blur: side of the square in pixels.\n"
        f"\nTrained on {cost['pictures']} images, {cost['epochs']} epochs, "
        f"{cost['minutes']} min; {_device(card)}.\n"
    )
    return text + _made_by(card)


_SCENES_VQA = """# scenes-vqa

A small vision-language model made by this repository: `LlavaNextForConditionalGeneration` of
transformers, {parameters} parameters, float16 on disk, with a CLIP tower ({tower}, a class
token) and a Llama. It answers questions about synthetic scenes of 80x80 pixels with three to
seven objects, signs, dots and clutter, and knows nothing else. An image is read as a whole at
half size and as 2x2 tiles: {visual} visual tokens. It exists so that what is done to visual
tokens can be measured without a download.

```python
model, processor = mmaccel.load_demo("scenes-vqa")
inputs = processor(
    images=[image], text=["<image> what colour is the star?"], padding=True, return_tensors="pt"
)
answer = model.generate(**inputs, max_new_tokens=4)[:, inputs["input_ids"].shape[1] :]
processor.batch_decode(answer, skip_special_tokens=True)
```

## Right answers

Greedy, all visual tokens, images that training never saw. *Unseen*: the commonest answer that
the same text had in training, without looking.

"""
_KINDS = {
    "colour": "what colour is the star?",
    "shape": "what shape is the small red object?",
    "size": "is the red star small or large?",
    "count": "how many red objects are there?",
    "relation": "is the red star left of the blue ring?",
    "neighbour": "which object is above the red star?",
    "exists": "is there a red star?",
    "sign": "what number is on the green sign?",
    "dot": "what colour is the dot on the red square?",
    "side": "is the red star left or right?",
    "all": "",
}


def write_vqa_card(card: dict[str, Any]) -> str:
    """The card of `scenes-vqa`.

    Args:
        card: content of `card.json`.

    Returns:
        Markdown.
    """
    text = _SCENES_VQA.format(
        parameters=_millions(card["parameters"]),
        tower=_millions(card["tower_parameters"]),
        visual=card["visual_tokens"],
    )
    rows = []
    for kind, example in _KINDS.items():
        found, unseen = card["right"][kind], card["unseen"][kind]
        low, high = (f"{100 * found[k]:.1f}" for k in ("low", "high"))
        share = f"{100 * found['right']:.1f} ({low} to {high})"
        rows.append((kind, example, share, f"{100 * unseen['right']:.1f}"))
    text += _table(("kind", "such as", "right, % (95 % interval)", "unseen, %"), rows)
    text += f"\n{card['right']['colour']['questions']} questions of each kind.\n\n## Training\n\n"
    stages = card["training"].items()
    text += _table(
        ("stage", "steps", "images", "minutes", "validation loss"),
        [
            (name, f"{c['steps']}", f"{c['images']}", f"{c['minutes']}", f"{c['validation']}")
            for name, c in stages
        ],
    )
    text += f"\nMinutes are of one thread. Measured on {_device(card)}.\n"
    text += "".join(f"\n{note}\n" for note in card["notes"])
    return text + _made_by(card)


_RECALL = """# recall

A small language model made by this repository: `LlamaForCausalLM` of transformers, {parameters}
parameters, float16 on disk, {depth} layers of {heads} query heads and {key_heads} key heads of
{width}. It answers questions about long synthetic documents, of words that stand for nothing, and
knows nothing else. It exists so that what is done to caches and to attention can be measured
without a download.

```python
model, tokenizer = mmaccel.load_demo("recall")
inputs = tokenizer("f1 k17 v3 f9 x4 v9 f2 x4 v1 recall k17 = k17", return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=10)[:, inputs["input_ids"].shape[1] :]
tokenizer.batch_decode(answer, skip_special_tokens=True)
```

Documents, tasks and words: `mmaccel.demo.recall`. What cache policies cost on it:
`mmaccel evaluate cache recall`.

## Right answers

Greedy, full cache, documents that training never saw, one question each; an answer is right in
every token, or wrong. *All* leaves out counting, which the model has not learnt: a guess is right
one time in three. `mmaccel evaluate cache` does not ask it.

"""
_TASKS = {
    "recall": ("recall k17 = k17", "v3"),
    "needles": ("needles k3 k9 k17 = k3", "v8 k9 v8 k17 v3"),
    "last": ("last x4 = x4", "v1"),
    "copy": ("copy s2 = s2", "l5 l60 l1 l33"),
    "count": ("count i7 = i7", "n2"),
    "all": ("", ""),
}


def write_recall_card(card: dict[str, Any]) -> str:
    """The card of `recall`.

    Args:
        card: content of `card.json`.

    Returns:
        Markdown.
    """
    text = _RECALL.format(parameters=_millions(card["parameters"]), **card["sizes"])
    lengths = list(card["right"])
    rows = []
    for task, (question, answer) in _TASKS.items():
        shares = []
        for length in lengths:
            found = card["right"][length][task]
            low, right, high = (f"{100 * found[k]:.1f}" for k in ("low", "right", "high"))
            shares.append(f"{right} ({low} to {high})")
        rows.append((task, question, answer, *shares))
    heads = ("task", "such as", "answer", *(f"{length} tokens, % (95 %)" for length in lengths))
    text += _table(heads, rows)
    n_questions = card["right"][lengths[0]]["recall"]["questions"]
    text += f"\n{n_questions} questions of each task at each length.\n\n## Training\n\n"
    text += _table(
        ("stage", "documents of", "tokens a step", "steps", "minutes", "validation loss"),
        [
            (
                name,
                ", ".join(map(str, c["lengths"])),
                f"{c['batch']}",
                f"{c['done']}",
                f"{c['minutes']}",
                f"{c['validation']}",
            )
            for name, c in card["training"].items()
        ],
    )
    text += f"\nMinutes are of one thread. Measured on {_device(card)}.\n"
    text += "".join(f"\n{note}\n" for note in card["notes"])
    return text + _made_by(card)


_STDLIB = """# stdlib

A small language model made by this repository: `LlamaForCausalLM` of transformers, {parameters}
parameters, float16 on disk, {depth} layers of {heads} query heads and {key_heads} key head of
{width}, {words} byte pairs, {longest} positions. It continues Python source, and was trained on
the modules of the standard library of Python {python} ({training} of them; tests, tables and
encodings left out). One module in 20 was held out, by the hash of its path: the same ones on every
machine. It exists so that drafts for text can be measured without a download.

```python
model, tokenizer = mmaccel.load_demo("stdlib")
inputs = tokenizer("def read(self, size=-1):\\n", return_tensors="pt")
with mmaccel.attach(model, mmaccel.Jacobi(window=8, drafts="ngram")):
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0])
```

Modules and prompts: `mmaccel.demo.stdlib`. Two drafters stand beside it, and say in their JSON how
they were made: an EAGLE head, `drafts=mmaccel.Eagle(f"{{model.name_or_path}}/head")`, and a coarse
model, `drafts=mmaccel.Coarse(f"{{model.name_or_path}}/coarse")`, which loses. What they save:
`docs/text-drafts.md`.

## Bits a byte

On {held_out} held-out modules, {held_out_bytes} bytes, {bytes_a_token} bytes a token. gzip and xz
compress each module by itself; the n-gram is one of the same byte pairs and the same training
modules, interpolated (Witten and Bell, method C).

"""


def write_stdlib_card(card: dict[str, Any]) -> str:
    """The card of `stdlib`.

    Args:
        card: content of `card.json`.

    Returns:
        Markdown.
    """
    facts = {"parameters": _millions(card["parameters"]), **card["sizes"], **card["modules"]}
    text = _STDLIB.format(**facts)
    text += _table(
        ("what", "bits a byte"),
        [(name, f"{bits:.3f}") for name, bits in card["bits_a_byte"].items()],
    )
    cost = card["training"]
    text += "\n## Training\n\n"
    text += _table(
        ("steps", "tokens of a piece", "pieces a step", "nats a token", "bits a byte"),
        [
            (
                str(row["step"]),
                str(row["length"]),
                str(row["batch"]),
                f"{row['validation']:.3f}",
                f"{row['bits_a_byte']:.3f}",
            )
            for row in cost["curve"]
        ],
    )
    text += (
        f"\n{cost['minutes']} minutes of one thread. The figures are of held-out pieces as long "
    )
    text += "as those that were learned from. "
    text += f"Measured on {_device(card)}.\n"
    text += "".join(f"\n{note}\n" for note in card["notes"])
    return text + _made_by(card)


_VOICES = """# voices

A small text-to-speech model made by this repository. It says sentences of {words} words and the
digits, at most {longest} words each, with {n_speakers} voices ({speakers}). What it learnt from was
made by espeak-ng, of which nothing is here: neither program nor sound. It exists so that decoding
policies can be tried and heard on a real speech model without a download.

* **Codec**: {codec_parameters} parameters, {sample_rate} Hz, finite scalar quantization
  (arXiv 2309.15505). Two layouts over one encoder and one decoder: flat, one of {flat_size} codes
  every 20 ms ({flat_bits_a_second} bits a second), and stacked, {books} books of {book_size} codes
  every 40 ms ({stacked_bits_a_second} bits a second). It writes magnitudes; their phases are found
  by Griffin-Lim.
* **Generator**: `LlamaForCausalLM`, {parameters} parameters, float16 on disk, over phonemes and the
  flat codes. `voices.json` has the phonemes of every word.
{depth}
```python
pipe = mmaccel.TextToSpeech.from_pretrained("voices")
(made,) = pipe("the red bird sings", policy=mmaccel.Jacobi(window=16), seed=[0]).utterances
```

## The codec and the judge

The judge is a convolutional recogniser of phonemes, trained by the same recipe and not shipped; a
phone error rate counts its edits. Its own error is that on espeak's sound of held-out sentences.

"""


_VOICES_DEPTH = """\
* **Generator with a depth decoder**, in `depth/`: `CsmForConditionalGeneration` over the stacked
  codes, 16 a frame of 160 ms. `mmaccel.demo.voices.stacked.open_stacked()` opens it, for windows
  along depth.
"""


def write_voices_card(card: dict[str, Any]) -> str:
    """The card of `voices`.

    Args:
        card: content of `card.json`.

    Returns:
        Markdown.
    """
    codec, judge = card["codec"], card["judge"]
    text = _VOICES.format(
        depth=_VOICES_DEPTH if "stacked" in card["training"] else "",
        words=card["words"],
        longest=card["longest"],
        n_speakers=len(card["speakers"]),
        speakers=", ".join(card["speakers"]),
        codec_parameters=_millions(codec["parameters"]),
        parameters=_millions(card["parameters"]),
        **{k: v for k, v in codec.items() if k != "parameters"},
    )
    utterances = judge["utterances"]
    text += _table(
        ("sound", f"phone error rate, % ({utterances} utterances)", "mel distance, nats"),
        [
            ("espeak's", f"{100 * judge['errors real']:.1f}", "0"),
            ("through the flat codes", f"{100 * judge['errors flat']:.1f}", f"{codec['mel_flat']}"),
            (
                "through the stacked codes",
                f"{100 * judge['errors stacked']:.1f}",
                f"{codec['mel_stacked']}",
            ),
        ],
    )
    text += f"\n{codec['codes_used']} of {codec['flat_size']} flat codes are in use.\n"
    text += "\n## What it says\n\n"
    text += _table(
        ("policy", "exactness", "tokens a pass", "phone error rate, %", "cut"),
        [
            (
                f"`{sample['policy']}`",
                sample["exactness"],
                f"{sample['tokens_per_pass']:.2f}",
                f"{100 * sample['errors']:.1f}",
                f"{sample['cut']}",
            )
            for sample in card["samples"]
        ],
    )
    if card["stacked_samples"]:
        text += "\nThe model with a depth decoder, passes of that decoder:\n\n"
        text += _table(
            ("policy", "exactness", "passes a frame", "phone error rate, %", "cut"),
            [
                (
                    f"`{sample['policy']}`",
                    sample["exactness"],
                    f"{sample['passes_per_frame']:.2f}",
                    f"{100 * sample['errors']:.1f}",
                    f"{sample['cut']}",
                )
                for sample in card["stacked_samples"]
            ],
        )
    distance = card["distance"]
    text += (
        f"\n{card['samples'][0]['sentences']} sentences that training did not draw, temperature 1. "
        f"Mel distance to espeak's sound of the same sentence, along the best alignment, "
        f"{distance['mel']} nats ({distance['mel_of_other_sentences']} to that of another "
        f"sentence); duration {distance['duration_ratio']} of espeak's.\n\n## Training\n\n"
    )
    text += _table(
        ("layout", "utterances", "steps", "minutes", "validation, nats a code"),
        [
            (
                layout,
                f"{cost['utterances']}",
                f"{cost['done']} of {cost['steps']}",
                f"{cost['minutes']}",
                f"{cost['validation']}",
            )
            for layout, cost in card["training"].items()
        ],
    )
    text += f"\nMinutes are of one thread. Measured on {_device(card)}.\n"
    text += "".join(f"\n{note}\n" for note in card["notes"])
    return text + _made_by(card)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = tuple(heads)
    lines = (heads, ("---",) * len(heads), *rows)
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _verdicts(sample: dict[str, Any]) -> list[str]:
    scores, halves = sample["scores"], sample["half_widths"]
    return [f"{100 * scores[k]:.1f} ± {100 * halves[k]:.1f}" for k in _VERDICTS]


def _by_step(cost: dict[str, Any], unit: str) -> str:
    steps = cost["validation_nats_by_step"].items()
    return _table(("step", unit), [(step, str(nats)) for step, nats in steps])


def _loss(loss: dict[str, Any]) -> str:
    nats, bits = loss["validation_nats_per_token"], loss["validation_bits_per_token"]
    return f"{nats} nats, {bits} bits per token"


def _cost(cost: dict[str, Any]) -> str:
    return (
        f"{cost['generator_steps']} steps, {cost['generator_pictures']} images "
        f"({cost['distinct_pictures']} distinct), {cost['generator_minutes']} min"
    )


def _device(card: dict[str, Any]) -> str:
    machine = card["measured_with"]
    return f"{machine['device']}, {machine['cores']} cores, torch {machine['torch']}"


def _made_by(card: dict[str, Any]) -> str:
    return f"\n## Made by\n\n```\n{card['command']}\n```\n"


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"


_MOVING_SCENES = """# moving-scenes

A small text-to-video model made by this repository: `LlamaForCausalLM` of transformers,
{parameters} parameters, float16 on disk, over the tokens of a convolutional tokenizer with finite
scalar quantization, {tokenizer_parameters} parameters, 8 x 8 pixels a token; {megabytes} MB in all.
It draws clips of 10 frames of 64 x 64 pixels, 64 tokens a frame: one or two coloured shapes that
rest, move, appear, vanish or hit each other. It knows these and nothing else, and exists so that
what is done to generators of video can be measured and watched without a download.

```python
pipe = mmaccel.TextToVideo.from_pretrained("moving-scenes")
made = pipe("a red circle moves left over grass", policy=mmaccel.Jacobi(window=32), seed=0)
made.clips[0].frames  # [10, 64, 64, 3]
```

Words, renderer and tracker: `mmaccel.demo.moving_scenes`.

## Figures

"""
_TRACKED = ("background", "colours", "shapes", "events", "directions", "speeds", "whole")


def write_moving_card(card: dict[str, Any]) -> str:
    """The card of `moving-scenes`.

    Args:
        card: content of `card.json`.

    Returns:
        Markdown.
    """
    frames = card["tokenizer"]
    loss = card["generator"]
    cost = card["training"]
    text = _MOVING_SCENES.format(
        parameters=_millions(card["parameters"]),
        tokenizer_parameters=_millions(card["tokenizer_parameters"]),
        megabytes=card["megabytes"],
    )
    text += _table(
        ("what", "value"),
        [
            ("frames, encoded and decoded", f"{frames['psnr_db']} dB"),
            ("codes that occur", f"{frames['codes_used']} of {frames['vocab_size']}"),
            ("tokens equal to the frame before, data", f"{100 * frames['stay']:.1f} %"),
            ("validation loss", f"{loss['validation']:.3f} nats a token"),
            ("of first frames", f"{loss['first_frame']:.3f} nats a token"),
            ("of the other frames", f"{loss['later_frames']:.3f} nats a token"),
            (
                "training",
                f"{cost['generator_steps']} steps, {cost['generator_minutes']} min",
            ),
            ("device", _device(card)),
        ],
    )
    text += "\n## What the tracker reads right\n\nShares, %. The first two rows are its error and "
    text += f"the tokenizer's, on {frames['clips']} clips of the data.\n\n"
    rows = [
        ("clips of the data", frames["tracker_on_clips"]),
        ("the same, encoded and decoded", frames["tracker_on_reconstructions"]),
    ]
    rows += [
        (f"drawn, guidance {row['guidance_scale']:g}, {row['captions']} captions", row["scores"])
        for row in card["samples"]
    ]
    text += _table(
        ("clips", *_TRACKED),
        [(name, *(f"{100 * scores[k]:.1f}" for k in _TRACKED)) for name, scores in rows],
    )
    text += "\n## Tokens a pass\n\nCounts; each policy draws the same clips.\n\n"
    heads = tuple(card["passes"][0])
    text += _table(heads, [tuple(str(row[head]) for head in heads) for row in card["passes"]])
    text += "\n## Validation loss while training\n\n" + _by_step(cost, "nats a token")
    text += "".join(f"\n{note}\n" for note in card["notes"])
    return text + _made_by(card)


_CLIP_FEATURES = """# moving-scenes-features

Features of clips of 10 frames of 64x64 pixels of moving scenes, for a Fréchet distance without a
download. A network of {parameters} parameters (float16 on disk) was trained by this repository, on
clips it draws itself, to name what happens in them; what its heads read are 48 numbers a clip. It
looks past noise; two more numbers are computed: fine detail, and change from frame to frame.

**Distances over it are called FVD-own, and are never to be compared with published figures**: the
FVD of papers has the features of another network, trained on other videos. It knows moving scenes
and nothing else.
"""
_SPEECH_FEATURES = """# voices-features

Features of speech at 16 kHz, for a Fréchet distance without a download. A network of {parameters}
parameters (float16 on disk) was trained by this repository, on speech that espeak-ng made, to write
down phonemes and to name the speaker; the mean of its columns over 0.64 s are 64 numbers, one
window every 0.32 s.

**Distances over it are called FAD-own, and are never to be compared with published figures**: the
FAD of papers has the features of another network, trained on other sound. It knows espeak's voices
and nothing else.
"""
_SMALL_FEATURES = {  # text, item, and what the network reads
    "moving-scenes-features": (
        _CLIP_FEATURES,
        "clips",
        {
            "ground": "ground, of clips",
            "colours": "which colours are there, all of a clip",
            "hit": "whether one object hits another, of clips",
            "shapes": "shape, of objects",
            "directions": "direction or rest, of objects",
            "speeds": "speed, of objects",
            "events": "appears, vanishes or neither, of objects",
        },
    ),
    "voices-features": (
        _SPEECH_FEATURES,
        "utterances",
        {"phonemes": "phonemes (less edits over those to say)", "speakers": "speaker, of windows"},
    ),
}


def write_small_features_card(card: dict[str, Any]) -> str:
    """The card of `moving-scenes-features` or `voices-features`.

    Args:
        card: content of `card.json`.

    Returns:
        Markdown.
    """
    text, unit, labels = _SMALL_FEATURES[card["name"]]
    cost = card["training"]
    text = text.format(parameters=f"{card['parameters']:,}".replace(",", " "))
    text += f"\n## What it reads right\n\nOf {card['count']} unseen {unit}, %.\n\n"
    right = card["right"].items()
    text += _table(("what", "right"), [(labels[k], f"{100 * v:.1f}") for k, v in right])
    text += f"\n## What it sees\n\nDistances of {card['compared']} {unit}, damaged, from as many "
    text += "others.\n\n"
    distances = card["distances"].items()
    text += _table(
        ("damage", "Fréchet distance"), [(name, f"{value:.2f}") for name, value in distances]
    )
    text += "".join(f"\n{note}\n" for note in card["notes"])
    text += (
        f"\nTrained for {cost['steps']} steps of {cost['batch']} {unit}, {cost['minutes']} min of "
        f"one core; {_device(card)}.\n"
    )
    return text + _made_by(card)
