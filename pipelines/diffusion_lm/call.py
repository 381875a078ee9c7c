"""One `generate` call of a denoiser: transformers' arguments, read as a canvas to fill.

An option that the call does not name is taken from the configuration it gives, then from the
model's own `generation_config`; end and padding tokens also from the model's configuration.

Departures from transformers: a temperature without `do_sample` decides alone, as in the published
loops of these models; no default length is assumed; without an `attention_mask` every token counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Denoiser, Layout, Prompt
from mmaccel.errors import OptionError, ShapeError
from mmaccel.samplers.sampling_params import SamplingParams


@dataclass(frozen=True)
class Rows:
    """Rows of ids, padded on any side.

    Attributes:
        ids: `[B, T]` int64.
        mask: `[B, T]`, 1 on tokens and 0 on padding; None without padding.
        name, mask_name: of the call's arguments.

    Raises:
        ShapeError: another shape or dtype, or a row without a token.
        OptionError: a mask of other numbers.
    """

    ids: Tensor
    mask: Tensor | None = None
    name: str = "input_ids"
    mask_name: str = "attention_mask"

    def __post_init__(self) -> None:
        ids = self.ids
        mask = self.mask
        is_sound = isinstance(ids, Tensor) and ids.ndim == 2 and ids.numel() > 0
        if not is_sound or ids.is_floating_point() or ids.dtype == torch.bool:
            shown = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
            raise ShapeError(
                f"{self.name}: expected int64 [B, T] with a token in it, received {shown}; "
                "take the tokenizer's input_ids"
            )
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
            shown = str(list(mask.shape)) if isinstance(mask, Tensor) else repr(mask)
            raise ShapeError(
                f"{self.mask_name}: expected {list(ids.shape)}, received {shown}; take the one of "
                "the tokenizer, or None where nothing is padded"
            )
        if mask is not None:
            self._check_mask(mask)

    @property
    def is_token(self) -> Tensor:
        """`[B, T]` bool, False on padding."""
        if self.mask is None:
            return torch.ones_like(self.ids, dtype=torch.bool)
        return self.mask.to(self.ids.device).bool()

    def check(self, n_ids: int | None, mask_token: int | None) -> None:
        """Refuse ids that cannot stand in a model's prompt; padding may be any number.

        Args:
            n_ids: ids of the model, or None.
            mask_token: id of an open slot, or None.

        Raises:
            OptionError: an id out of range, or the mask token.
        """
        ids = self.ids.to(torch.int64)
        remedy = "take those of the model's own tokenizer"
        self._refuse(ids < 0, "ids from 0 on", remedy)
        if n_ids is not None:
            self._refuse(ids >= n_ids, f"ids below {n_ids}", remedy)
        if mask_token is not None:
            remedy = "leave open slots to the canvas, and give known ones by a layout"
            self._refuse(ids == mask_token, "no mask token", remedy)

    def packed(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens `[B, T]` with the padding moved to the right, and their numbers, `[B]`."""
        ids = self.ids.to(device, torch.int64)
        is_token = self.is_token.to(device)
        order = (~is_token).int().argsort(dim=1, stable=True)
        return ids.gather(1, order), is_token.sum(1)

    def _check_mask(self, mask: Tensor) -> None:
        is_sound = (mask == 0) | (mask == 1)
        if not bool(is_sound.all()):
            raise OptionError(
                f"{self.mask_name}: expected 1 on tokens and 0 on padding, received "
                f"{mask[~is_sound][0].item()}; take the one of the tokenizer, not scores to add"
            )
        is_empty = ~mask.bool().any(1)
        if bool(is_empty.any()):
            raise ShapeError(
                f"{self.name}: expected at least one token in every row, received padding alone in "
                f"row {int(is_empty.nonzero()[0])} by {self.mask_name}; begin it with a token"
            )

    def _refuse(self, is_wrong: Tensor, expected: str, remedy: str) -> None:
        found = (is_wrong & self.is_token).nonzero().tolist()
        if found:
            row, column = found[0]
            raise OptionError(
                f"{self.name}: expected {expected}, received id {int(self.ids[row, column])} in "
                f"row {row}; {remedy}"
            )


