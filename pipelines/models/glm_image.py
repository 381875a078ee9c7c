"""GLM-Image: tokens of a small preview grid, then of the large grid, at positions with three axes.

Z.ai, "GLM-Image", 2026. `GlmImageForConditionalGeneration` of transformers generates the two grids,
with 32 pixels per token, under a policy; then the diffusion model of diffusers' `GlmImagePipeline`
draws the image from the large one. Temperature and top-p are the checkpoint's.

The positions (time, row, column) of image tokens follow from prompt and grids: the model stores
them at the start of a call, here each call has its own table, and rows their own positions.

Departures: the library can also sample the special ids of the image head; here only the ids of the
codebook can be sampled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.config_files import read_json, shorten
from mmaccel.contracts import Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.family import CausalLM
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.generate_call import READ, SAMPLE, GenerateCall, Table
from mmaccel.pipelines.hosts.loading.checkpoint import (
    LoadConfig,
    check_prompt,
    count_tokens,
    load_model,
)
from mmaccel.pipelines.hosts.loading.moving import Part
from mmaccel.pipelines.hosts.loading.refusal import check_folder, refusing
from mmaccel.pipelines.text_to_image.model import ImageModel
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.grid import Grid

if TYPE_CHECKING:
    from PIL.Image import Image

_CALL_STATE = ("rope_deltas", "_cached_decode_position_ids", "_prefill_len")  # of the model
_STEP = 32  # pixels a token
_SIDE = 1024
_GENERATOR = "vision_language_encoder"  # the component that predicts tokens


class GlmImage(CausalLM):
    """`GlmImageForConditionalGeneration`; text to image."""

    name: ClassVar[str] = "glm_image"
    arguments: ClassVar[Table] = SAMPLE | {"image_grid_thw": READ, "images_per_sample": READ}
    known: ClassVar[frozenset[str]] = frozenset({"prepare_inputs_for_generation"})
    takes_own_prompt: ClassVar[bool] = False

    def wrap(self, model: Any) -> CausalLMWindow:
        """The model as a token model at text positions."""
        return GlmImageWindow(model)

    def open(self, call: GenerateCall) -> CausalLMWindow:
        """The model as a token model at the positions of the call's grids."""
        return GlmImageWindow(
            call.model, make_positions(call.model, call.ids, call.mask, call.others)
        )

    def obstacles(self, call: GenerateCall) -> Iterator[str]:
        grids = call.others.get("image_grid_thw")
        if grids is None or not grids.numel():
            yield "a call without image_grid_thw"
        elif call.length is not None and call.length > _count_slots(call):
            yield "more tokens than its grids have"
        if call.guidance is not None:
            yield "guidance for a model whose positions depend on the prompt"


class GlmImageWindow(CausalLMWindow):
    """GLM-Image as a token model, at positions `[R, 3, P]` int64; None for text."""

    own_vocabulary = True
    row_inputs = ("_table",)

    def __init__(
        self, model: Any, table: Tensor | None = None, vocab_size: int | None = None
    ) -> None:
        super().__init__(model, vocab_size=vocab_size)
        self._table = table

    def plain(self) -> CausalLMWindow:
        """As in `CausalLMWindow`, at positions with three axes."""
        window = GlmImageWindow(self.model)
        window.attention = "model"
        return window

    def begin(self, table: Tensor) -> None:
        """Set the position table of the next run."""
        self._table = table

    def make_static(self, value: Tensor) -> Tensor:
        """As in `StaticModelBuffers`, with as many positions as are reserved."""
        return self.fit(value, value[..., :1].expand(-1, -1, self.n_reserved)).clone()

    def fit(self, own: Tensor, static: Tensor) -> Tensor:
        """Cut a table to the length of the static one, or repeat its last position."""
        length = static.shape[-1]
        return own[..., :length] if own.shape[-1] >= length else _lengthen(own, length)

    def position_ids(self, positions: Tensor) -> Tensor:
        """Cache positions `[R, W]` to `[3, R, W]`; after the grids, the last position repeats."""
        if self._table is None:
            return super().position_ids(positions).expand(3, -1, -1)
        index = positions.clamp(max=self._table.shape[-1] - 1)[:, None].expand(-1, 3, -1)
        return self._table.gather(2, index).transpose(0, 1)


