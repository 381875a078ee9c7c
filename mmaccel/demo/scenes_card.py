"""The model card of `scenes`, written from the measured figures alone."""

from __future__ import annotations

from typing import Any

_HEAD = """# scenes

A small text-to-image model made by this repository on pictures it draws itself: captioned
scenes of 64x64 pixels. It exists so that decoding policies can be tried, compared and proved on
a real model without a download. It knows nothing of the world beyond seven colours, five shapes
and five grounds.

* **Picture tokenizer**: convolutional autoencoder with finite scalar quantization
  (arXiv 2309.15505), 4x4 pixels to one of {vocab} codes, 256 tokens a picture,
  {tokenizer_parameters} parameters.
* **Generator**: `LlamaForCausalLM`, {parameters} parameters, float16 on disk. Ids 0..{last_code}
  are picture tokens, then bos, boi, pad and the words (`words.json`). A prompt is
  `[bos, words..., boi]`; the unconditional prompt is `[bos, boi]`.
* **Captions**: `a small red circle above a large blue square on grass`. The first object may
  stand in relation to two others (`... and left of a white star`). Sizes, articles and the
  ground may be left out. Colours do not repeat within a caption.

## Figures

| what | value |
| --- | --- |
"""


def write_card(card: dict[str, Any]) -> str:
    """The card's text.

    Args:
        card: content of `card.json`.

    Returns:
        Markdown.
    """
    tokenizer, generator, cost = card["tokenizer"], card["generator"], card["training"]
    head = _HEAD.format(
        vocab=tokenizer["vocab_size"],
        last_code=tokenizer["vocab_size"] - 1,
        parameters=_millions(card["parameters"]),
        tokenizer_parameters=_millions(card["tokenizer_parameters"]),
    )
    rows = [
        (
            f"tokenizer PSNR, {tokenizer['psnr_pictures']} unseen pictures",
            f"{tokenizer['psnr_db']} dB",
        ),
        ("codes in use", f"{tokenizer['codes_used']} of {tokenizer['vocab_size']}"),
        (
            "validation loss",
            f"{generator['validation_nats_per_token']} nats, "
            f"{generator['validation_bits_per_token']} bits per token",
        ),
        ("tokenizer training", f"{cost['tokenizer_steps']} steps, {cost['tokenizer_minutes']} min"),
        (
            "generator training",
            f"{cost['generator_steps']} steps, {cost['generator_pictures']} pictures "
            f"({cost['distinct_pictures']} distinct), {cost['generator_minutes']} min",
        ),
        (
            "device",
            f"{card['measured_with']['device']}, {card['measured_with']['cores']} cores, "
            f"torch {card['measured_with']['torch']}",
        ),
    ]
    text = head + "".join(f"| {name} | {value} |\n" for name, value in rows)
    text += "\n## The checker's verdicts\n\nShares of captions, %. "
    text += "The checker is measured on real pictures too: it errs as well.\n\n"
    text += (
        "| pictures | captions | ground | colours | shapes | sizes | relations | whole caption |\n"
        + "| --- " * 8
        + "|\n"
    )
    count = tokenizer["checker_pictures"]
    text += _scores("drawn by the data maker", count, tokenizer["checker_on_pictures"])
    text += _scores(
        "the same through the tokenizer", count, tokenizer["checker_on_reconstructions"]
    )
    for s in card["samples"]:
        name = f"`{s['policy']}`, guidance {s['guidance_scale']:g}"
        text += _scores(name, s["captions"], s["scores"], s["half_widths"])
    text += "\nGenerated at temperature 1; ± is half of the 95 % interval.\n"
    text += _seen(card["samples"])
    text += "\n## Validation loss while training\n\n| step | nats per token |\n| --- | --- |\n"
    text += "".join(f"| {k} | {v} |\n" for k, v in cost["validation_nats_by_step"].items())
    text += "\n## Acceptance against training step\n\nTokens a pass, 16 fresh captions.\n\n"
    text += _acceptance(card["acceptance"])
    return text + f"\n## Made by\n\n```\n{card['command']}\n```\n"


def _scores(
    name: str, count: int, scores: dict[str, float], half_widths: dict[str, float] | None = None
) -> str:
    order = ("background", "colours", "shapes", "sizes", "relations", "whole")
    cells = [f"{100 * scores[k]:.1f}" for k in order]
    if half_widths is not None:
        cells = [f"{cell} ± {100 * half_widths[k]:.1f}" for cell, k in zip(cells, order)]
    return f"| {name} | {count} | " + " | ".join(cells) + " |\n"


def _seen(samples: list[dict[str, Any]]) -> str:
    """How the captions that training never had, as text, come out."""
    new = samples[1].get("unseen", {"captions": 0})
    if not new["captions"]:
        return ""
    return (
        f"\nShort captions repeat: {samples[1]['captions'] - new['captions']} of the "
        f"{samples[1]['captions']} occur, word by word, among the training captions too (with "
        f"other pictures). Of the {new['captions']} that do not, colours are right in "
        f"{100 * new['colours']:.1f} % and whole captions in {100 * new['whole']:.1f} % "
        f"(`{samples[1]['policy']}`, guidance {samples[1]['guidance_scale']:g}).\n"
    )


def _acceptance(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0])
    text = "| " + " | ".join(names) + " |\n" + "| --- " * len(names) + "|\n"
    return text + "".join("| " + " | ".join(str(r[n]) for n in names) + " |\n" for r in rows)


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"
