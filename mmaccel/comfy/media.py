"""What nodes make with a loaded pipeline: images, comparisons, utterances, clips, answers; `runs`
gives each function a policy and turns what it returns into the outputs of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.comfy import host
from mmaccel.comfy.loading import LoadedModel
from mmaccel.comfy.methods import NamedPolicy, choose_policy
from mmaccel.comfy.progress import Progress, draw_progress
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.text_to_image.contact_sheet import (
    describe_difference,
    describe_guarantee,
    draw_comparison,
    make_plain,
    title_of,
)
from mmaccel.results import Stats
from mmaccel.samplers.noise import spread_seeds

if TYPE_CHECKING:
    from PIL.Image import Image

_WARM_UP_PASSES = 3


@dataclass(frozen=True)
class Made:
    """What a run made: the node's outputs without stats, and a line for each item or answer."""

    outputs: Sequence[Any]
    stats: Stats
    lines: Sequence[str]
    compared: str = ""
    negative: str | None = None


def runs(make: Callable[..., Made], link: str) -> Callable[..., tuple[Any, ...]]:
    """The `run` of a node whose input `link` is a loaded model: what `make(model, chosen policy,
    **inputs)` makes, then its stats as text.
    """

    def run(*, policy: NamedPolicy | None, **inputs: Any) -> tuple[Any, ...]:
        model: LoadedModel = inputs.pop(link)
        window = model.pipe.model
        chosen = choose_policy(policy, window)
        made = make(model, chosen, **inputs)
        head = {
            "policy": title_of(chosen.name, chosen.policy),
            "promise": describe_guarantee(made.stats, model.dtype),
            "compared": made.compared,
            "negative": made.negative,
            "model": f"{model.name} ({model.dtype} on {window.device})",
        }
        lines = [f"{name:13}{value}" for name, value in head.items() if value]
        return (*made.outputs, "\n".join((*lines, f"{made.stats}\n", *made.lines)))

    return run


def read_lines(text: str) -> list[str]:
    """One prompt a line. Blank lines are left out; a text of blank lines alone is one prompt ""."""
    return [line.strip() for line in text.splitlines() if line.strip()] or [""]


def to_tensor(images: Sequence[Image]) -> Tensor:
    """B images of one size as ComfyUI's `[B, height, width, 3]` float32 in 0..1."""
    stacked = np.stack([np.asarray(image.convert("RGB")) for image in images])
    return torch.from_numpy(stacked).float() / 255


def _opaque(frames: Tensor) -> Tensor:
    return frames[..., :3].clamp(0, 1)


def draw(
    model: LoadedModel,
    chosen: NamedPolicy,
    *,
    is_compared: bool = False,
    prompt: str,
    negative_prompt: str | None,
    seed: int,
    num_images: int | None,
    batch_size: int,
    **options: Any,
) -> Made:
    """The images that `mmaccel generate` makes with these settings; compared, also those that are
    decoded token by token, and both on one sheet.
    """
    pipe, policy = model.pipe, chosen.policy
    prompts = [text for text in read_lines(prompt) for _ in range(num_images or 1)]
    n = len(prompts)
    seeds = spread_seeds(seed, n)  # image k has `seed + k`, as on the command line
    call = {"batch_size": batch_size, "negative_prompt": negative_prompt, **options}

    def preview(state: Any, rows: Sequence[int]) -> Any:
        own = [row % n for row in rows]
        asked = [prompts[k] for k in own], [seeds[k] for k in own]
        return draw_progress(pipe.image_model, state, *asked)

    def stop(state: Any) -> Tensor | None:
        host.check_interrupt()
        return torch.zeros_like(state.lengths) if state.passes >= _WARM_UP_PASSES else None

    progress = Progress((1 + is_compared) * n, pipe.length, preview)
    plain = None
    if is_compared:
        slow = {**call, "kv_cache": None, "attention": None, "policy": make_plain(policy)}
        first = prompts[:1] * min(batch_size, n)
        for side in (slow, {**call, "policy": policy}):  # what is measured allocates nothing
            pipe(first, seed=0, output_type="tokens", on_step=stop, **side)
        plain = pipe(prompts, seed=seeds, on_step=progress, **slow)
    made = pipe(prompts, seed=seeds, policy=policy, on_step=progress, **call)
    progress.end(made.images)
    lines = [
        f"seed {seed}: {pipe.length} tokens in {passes} forward passes: {prompt}"
        for seed, passes, prompt in zip(seeds, made.passes.tolist(), prompts, strict=True)
    ]
    if plain is None:
        return Made([to_tensor(made.images)], made.stats, lines, negative=negative_prompt)
    sheet = draw_comparison(title_of(chosen.name, policy), plain, made, model.dtype)
    outputs = [to_tensor(images) for images in ([sheet], plain.images, made.images)]
    compared = describe_difference(plain, made, model.dtype)
    return Made(outputs, made.stats, lines, compared, negative_prompt)


