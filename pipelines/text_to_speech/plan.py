"""Checks a call of `TextToSpeech` and plans it: prompts, maximum length, parameters, seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.checks import check_number, show
from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import check_prompt
from mmaccel.pipelines.hosts.logits.repetition import WindowedRepetitionPenalty
from mmaccel.pipelines.media import RowPlan, pick_max_num_seqs
from mmaccel.pipelines.text_to_image.model import choose_params, stack_rows
from mmaccel.pipelines.text_to_speech.types import CanvasSpeech, SpeechModel
from mmaccel.samplers.noise import Noise, check_seed
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.frames import CodeFrames, Frames

_WHOLE_PREFIX = 2**31 - 1  # tokens in the window of the repetition penalty
CHUNK_SECONDS = 0.5
_PROMPT_STEPS = 8  # lengths that a prompt may count as, see `share_seconds`
_DEFAULT_SECONDS = 30.0
_MAX_SECONDS = 3600.0
_ROUNDING = 1e-6  # frames: 0.28 s at 50 frames a second is a little above 14 in floats


@dataclass(frozen=True, kw_only=True)
class SpeechPlan(RowPlan):
    """A checked call. The last slot of a window's row is for an end token alone."""

    texts: list[str]  # B texts
    owners: list[int]  # of each row, the index of the text that it says or says a part of
    voice: str | None  # who says them

    @property
    def n_codes(self) -> int:
        """Of a row at most."""
        return self.length - (self.prompt.slots is None)


