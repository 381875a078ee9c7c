"""The models that a coarse model is made for: how their rows are sampled, and their neighbours.

Images, speech and clips come from the pipelines of this library, text from any causal LM of
transformers. Only tokens are sampled; nothing is decoded to pixels or sound.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mmaccel.contracts import Prompt
from mmaccel.demo.scenes.data import make_captions
from mmaccel.errors import OptionError
from mmaccel.policies import Policy
from mmaccel.results import Generation
from mmaccel.samplers.drafting.coarse_model import (
    GRID_NEIGHBOURS,
    TEXT_NEIGHBOURS,
    VIDEO_NEIGHBOURS,
    CoarseConfig,
    CoarseModel,
)
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.run_lock import alone
from mmaccel.samplers.sampling_params import SamplingParams

KINDS = ("image", "text", "speech", "video")
LARGEST_FILE = 3_000_000  # bytes
LARGEST_TABLE = 512_000_000  # bytes of the neighbours' table in memory
MOST_SLOTS = 1024  # slots with an embedding of their own
_CAPTIONS_SEED = 11
_FRESH = 10**6
_WIDTHS = (256, 192, 128, 96, 64, 48, 32, 16)
_EMBEDDING = 48

Plan = tuple[Prompt, int, SamplingParams]  # prompt rows, length, sampling parameters


@dataclass(frozen=True)
class Target:
    """A model with prompts.

    Attributes:
        prompts: what rows begin with; row k has prompt k modulo their number.
        plan: prompts and guidance to what a run needs.
        neighbours, columns, frame, n_slots: see `CoarseConfig`.
    """

    name: str
    window: Any
    prompts: Sequence[Any]
    plan: Callable[[Sequence[Any], float | None], Plan]
    neighbours: tuple[tuple[int, int, int], ...]
    columns: int = 0
    frame: int = 0
    n_slots: int = 0

    @torch.no_grad()
    def sample(
        self, policy: Policy, rows: Sequence[int], guidance: float | None = None
    ) -> Generation:
        """Generate rows of these numbers, each of which is also the row's seed; a guidance scale of
        None is the model's own.
        """
        chosen = [self.prompts[k % len(self.prompts)] for k in rows]
        with alone(self.window):
            prompt, length, params = self.plan(chosen, guidance)
            noise = Noise.from_seed(list(rows), len(rows), self.window.device)
            return policy.sample(self.window, prompt, length, params=params, noise=noise)

    def fresh_rows(self, n_learned: int, count: int) -> range:
        """Rows that no run of the first `n_learned` has: other seeds, and other prompts if any."""
        first = _FRESH - _FRESH % len(self.prompts) + n_learned
        return range(first, first + count)

    def config(self, width: int | None = None, embedding: int | None = None) -> CoarseConfig:
        """Sizes of a coarse model for this target: by default the largest width of a few that keeps
        file and table small, and embeddings of 48, or of the width where that is less.
        """
        vocab_size, hidden_size = self.window.output_matrix().shape
        grid = (self.neighbours, self.columns, self.frame, self.n_slots)
        for tried in _WIDTHS if width is None else (width,):
            sizes = (embedding or min(_EMBEDDING, tried), tried)
            config = CoarseConfig(vocab_size, hidden_size, *grid, *sizes)
            table = 4 * len(self.neighbours) * (vocab_size + 1) * tried
            n_bytes = count_bytes(config)
            if n_bytes <= LARGEST_FILE and (width is not None or table <= LARGEST_TABLE):
                return config
        raise OptionError(
            f"width: expected a coarse model of at most {LARGEST_FILE} bytes, received one of "
            f"{n_bytes} at width {tried}; choose a smaller width or embedding"
        )


def count_bytes(config: CoarseConfig) -> int:
    """Bytes of a coarse model's weights on disk."""
    with torch.device("meta"):
        model = CoarseModel(config, torch.empty(config.vocab_size, config.hidden_size))
    return sum(2 * weight.numel() for weight in model.parameters())


def open_target(args: argparse.Namespace) -> Target:
    from mmaccel.pipelines.text_to_video.registry import reads_prompts

    if args.kind == "text":
        return _open_text(args)
    if args.kind == "speech":
        return _open_speech(args)
    if args.kind == "image" or reads_prompts(args.model):
        return _open_pictures(args)
    return _open_video(args)


def _open_pictures(args: argparse.Namespace) -> Target:
    """A model of images, or one whose clips begin with a prompt."""
    from mmaccel.loading import open_pipeline, open_with_parts
    from mmaccel.options import LoadOptions
    from mmaccel.pipelines.models.scenes import WordImages
    from mmaccel.pipelines.text_to_image.model import choose_params

    options = {name: vars(args)[name] for name in ("device", "dtype", "family")}
    load = LoadOptions(cuda_graphs=False, trust_remote_code=args.trust_remote_code, **options)
    pipe: Any
    neighbours: tuple[tuple[int, int, int], ...]
    if args.kind == "image":
        pipe = open_pipeline(args.model, load, size=args.size, decoder=args.decoder)
        model = pipe.image_model
        neighbours, prompts = GRID_NEIGHBOURS, _read_prompts(args) or model.examples
        if args.prompts is None and isinstance(model, WordImages):
            prompts = make_captions(_CAPTIONS_SEED, range(10_000))
    else:
        pipe = open_with_parts("TextToVideo", args.model, load)
        model = pipe.clip_model
        neighbours, prompts = VIDEO_NEIGHBOURS, _need_prompts(args, "one caption")

    def plan(chosen: Sequence[str], guidance: float | None) -> Plan:
        params = choose_params(model.params, guidance_scale=guidance, temperature=args.temperature)
        encoded = [model.encode(text) for text in chosen]
        return model.prompt(encoded, params.guidance_scale != 1), pipe.length, params

    n_slots = min(pipe.length, MOST_SLOTS)
    if model.layout.rows == 1:  # several grids one after the other, as in GLM-Image
        return Target(args.model, pipe.model, prompts, plan, TEXT_NEIGHBOURS, n_slots=n_slots)
    grid = (model.layout.columns, model.layout.frame, n_slots)
    return Target(args.model, pipe.model, prompts, plan, neighbours, *grid)


