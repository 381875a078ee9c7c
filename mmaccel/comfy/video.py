"""The node that continues a picture or a clip."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmaccel.catalog import find_policy
from mmaccel.comfy.law_widgets import law_widgets
from mmaccel.comfy.open_animator import OpenAnimator
from mmaccel.comfy.policies import NamedPolicy, default_policy
from mmaccel.comfy.record import tell_run
from mmaccel.comfy.request import SEEDS
from mmaccel.comfy.table import (
    ANIMATOR,
    IMAGE,
    POLICY,
    PREFIX,
    STATS,
    VIDEO,
    Host,
    Made,
    NodeSpec,
    Output,
    Socket,
    Widget,
)
from mmaccel.pipelines.picture_model import choose_filters
from mmaccel.pipelines.video import Clips
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import check_seed

_REPORT = 0.1  # seconds between two at least


@dataclass(frozen=True)
class VideoRecord:
    """A finished run; as text, a table and a line for the clip."""

    model: OpenAnimator
    chosen: NamedPolicy
    clips: Clips

    def __str__(self) -> str:
        """The text."""
        (made,) = self.clips.clips
        own = (
            f"seed {made.seed}: {len(made.frames)} frames, {made.n_given} of them given, "
            f"{made.fps:g} a second, {made.passes} forward passes"
        )
        return tell_run(self.model, self.chosen, self.clips.stats, [own])


class _Watch:
    """Asks for interrupts and tells of progress; changes nothing."""

    def __init__(self, host: Host) -> None:
        self._host, self._reported = host, time.monotonic()

    def __call__(self, progress: Any) -> None:
        """See `mmaccel.results.OnStep`. Whatever the host raises ends the run."""
        self._host.check_interrupt()
        done, length = int(progress.lengths[0]), progress.tokens.shape[1]
        if done < length and time.monotonic() - self._reported < _REPORT:
            return
        self._host.report(done, length, None)
        self._reported = time.monotonic()


def generate_video(
    host: Host, *, video_model: OpenAnimator, policy: NamedPolicy | None, start: Tensor, seed: int,
    **law: Any,
) -> Made:  # fmt: skip
    """Continue frames, the same as `mmaccel animate` does with these settings.

    Raises:
        OptionError: a policy of another kind; before any pass.
    """
    pipe = video_model.pipe
    chosen = policy or default_policy(pipe.model)
    find_policy(chosen.name, "window")
    host.check_interrupt()
    frames = start[..., :3].clamp(0, 1)  # without transparency, which no model here sees
    clips = pipe(frames, policy=chosen.policy, seed=seed, on_step=_Watch(host), **law)
    pixels = clips[0].frames.float().div(255)
    video = host.video(pixels, clips[0].fps)
    return Made((video, pixels, VideoRecord(video_model, chosen, clips)))


def check_video(*, seed: int, **law: Any) -> None:
    """Refuse what no model takes, before any is loaded.

    Raises:
        OptionError: a seed or a filter outside its domain.
    """
    check_seed(seed)
    choose_filters(Filters(), **law)


ANIMATE = NodeSpec(
    id=f"{PREFIX}GenerateVideo",
    title="MMAccel Generate Video",
    summary="Continues a picture or a clip under a decoding policy.",
    inputs=(
        Socket("video_model", ANIMATOR, "From MMAccel Load Video Model."),
        Socket(
            "start", IMAGE,
            "What the clip begins with: one picture, or frames in a row, of which the last nine "
            "count. They are made to fit, and cut where they are too wide or too high.",
        ),
        Socket("policy", POLICY, "How to decode; without one, an exact policy.", is_optional=True),
        Widget(
            "seed", "int", 0,
            "The same as with mmaccel animate. "
            "A browser counts exactly up to 9007199254740992; larger ones come out rounded.",
            0, SEEDS - 1, 1, is_seed=True,
        ),
        *law_widgets(),
    ),
    outputs=(
        Output("video", VIDEO, "The clip, the given frames first."),
        Output("frames", IMAGE, "The same, frame by frame."),
        Output("stats", STATS, "For MMAccel Stats."),
    ),
    run=generate_video,
    check=check_video,
    folder="video",
)  # fmt: skip
