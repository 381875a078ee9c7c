"""Grammar: `grammar-masked` as a denoiser with its prompts, and its answers read: right or wrong,
and how far a distribution over answers is from the true one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.demo.grammar.tasks import (
    ASK,
    BOS,
    CANVAS,
    END,
    MASK,
    PAD,
    WORDS,
    Words,
    decode_answer,
    encode_prompt,
    right_answers,
)
from mmaccel.errors import OptionError
from mmaccel.pipelines.diffusion_lm.masked_lm import MaskedLM
from mmaccel.pipelines.loading.checkpoint import LoadConfig, load_model
from mmaccel.pipelines.loading.placement import choose_placement
from mmaccel.pipelines.models.scenes_vocabulary import read_words


@dataclass(frozen=True)
class AnswerWords:
    """A layout of free slots in which no id may stand that is no word of an answer."""

    n_ids: int
    columns: int = 0
    frame: int = 0

    def forced(self, slots: Tensor) -> None:
        """See `mmaccel.contracts.Layout.forced`."""

    def allowed(self, slots: Tensor) -> Tensor:
        """See `mmaccel.contracts.Layout.allowed`: `[V]`, the same for all slots."""
        ids = torch.arange(self.n_ids, device=slots.device)
        return (ids != PAD) & (ids != BOS) & (ids != ASK)


class GrammarText:
    """Loads the model from a folder with `config.json`, `model.safetensors` and `words.json`.

    Attributes:
        model: the denoiser; ids are those of `mmaccel.demo.grammar.tasks`.
        length: slots of a canvas.

    Raises:
        OptionError: no such folder or device.
        UnsupportedModelError: files that cannot be read or do not fit each other.
    """

    length = CANVAS

    def __init__(self, folder: str | Path, device: torch.device | str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        said = read_words(Path(folder))
        if said.get("mask") != MASK or said.get("words") != tuple(WORDS):
            raise OptionError(
                f"model: expected a masked model of images or the folder of grammar-masked, "
                f"received {str(folder)!r}, whose words.json is missing or says otherwise; see "
                "python -m scripts.training grammar-masked"
            )
        device, _ = choose_placement(device, torch.float32)
        model = load_model(AutoModelForCausalLM, Path(folder), LoadConfig(device))
        self.model = MaskedLM(model, MASK, shift=said["logit_shift"], vocab_size=MASK)

    def prompt(self, prompts: Sequence[Words]) -> Prompt:
        """Prompts of B rows; a row ends after its first `end`."""
        rows = [torch.tensor(encode_prompt(words), dtype=torch.int64) for words in prompts]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        tokens = tokens.to(self.model.device)
        lengths = tokens.new_tensor([len(row) for row in rows])
        stop = tokens.new_tensor([END])
        return Prompt(tokens, lengths, stop_tokens=stop, layout=AnswerWords(MASK))

    @staticmethod
    def fill_up(tokens: Tensor, lengths: Tensor) -> list[list[int]]:
        """Canvases `[B, L]` with `end` after their rows' ends, as the checker reads them."""
        past_end = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
        filled: list[list[int]] = tokens.masked_fill(past_end, END).tolist()
        return filled


def is_right(prompt: Words, canvas: Sequence[int]) -> bool:
    """Whether a canvas of ids holds one of the prompt's right answers, properly closed."""
    answer = decode_answer(canvas)
    return answer is not None and answer in right_answers(prompt)


def total_variation(prompt: Words, distribution: Mapping[Words, float]) -> float:
    """Distance, 0..1, of a distribution over answers from the true one, which is uniform over the
    prompt's right answers; what is missing to one is taken to lie on wrong ones.
    """
    answers = right_answers(prompt)
    right = [distribution.get(answer, 0.0) for answer in answers]
    on_right = sum(abs(p - 1 / len(answers)) for p in right)
    return (on_right + max(0.0, 1.0 - sum(right))) / 2