def _open_text(args: argparse.Namespace) -> Target:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mmaccel.pipelines.hosts.attach.attaching import family_of
    from mmaccel.pipelines.hosts.loading.placement import choose_dtype
    from mmaccel.pipelines.text_to_image.model import stack_rows

    lines = _need_prompts(args, "one prompt")
    options = {"trust_remote_code": args.trust_remote_code}
    dtype = choose_dtype(args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, **options)
    model = model.to(args.device).eval()
    family = family_of(model)
    family.check(model)
    window = family.wrap(model)
    if args.ids:
        prompts = [[int(number) for number in line.split()] for line in lines]
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model, **options)
        prompts = [tokenizer(line)["input_ids"] for line in lines]
    temperature = 1.0 if args.temperature is None else args.temperature
    ends = model.generation_config.eos_token_id
    stops = [ends] if isinstance(ends, int) else list(ends or ())

    def plan(chosen: Sequence[list[int]], guidance: float | None) -> Plan:
        prompt = stack_rows(chosen, 1, None, window.device)  # type: ignore[arg-type]
        stop_tokens = torch.tensor(stops, dtype=torch.int64, device=window.device)
        params = SamplingParams(temperature=temperature)
        return replace(prompt, stop_tokens=stop_tokens), args.length, params

    return Target(args.model, window, prompts, plan, TEXT_NEIGHBOURS)


def _open_media(pipeline: Any, args: argparse.Namespace, **options: Any) -> Any:
    for name in ("codec", "device", "dtype", "trust_remote_code"):
        options[name] = vars(args)[name]
    return pipeline.from_pretrained(args.model, cuda_graphs=False, **options)


def _open_speech(args: argparse.Namespace) -> Target:
    from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech
    from mmaccel.pipelines.text_to_speech.plan import make_plan

    pipe = _open_media(TextToSpeech, args, family=args.family)
    speech = pipe.speech

    def plan(chosen: Sequence[str], guidance: float | None) -> Plan:
        made = make_plan(
            speech, chosen, 0, max_seconds=args.max_seconds, temperature=args.temperature
        )
        return made.prompt, made.length, made.params

    texts = _read_prompts(args) or ["The quick brown fox jumps over the lazy dog."]
    _, length, _ = plan(texts[:1], None)
    period = speech.layout.columns  # codes a frame
    neighbours = dict.fromkeys(TEXT_NEIGHBOURS)
    neighbours |= dict.fromkeys((0, 0, -n * period) for n in (1, 2))
    n_slots = min(length, MOST_SLOTS)
    return Target(args.model, pipe.model, texts, plan, tuple(neighbours), n_slots=n_slots)


def _open_video(args: argparse.Namespace) -> Target:
    from mmaccel.pipelines.image_to_text.prompts import read_image
    from mmaccel.pipelines.image_to_video.pipeline import ImageToVideo
    from mmaccel.pipelines.image_to_video.preprocessing import read_start
    from mmaccel.pipelines.text_to_image.model import choose_params

    files = _need_prompts(args, "the path of an image")
    pipe = _open_media(ImageToVideo, args)
    video = pipe.video
    layout = video.layout

    def plan(chosen: Sequence[str], guidance: float | None) -> Plan:
        starts = [read_start(read_image(file), video.size, video.starts) for file in chosen]
        given = [video.encode(frames) for frames in starts]  # [f, h, w] each
        rows = torch.stack([tokens.flatten() for tokens in given]).to(video.window.device)
        lengths = torch.full((len(rows),), rows.shape[1], device=rows.device)
        n_slots = (video.n_frames - len(given[0])) * layout.frame
        params = choose_params(video.params, temperature=args.temperature)
        return Prompt(rows, lengths, 1, layout=layout), n_slots, params

    grid = (layout.columns, layout.frame)
    return Target(args.model, pipe.model, files, plan, VIDEO_NEIGHBOURS, *grid)


def _read_prompts(args: argparse.Namespace) -> list[str]:
    """Lines of the file of prompts that are not empty; none without such a file."""
    return [] if args.prompts is None else _need_prompts(args, "one prompt")


def _need_prompts(args: argparse.Namespace, what: str) -> list[str]:
    lines: list[str] = []
    if args.prompts is not None and Path(args.prompts).is_file():
        lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise OptionError(
            f"prompts: expected a file with {what} a line, received {args.prompts}; give --prompts"
        )
    return found