def make_plan(
    speech: SpeechModel,
    texts: Sequence[str],
    seed: int | Sequence[int],
    *,
    voice: str | None = None,
    max_seconds: float | None = None,
    batch_size: int | None = None,
    in_parts: bool = False,  # a text that is too long for the model becomes several rows
    is_joined: bool = False,  # rows of later plans join: a canvas is as long as `max_seconds`
    **params: Any,
) -> SpeechPlan:
    """Check the arguments of `TextToSpeech.__call__` and plan it. Nothing is decoded."""
    chosen = pick_params(speech, **params)
    layout = speech.layout
    device = speech.window.device
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
        raise OptionError(
            f"text: expected a text or a list of them, received {show(texts)}; write one"
        )
    rows: list[list[int]] = []
    owners: list[int] = []
    said: list[str] = []
    for owner, text in enumerate(texts):
        parts = speech.split(text) if in_parts else [text]
        rows += [speech.encode(part, voice) for part in parts]
        owners += [owner] * len(parts)
        said += parts
    largest = max(map(max, rows))
    size = getattr(speech.window, "n_ids", None) or speech.window.vocab_size
    if largest >= size:
        raise UnsupportedModelError(
            f"model: expected a tokenizer of the model's {size} ids, received a text with id "
            f"{largest}; give a checkpoint and a tokenizer that belong together"
        )
    n_rows, slots = len(rows), None
    if speech.window.kind == "canvas":
        slots = [count_canvas(speech, *one, voice, max_seconds) for one in zip(rows, said)]
        length = max(slots)
        if is_joined:
            length = max(length, count_frames(speech, max_seconds) * layout.frame)
        if chosen.guidance_scale != 1:
            rows += [speech.unconditional()] * n_rows
    else:
        length = count_slots(speech, max(map(len, rows)), max_seconds)
    prompt = stack_rows(rows, len(rows) // n_rows, layout, device)
    new = prompt.tokens.new_tensor
    return SpeechPlan(
        length=length,
        max_num_seqs=pick_max_num_seqs(batch_size, n_rows),
        noise=Noise.from_seed(seed, len(texts), device).rows(new(owners)),
        prompt=replace(
            prompt,
            stop_tokens=new(layout.ends) if layout.ends else None,
            slots=None if slots is None else new(slots),
        ),
        params=chosen,
        texts=list(texts),
        owners=owners,
        voice=voice,
    )


def join_plans(plans: Sequence[SpeechPlan]) -> tuple[Prompt, Noise]:
    """Prompt and noise of the rows of several plans."""
    prompts = [plan.prompt for plan in plans]
    noises = [plan.noise for plan in plans]
    width = max(prompt.tokens.shape[1] for prompt in prompts)
    by_branch = (prompts[0].branches, -1)
    tokens = [
        F.pad(prompt.tokens, (0, width - prompt.tokens.shape[1])).unflatten(0, by_branch)
        for prompt in prompts
    ]
    lengths = [prompt.lengths.unflatten(0, by_branch) for prompt in prompts]
    slots = [prompt.slots for prompt in prompts if prompt.slots is not None]
    prompt = replace(
        prompts[0],
        tokens=torch.cat(tokens, 1).flatten(0, 1),
        lengths=torch.cat(lengths, 1).flatten(),
        slots=torch.cat(slots) if slots else None,
    )
    seeds = torch.cat([noise.seeds for noise in noises])
    items = torch.cat([noise.items for noise in noises])
    return prompt, Noise(seeds, items)


def check_call(
    texts: Sequence[str],
    seed: int | Sequence[int],
    *,
    max_seconds: float | None = None,
    repetition_penalty: float | None = None,
    **params: Any,
) -> None:
    """Check arguments that do not depend on the model, before it is loaded."""
    for text in texts:
        check_prompt(text, None, "text to say")
    check_seed(seed)
    if max_seconds is not None:
        check_seconds(max_seconds)
    choose_params(SamplingParams(), **params)
    if repetition_penalty is not None:
        WindowedRepetitionPenalty(repetition_penalty, _WHOLE_PREFIX)


def pick_params(
    speech: SpeechModel, *, repetition_penalty: float | None = None, **given: Any
) -> SamplingParams:
    """The parameters of a run: the given values, and the model's recommended ones for None."""
    chosen = choose_params(speech.params, **given)
    if repetition_penalty is None:
        repetition_penalty = speech.repetition_penalty
    rule = WindowedRepetitionPenalty(repetition_penalty, _WHOLE_PREFIX)
    if rule.penalty == 1:
        return chosen
    if speech.window.kind == "canvas":
        raise OptionError(
            f"repetition_penalty: expected 1, as the model fills its slots in any order, received "
            f"{rule.penalty:g}; leave it out"
        )
    return replace(chosen, processor=rule.over_window)


def count_slots(speech: SpeechModel, prompt: int, max_seconds: float | None) -> int:
    """Most tokens of an utterance, the end token included, behind a prompt of some tokens; without
    `max_seconds` of 30 s, or less where the model has fewer positions.
    """
    columns = speech.layout.columns
    limit = getattr(speech.window, "max_positions", None)
    # The last token is never processed, so it needs no position.
    most_frames = math.inf if limit is None else (limit - prompt) // columns
    frames = count_frames(speech, max_seconds)
    if max_seconds is None:
        frames = max(1, int(min(frames, most_frames)))
    if frames > most_frames:
        per_second = speech.sample_rate / speech.frame_samples
        asked = _DEFAULT_SECONDS if max_seconds is None else max_seconds
        most = math.floor(1000 * most_frames / per_second) / 1000
        remedy = f", or set max_seconds to at most {most:g}" if most > 0 else ""
        raise OptionError(
            f"positions: expected at most {limit} (the model's), received {prompt} of the prompt "
            f"and {frames * columns} of {asked:g} s; shorten the text{remedy}"
        )
    return frames * columns + 1


def count_frames(speech: SpeechModel, max_seconds: float | None) -> int:
    """Frames of so many seconds; without `max_seconds` of 30."""
    asked = _DEFAULT_SECONDS if max_seconds is None else check_seconds(max_seconds)
    per_second = speech.sample_rate / speech.frame_samples
    return max(1, math.ceil(asked * per_second - _ROUNDING))


def count_canvas(
    speech: CanvasSpeech,
    prompt: Sequence[int],
    text: str,
    voice: str | None,
    max_seconds: float | None,
) -> int:
    """Slots of the canvas of a text, which is said as a whole or not at all."""
    frames = speech.count_frames(text, voice)
    most = count_frames(speech, max_seconds)
    if frames > most:
        seconds = [n * speech.frame_samples / speech.sample_rate for n in (most, frames)]
        raise OptionError(
            f"max_seconds: expected a text of at most {seconds[0]:g} s, received {show(text)}, "
            f"which lasts {seconds[1]:g} s; shorten it, or give max_seconds={seconds[1]:g}"
        )
    limit = speech.window.n_positions
    if len(prompt) + frames > limit:
        raise OptionError(
            f"positions: expected at most {limit} (the model's), received {len(prompt)} of the "
            f"prompt and {frames} of the frames that it lasts; shorten the text"
        )
    return frames * speech.layout.frame


def share_seconds(speech: SpeechModel, plan: SpeechPlan) -> float:
    """`max_seconds` of a text beside others, of its own plan alone, made without `max_seconds`.

    Prompts count as the next eighth of the model's positions: similar ones decode together.
    """
    if speech.window.kind == "canvas":
        return _DEFAULT_SECONDS  # a row's canvas is its own
    frames = plan.n_codes // speech.layout.columns
    limit = speech.window.max_positions
    if limit is not None:
        eighth = max(1, limit // _PROMPT_STEPS)
        prompt = -(-plan.prompt.tokens.shape[1] // eighth) * eighth
        shared = (limit - prompt) // speech.layout.columns
        if shared > 0:
            frames = min(frames, shared)
    return frames * speech.frame_samples / speech.sample_rate


def count_chunk_frames(speech: SpeechModel, chunk_seconds: float) -> int:
    """Frames of a chunk of sound: at least `chunk_seconds`, and whole steps of the codec's."""
    asked = check_seconds(chunk_seconds, "chunk_seconds", usual=CHUNK_SECONDS)
    frames = math.ceil(asked * speech.sample_rate / speech.frame_samples - _ROUNDING)
    step = speech.sound_context.step
    return max(1, -(-frames // step)) * step


def take_codes(tokens: Tensor, layout: Frames | CodeFrames, most: int) -> tuple[Tensor, bool]:
    """The codes of whole frames among the tokens `[n]` of a row, and whether the model ended it."""
    is_finished = bool(len(tokens)) and int(tokens[-1]) in layout.ends
    n_codes = min(len(tokens) - is_finished, most)
    return tokens[: n_codes // layout.frame * layout.frame], is_finished


def check_seconds(asked: Any, name: str = "max_seconds", usual: float = _DEFAULT_SECONDS) -> float:
    check_number(name, asked, 0, _MAX_SECONDS, f"{usual:g} suits most texts", above_low=True)
    return float(asked)