def speak(model: LoadedModel, chosen: NamedPolicy, *, text: str, seed: int, **options: Any) -> Made:
    """What `mmaccel speak` says: `[B, 1, samples]` float32, shorter ones padded with silence."""
    texts = read_lines(text)
    progress = Progress(len(texts))
    made = model.pipe(
        texts,
        seed=spread_seeds(seed, len(texts)),
        policy=chosen.policy,
        deliver=progress.deliver,
        on_step=progress,
        **options,
    )
    progress.end()
    sounds = [each.waveform for each in made.utterances]
    longest = max(1, *map(len, sounds))
    padded = torch.stack([F.pad(sound, (0, longest - len(sound))) for sound in sounds])
    lines = [
        f"seed {each.seed}: {each.seconds:.2f} s{'' if each.is_finished else ' (cut)'}, "
        f"{len(each.tokens)} tokens in {each.passes} forward passes: {each.text}"
        for each in made.utterances
    ]
    rate = made.utterances[0].sample_rate
    return Made([{"waveform": padded[:, None], "sample_rate": rate}], made.stats, lines)


def animate(
    model: LoadedModel, chosen: NamedPolicy, *, start: Tensor | None, **options: Any
) -> Made:
    """The clip that `mmaccel animate` makes from a prompt, frames, or both."""
    progress = Progress(1)
    made = model.pipe(
        start=None if start is None else _opaque(start),
        policy=chosen.policy,
        deliver=progress.deliver,
        on_step=progress,
        **options,
    )
    progress.end()
    (clip,) = made.clips
    frames = clip.frames.float().div(255)
    named = f": {clip.prompt}" if clip.prompt else ""
    line = (
        f"seed {clip.seed}: {len(clip.frames)} frames, {clip.n_given} of them given, "
        f"{clip.fps:g} a second, {clip.passes} forward passes{named}"
    )
    return Made([host.video(frames, clip.fps), frames], made.stats, [line])


def answer(
    model: LoadedModel,
    chosen: NamedPolicy,
    *,
    image: Tensor,
    question: str,
    seed: int,
    max_tokens: int,
    batch_size: int,
    **options: Any,
) -> Made:
    """What `mmaccel answer` says to each question about all B images `[B, height, width, 3]`, and a
    picture of the patches that stay; of the image itself where all stay, or where the tokens have
    no known places.
    """
    from PIL import Image

    questions = read_lines(question)
    pixels = _opaque(image).mul(255).round().byte().cpu().numpy()
    images = [Image.fromarray(each) for each in pixels]
    progress = Progress(len(questions), max_tokens)
    methods = {name: options.pop(name) for name in ("visual_tokens", "kv_cache", "attention")}
    made = model.pipe.with_methods(policy=chosen.policy, **methods)(
        images,
        questions,
        max_new_tokens=max_tokens,
        seed=spread_seeds(seed, len(questions)),
        batch_size=batch_size,
        on_token=progress.count,
        **options,
    )
    progress.end()
    answers = made.answers
    try:
        kept = to_tensor([each.draw_kept() for each in answers])
    except UnsupportedModelError:
        kept = to_tensor(images)
    lines = [
        f"{each.question} {each.text}{'' if each.is_finished else ' (cut)'}: {each.n_kept} of "
        f"{each.n_visual} visual tokens, {len(each.tokens)} tokens, {each.passes} forward passes, "
        f"seed {each.seed}"
        for each in answers
    ]
    return Made(["\n".join(each.text for each in answers), kept], made.stats, lines)