def _count_slots(call: GenerateCall) -> int:
    """The most new tokens of a row: one more than the grids have."""
    grids = _find_positions(call.model, call.ids, call.mask, call.others)[1]
    return 1 + grids.shape[-1]


def make_positions(model: Any, ids: Tensor, mask: Tensor, others: dict[str, Any]) -> Tensor:
    """Positions `[B, 3, P]` int64 of prompts `[B, T]` but padding, then grids (in `others`)."""
    prompt, grids = _find_positions(model, ids, mask, others)
    rows = [torch.cat([prompt[:, b, is_real], grids[b]], 1) for b, is_real in enumerate(mask)]
    longest = max(row.shape[1] for row in rows)
    return torch.stack([_lengthen(row, longest) for row in rows])


def _find_positions(
    model: Any, ids: Tensor, mask: Tensor, others: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Positions of the prompt `[3, B, T]` and the grids `[B, 3, L]`, from the model's own code."""
    inner = model.model
    before = {name: getattr(inner, name) for name in _CALL_STATE}
    try:
        prompt, _ = inner.get_rope_index(
            ids,
            image_grid_thw=others["image_grid_thw"],
            images_per_sample=others.get("images_per_sample"),
            attention_mask=mask.long(),
        )  # [3, B, T]
        return prompt, inner._cached_decode_position_ids
    finally:
        for name, value in before.items():
            setattr(inner, name, value)


def _lengthen(row: Tensor, length: int) -> Tensor:
    """`[..., 3, P]` to `[..., 3, length]` by repeating the last position."""
    repeated = row[..., -1:].expand(*row.shape[:-1], length - row.shape[-1])
    return torch.cat([row, repeated], -1)


class GlmImageImages(ImageModel):
    """A `GlmImagePipeline` in sides that are multiples of 32 pixels.

    `diffusion_options` are further arguments of the pipeline's call, such as num_inference_steps.
    """

    family = "GLM-Image"
    no_guidance = "GLM-Image's first stage was trained without guidance"
    no_negatives = "whose first stage was trained without guidance"
    window: GlmImageWindow

    def __init__(self, pipe: Any, size: tuple[int, int], **diffusion_options: Any) -> None:
        self.pipe, self.diffusion_options = pipe, diffusion_options
        self.model = pipe.vision_language_encoder
        n_codes = self.model.config.vq_config.num_embeddings
        self.window = GlmImageWindow(self.model, vocab_size=n_codes)
        self.set_size(size)
        # as in the pipeline
        config, _ = self.model._prepare_generation_config(None, do_sample=True)
        self.params = SamplingParams(
            temperature=config.temperature, top_k=config.top_k or None, top_p=config.top_p
        )

    def set_size(self, size: tuple[int, int]) -> None:
        count_tokens(size, _STEP)
        self.size = size
        self._grids = self._prepare("a")["image_grid_thw"]  # large, preview
        self._n_large = int(self._grids[0].prod())
        self.layout = Grid(1, int(self._grids.prod(1).sum()), self.window.vocab_size)

    def parts(self) -> dict[str, Part]:
        """The components of the pipeline."""
        names = ("text_encoder", "transformer", "vae")
        return {"model": Part(self.model)} | {n: Part(getattr(self.pipe, n)) for n in names}

    def encode(self, text: str) -> list[int]:
        """Ids of the prompt as a user message, of both grids' sizes and the image's start."""
        checked = check_prompt(text, self.pipe.processor.tokenizer)
        ids: list[int] = self._prepare(checked)["input_ids"][0].tolist()
        return ids

    def begin(self, prompt: Prompt) -> Prompt:
        """The window needs the positions of all rows."""
        batch, longest = prompt.tokens.shape
        rows = zip(prompt.tokens, prompt.lengths)
        # padding goes to the left, as the model's own code expects it
        ids = torch.stack([row.roll(longest - int(n)) for row, n in rows])
        index = torch.arange(longest, device=ids.device)
        others = {
            "image_grid_thw": self._grids.to(ids.device).repeat(batch, 1),
            "images_per_sample": ids.new_full((batch,), len(self._grids)),
        }
        mask = index >= longest - prompt.lengths[:, None]
        self.window.begin(make_positions(self.model, ids, mask, others))
        return prompt

    def render(self, tokens: Tensor, prompts: Sequence[str], seeds: Sequence[int]) -> list[Image]:
        """The seeds determine the diffusion noise."""
        rows, columns = int(self._grids[0, 1]), int(self._grids[0, 2])
        large = tokens[:, -self._n_large :].view(-1, 1, rows, columns)
        fine = F.interpolate(large.float(), scale_factor=2, mode="nearest").long().flatten(1)
        drawn = self.pipe(
            prompt=list(prompts),
            width=self.size[0],
            height=self.size[1],
            prior_token_ids=fine,
            generator=[torch.Generator().manual_seed(seed % 2**63) for seed in seeds],
            **self.diffusion_options,
        )
        images: list[Image] = drawn.images
        return images

    def _prepare(self, text: str) -> Any:
        content = [{"type": "text", "text": text}]
        processor, (width, height) = self.pipe.processor, self.size
        chat = [{"role": "user", "content": content}]
        texts = processor.apply_chat_template([chat], tokenize=False)
        return processor(text=texts, target_h=height, target_w=width, return_tensors="pt")


def _check_parts(folder: Path, load_config: LoadConfig) -> None:
    """Check the parts that the pipeline loads itself, and that libraries have all classes."""
    from diffusers import pipelines

    check_folder(folder)
    for part in ("processor", "tokenizer", "scheduler"):
        check_folder(folder / part)
    for name, value in read_json(folder / "model_index.json").items():
        library = value[0] if isinstance(value, list) and value else None
        is_named = library in (None, "transformers", "diffusers")
        is_known = is_named or hasattr(pipelines, str(library))
        if not is_known and not load_config.trust_remote_code:
            raise UnsupportedModelError(
                f"model: expected parts of transformers and diffusers in {folder}, received "
                f"{shorten(name)} of {shorten(library)}; read that code, then pass "
                "trust_remote_code=True (--trust-remote-code) if you trust it"
            )


def load_glm_image(folder: Path, load_config: LoadConfig) -> GlmImageImages:
    """Load a checkpoint such as zai-org/GLM-Image."""
    from diffusers import AutoencoderKL, GlmImagePipeline
    from diffusers.models.transformers.transformer_glm_image import GlmImageTransformer2DModel
    from transformers import GlmImageForConditionalGeneration, T5EncoderModel

    size = load_config.size or (_SIDE, _SIDE)
    count_tokens(size, _STEP)
    _check_parts(folder, load_config)
    classes = {
        "text_encoder": T5EncoderModel,
        "transformer": GlmImageTransformer2DModel,
        "vae": AutoencoderKL,
    }
    whole = replace(load_config, device_map=None)  # the map is of the generator
    with warnings.catch_warnings():  # older versions of diffusers need "torch_dtype"
        warnings.simplefilter("ignore", FutureWarning)
        generator = load_model(GlmImageForConditionalGeneration, folder / _GENERATOR, load_config)
        parts = {name: load_model(cls, folder / name, whole) for name, cls in classes.items()}
        parts[_GENERATOR] = generator
    trust = load_config.trust_remote_code
    with refusing(
        f"a GlmImagePipeline in {folder}",
        "one that diffusers refuses",
        "copy the folder again",
        folder=folder,
    ):
        pipe = GlmImagePipeline.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust, **parts
        )
    pipe.set_progress_bar_config(disable=True)
    GlmImage().check(pipe.vision_language_encoder)
    return GlmImageImages(pipe, size)
