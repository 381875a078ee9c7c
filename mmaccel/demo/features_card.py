"""The card of `scenes-features`, written from the measured figures alone."""

from __future__ import annotations

from typing import Any

_HEAD = """# scenes-features

Features of 64x64 pictures of captioned scenes, for Fréchet and kernel distances without a
download. A network of {parameters} parameters (float16 on disk) was trained by this repository, on
pictures it draws itself, to name what is in them; what its heads read are 64 numbers a picture. It
knows scenes and nothing else, and its distances compare with none over other features, such as FID.

## What it reads right

Of {pictures} unseen pictures, %.

| what | right |
| --- | --- |
"""
_WORDS = {
    "ground": "ground, of pictures",
    "colours": "which colours are there, all of a picture",
    "shapes": "shape, of objects",
    "sizes": "size, of objects",
    "directions": "which of two objects is above, below, left or right, of pairs",
}


def write_features_card(card: dict[str, Any]) -> str:
    """The card's text.

    Args:
        card: content of `card.json`.

    Returns:
        Markdown.
    """
    count, cost, machine = card["pictures"], card["training"], card["measured_with"]
    text = _HEAD.format(parameters=f"{card['parameters']:,}".replace(",", " "), pictures=count)
    text += "".join(f"| {_WORDS[k]} | {100 * v:.1f} |\n" for k, v in card["right"].items())
    text += f"\n## What it sees\n\nDistances of {count} pictures, damaged, from {count} others.\n\n"
    text += "| damage | Fréchet distance | KID |\n| --- | --- | --- |\n"
    for name, row in card["distances"].items():
        text += f"| {name} | {row['frechet']:.3f} | {row['kid']:.5f} |\n"
    text += (
        "\nNoise: standard deviation in 0..1 of full range; blur: side of the square in pixels.\n"
        f"\nTrained on {cost['pictures']} pictures, {cost['epochs']} epochs, "
        f"{cost['minutes']} min; "
        f"{machine['device']}, {machine['cores']} cores, torch {machine['torch']}.\n"
    )
    return text + f"\n## Made by\n\n```\n{card['command']}\n```\n"
