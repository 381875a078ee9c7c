"""The model card of `scenes-masked`, written from the measured figures alone."""

from __future__ import annotations

from typing import Any

_HEAD = """# scenes-masked

A small masked text-to-image model, made by this repository: the pictures, captions, picture
tokens, words and checker of [`scenes`](../scenes/README.md), filled in any order instead of one
after the other. It exists so that window and canvas decoding can be compared on equal ground.

* **Generator**: `LlamaForCausalLM`, {parameters:.2f} M parameters, float16 on disk, run with an
  explicit attention mask of four dimensions that hides nothing but padding. Ids are those of
  `scenes` and one more, {mask}, the mask (`mask_token_id`).
* **Logits** of the token at position i stand at position i - {shift} (`logit_shift`).
* **Trained** from the weights of `scenes`: a number of slots, uniform on 1..256 and spread evenly
  over the batch, is hidden in each picture, and the loss is the cross-entropy there. {weighting}
* **Picture tokenizer**: that of `scenes`; it is not copied here.

The conditional laws for different sets of hidden slots come from one network and need not agree
with one joint law; the law of this model is that of a decoder that it is used with.

## Figures

| what | value |
| --- | --- |
"""
_WEIGHTINGS = {
    1.0: "Pictures weigh the same whatever the number, so its expectation bounds the negative "
    "log-likelihood per token.",
    0.0: "Hidden tokens weigh the same, so pictures with many weigh more.",
}


def write_masked_card(card: dict[str, Any]) -> str:
    """The card's text.

    Args:
        card: content of `card.json`.

    Returns:
        Markdown.
    """
    loss, cost, machine = card["generator"], card["training"], card["measured_with"]
    text = _HEAD.format(
        parameters=card["parameters"] / 1e6,
        mask=card["mask_token_id"],
        shift=card["logit_shift"],
        weighting=_WEIGHTINGS.get(card["power"], ""),
    )
    text += _row(
        f"bound on the validation loss, {loss['validation_pictures']} pictures",
        f"{loss['validation_nats_per_token']} nats, "
        f"{loss['validation_bits_per_token']} bits per token",
    )
    text += _row(
        "training",
        f"{cost['generator_steps']} steps, {cost['generator_pictures']} pictures "
        f"({cost['distinct_pictures']} distinct), {cost['generator_minutes']} min",
    )
    text += _row(
        "device", f"{machine['device']}, {machine['cores']} cores, torch {machine['torch']}"
    )
    text += (
        "\n## Loss by share of hidden slots\n\n| hidden | bits per hidden token |\n| --- | --- |\n"
    )
    text += "".join(
        _row(f"{float(k):.0%}", str(v)) for k, v in loss["bits_per_hidden_token"].items()
    )
    text += (
        "\n## The checker's verdicts\n\nShares of captions, %, with ± half of the 95 % interval. "
    )
    text += "Decoder: the slots of a pass are chosen first, then drawn.\n\n"
    names = ("background", "colours", "shapes", "sizes", "relations", "whole")
    head = ("order", "passes", "guidance", "captions", "ground", *names[1:-1], "whole caption")
    text += _cells(head) + _cells(["---"] * len(head))
    for s in card["samples"]:
        scores = [f"{100 * s['scores'][k]:.1f} ± {100 * s['half_widths'][k]:.1f}" for k in names]
        front = [s["order"], s["passes"], f"{s['guidance_scale']:g}", s["captions"]]
        text += _cells([*map(str, front), *scores])
    text += "\n## Validation bound while training\n\n| step | nats per token |\n| --- | --- |\n"
    text += "".join(_row(k, str(v)) for k, v in cost["validation_nats_by_step"].items())
    return text + f"\n## Made by\n\n```\n{card['command']}\n```\n"


def _cells(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _row(name: str, value: str) -> str:
    return _cells((name, value))