def negative_rows(ids: Tensor | None, mask: Tensor | None) -> Rows | None:
    """The negative prompts, or None where the call has none.

    Raises:
        ShapeError: see `Rows`.
        OptionError: see `Rows`, or a mask without prompts.
    """
    if ids is None:
        if mask is not None:
            raise OptionError(
                "negative_prompt_attention_mask: expected negative_prompt_ids with it, received "
                "it alone; give both, or none"
            )
        return None
    return Rows(ids, mask, "negative_prompt_ids", "negative_prompt_attention_mask")


def join(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two branches of a prompt, the first one first; one row of the second serves all rows.

    Raises:
        ShapeError: another number of rows.
    """
    batch, wide = first[0].shape
    if second[0].shape[0] == 1:
        second = second[0].expand(batch, -1), second[1].expand(batch)
    if second[0].shape[0] != batch:
        raise ShapeError(
            f"negative_prompt_ids: expected {batch} rows or one for all, received "
            f"{second[0].shape[0]}; give one for each row of input_ids"
        )
    widest = max(wide, second[0].shape[1])
    rows = [torch.nn.functional.pad(t, (0, widest - t.shape[1])) for t in (first[0], second[0])]
    return torch.cat(rows), torch.cat([first[1], second[1]])


def model_mask_token(denoiser: Denoiser) -> int | None:
    """The id of an open slot in the model's own numbering, or None."""
    mask_token = denoiser.mask_token
    if mask_token is None or not hasattr(denoiser, "to_model"):
        return mask_token
    return int(denoiser.to_model(torch.tensor(mask_token, device="cpu", dtype=torch.int64)))


@dataclass(frozen=True)
class DenoiserCall:
    """Arguments of one call.

    Attributes:
        rows: the prompts.
        negative: negative prompts, as many or one for all; None without guidance.
        given: the call's own options by name; None counts as not given.
        config: transformers' `GenerationConfig`, or None.
        model: its configurations have the other options; or None.
    """

    rows: Rows
    negative: Rows | None
    given: Mapping[str, Any]
    config: Any
    model: Any

    @property
    def guidance(self) -> float:
        """The guidance scale; 1 runs no second branch.

        Raises:
            OptionError: a scale without negative prompts, or negative prompts without a scale.
        """
        scale: Any = self.given.get("guidance_scale")
        is_off = scale is None or scale == 1
        if is_off == (self.negative is None):
            return 1.0 if is_off else scale
        if is_off:
            raise OptionError(
                f"negative_prompt_ids: expected a guidance_scale other than 1 with it, received "
                f"{scale!r}; give one such as guidance_scale=3.5"
            )
        raise OptionError(
            f"guidance_scale: expected negative_prompt_ids with it, received {scale!r} alone; "
            "give the ids of the prompt to guide away from"
        )

    @property
    def length(self) -> int:
        """L, tokens to generate.

        Raises:
            OptionError: no number, two numbers for the same, or one below 1.
        """
        if self.given.get("gen_length") is not None:
            if self.given.get("max_new_tokens") is not None:
                raise OptionError(
                    "gen_length: expected none with max_new_tokens, received both; they are two "
                    "names of one number"
                )
            return self._counted("gen_length", self.given["gen_length"], 0)
        for level in self._levels():
            for name, columns in (("max_new_tokens", 0), ("max_length", self.rows.ids.shape[1])):
                if level.get(name) is not None:
                    return self._counted(name, level[name], columns)
        raise OptionError(
            "max_new_tokens: expected how many tokens to generate, received none; a canvas has a "
            "length from the start, give one such as max_new_tokens=128"
        )

    @property
    def params(self) -> SamplingParams:
        """Guidance, temperature and truncation; a greedy call has no truncation.

        Raises:
            OptionError: outside their domain.
        """
        scale = self.guidance
        params = SamplingParams(
            temperature=self._temperature,
            top_k=self._find("top_k") or None,  # transformers: 0 keeps all
            top_p=self._find("top_p"),
            min_p=self._find("min_p"),
            guidance_scale=scale,
        )
        is_greedy = not params.temperature
        return SamplingParams(temperature=0.0, guidance_scale=scale) if is_greedy else params

    @property
    def ends(self) -> list[int]:
        """End tokens; ids below 0 are left out, as they are no tokens."""
        return _as_ids(self._find("eos_token_id", deep=True))

    @property
    def filler(self) -> Tensor | None:
        """`[]` int64, fills a row after its end; None where nothing ends rows."""
        ids = [*_as_ids(self._find("pad_token_id", deep=True)), *self.ends]
        return torch.tensor(ids[0], device="cpu", dtype=torch.int64) if ids else None

    @property
    def as_output(self) -> bool:
        """Whether to return transformers' output object."""
        return bool(self._find("return_dict_in_generate"))

    def prompt(self, denoiser: Denoiser, layout: Layout | None) -> Prompt:
        """Rows padded on the right, in the numbering of the denoiser's canvases.

        Raises:
            OptionError: ids that the model does not have, or its mask token as a prompt or end
                token.
            ShapeError: another number of negative prompts.
        """
        mask_token = model_mask_token(denoiser)
        for rows in (self.rows, self.negative):
            if rows is not None:
                rows.check(getattr(denoiser, "n_ids", None), mask_token)
        if mask_token in self.ends:
            raise OptionError(
                f"eos_token_id: expected ids that end a row, received {mask_token}, the mask "
                "token, which is never drawn; take the tokenizer's, or -1 where nothing ends rows"
            )
        tokens, lengths = self.rows.packed(denoiser.device)
        if self.negative is not None:
            tokens, lengths = join((tokens, lengths), self.negative.packed(denoiser.device))
        tokens = tokens[:, : int(lengths.max())]
        stops = tokens.new_tensor(self.ends)
        if hasattr(denoiser, "to_canvas"):
            tokens, stops = denoiser.to_canvas(tokens), denoiser.to_canvas(stops)
        return Prompt(
            tokens,
            lengths,
            branches=1 if self.negative is None else 2,
            stop_tokens=stops if self.ends else None,
            layout=layout,
        )

    @property
    def _temperature(self) -> Any:
        for level in self._levels():
            samples, asked = level.get("do_sample"), level.get("temperature")
            if samples is None and asked is None:
                continue
            if samples is not None and not samples:
                return 0.0
            return (self._find("temperature") or 1.0) if asked is None else asked
        return 0.0

    def _levels(self) -> Iterator[Mapping[str, Any]]:
        """Where an option is looked up, first to last."""
        yield self.given
        for config in (self.config, getattr(self.model, "generation_config", None)):
            yield vars(config) if hasattr(config, "__dict__") else {}

    def _find(self, name: str, deep: bool = False) -> Any:
        """An option from the first level that names it, or None; `deep` adds the model's config."""
        own = getattr(getattr(self.model, "config", None), name, None) if deep else None
        found = (level[name] for level in self._levels() if level.get(name) is not None)
        return next(found, own)

    def _counted(self, name: str, count: Any, columns: int) -> int:
        is_count = isinstance(count, int) and not isinstance(count, bool)
        if not is_count or count - columns < 1:
            prompt = f" with {columns} columns of the prompt" if columns else ""
            raise OptionError(
                f"{name}: expected at least 1 token to generate, received {count!r}{prompt}; ask "
                "for more, such as max_new_tokens=128"
            )
        return int(count) - columns


def _as_ids(found: Any) -> list[int]:
    """The ids from 0 on of one id, several, a tensor or None."""
    values = found.tolist() if hasattr(found, "tolist") else found
    if values is None:
        return []
    values = list(values) if isinstance(values, list | tuple | set) else [values]
    if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
        raise OptionError(
            f"eos_token_id, pad_token_id: expected ids, received {found!r}; take the tokenizer's"
        )
    return [value for value in values if value >= 0]
