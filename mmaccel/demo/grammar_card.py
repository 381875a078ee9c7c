"""The model card of `grammar-masked`, written from the measured figures alone."""

from __future__ import annotations

from typing import Any

from mmaccel.demo.grammar_words import CANVAS, TASKS

_HEAD = """# grammar-masked

A tiny masked text model, made by this repository on prompts it writes itself. It exists because
confidence rules for unmasking several positions at once break on tasks whose positions depend on
each other, and because here the true law is known.

* **Model**: `LlamaForCausalLM`, {parameters:.2f} M parameters, float16 on disk, run with an
  explicit attention mask of four dimensions that hides nothing but padding. Logits stand at the
  position of their token.
* **Line**: `[bos, task, words..., ask]`, then a canvas of {canvas} slots: the answer, and `end` in
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

Where several answers are right, the data's law is uniform over them.

## Figures

| what | value |
| --- | --- |
"""


def write_grammar_card(card: dict[str, Any]) -> str:
    """The card's text.

    Args:
        card: content of `card.json`.

    Returns:
        Markdown.
    """
    loss, cost, machine = card["generator"], card["training"], card["measured_with"]
    text = _HEAD.format(parameters=card["parameters"] / 1e6, canvas=CANVAS)
    text += _row(
        f"bound on the validation loss, {loss['validation_examples']} examples",
        f"{loss['validation_nats_per_slot']} nats per slot",
    )
    text += _row("entropy of the true law", f"{loss['entropy_nats_per_slot']} nats per slot")
    text += _row(
        "training",
        f"{cost['generator_steps']} steps, {cost['generator_pictures']} examples, "
        f"{cost['generator_minutes']} min",
    )
    text += _row(
        "device", f"{machine['device']}, {machine['cores']} cores, torch {machine['torch']}"
    )
    text += "\n## Right answers\n\nShares, %, of "
    text += f"{card['prompts_per_task']} fresh prompts a task, temperature 1. Decoder: the slots "
    text += "of a pass are chosen first, then drawn.\n\n"
    text += _row("order", "slots a pass", *TASKS) + _row(*["---"] * (len(TASKS) + 2))
    for row in card["answers"]:
        shares = [f"{100 * row[task]:.1f}" for task in TASKS]
        text += _row(row["order"], str(row["per_step"]), *shares)
    text += "\n## Distance from the true law\n\nMean total variation, one slot a pass, exact by "
    text += f"enumeration of the right answers, {card['laws_prompts']} fresh prompts a task.\n\n"
    names = list(card["laws"][0])
    text += _row(*names) + _row(*["---"] * len(names))
    text += "".join(_row(*(str(row[name]) for name in names)) for row in card["laws"])
    text += "\n## Validation bound while training\n\n| step | nats per slot |\n| --- | --- |\n"
    text += "".join(_row(k, str(v)) for k, v in cost["validation_nats_by_step"].items())
    return text + f"\n## Made by\n\n```\n{card['command']}\n```\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"
