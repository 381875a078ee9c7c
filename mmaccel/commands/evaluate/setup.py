"""What `mmaccel evaluate exactness` and `speed` share: the model, and the prompts of its runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmaccel.catalog import MODELS
from mmaccel.commands import options as shared
from mmaccel.commands.options import SizeFlags
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_MEASURED, read_lines
from mmaccel.options import LoadOptions, SamplingOptions, given, option

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage
    from mmaccel.samplers.sampling_params import SamplingParams

_NEW_TOKENS = 64
_HELP_MODEL = "of images or a causal LM: a name, path or hub id"
_HELP_PROMPTS = "a prompt a line; by default the model's examples"


@dataclass(frozen=True, kw_only=True)
class TextFlags:
    """A model of images or texts, and what it makes."""

    model: Annotated[str, typer.Argument(help=_HELP_MODEL)] = "scenes"
    prompts: Path | None = option(None, _HELP_PROMPTS)
    seed: Annotated[
        int,
        typer.Option(help="of the first row; the next has the next", callback=shared.read_seed),
    ] = 0
    max_new_tokens: int | None = option(None, f"of a text at most; by default {_NEW_TOKENS}")
    decoder: shared.Decoder = None
    sampling: SamplingOptions
    sides: SizeFlags
    load: LoadOptions

    def check_texts(self) -> None:
        """Look at all that can be checked without a model.

        Raises:
            OptionError: a number outside its domain, or a file without prompts.
        """
        if self.max_new_tokens is not None:
            shared.check_count("max-new-tokens", self.max_new_tokens, MAX_MEASURED)
        self.read_prompts()

    def read_prompts(self) -> list[str]:
        """The lines of the file that are not empty; none without a file.

        Raises:
            OptionError: no text file within the limits, or no such line.
        """
        if self.prompts is None:
            return []
        lines = [line.strip() for line in read_lines(self.prompts, "--prompts") if line.strip()]
        if not lines:
            raise OptionError(
                f"--prompts: expected a prompt a line, received none in {str(self.prompts)!r}; "
                "write some"
            )
        return lines

    def is_text(self, pipe: TextToImage) -> bool:
        """Whether a pipeline continues texts."""
        from mmaccel.evaluation.texts import ContinuedTexts

        return isinstance(pipe.image_model, ContinuedTexts)

    def open(
        self, load: LoadOptions, count: int | None
    ) -> tuple[TextToImage, SamplingParams, list[str]]:
        """A model of images, or a causal LM, whose `image_model` is a `ContinuedTexts`; how it
        draws; and the prompts of a run.

        Args:
            count: prompts, in turn; None takes each once.

        Raises:
            OptionError: a prompt that it does not take.
            UnsupportedModelError: see `find_causal_lm` and `open_texts`.
        """
        from transformers.utils import logging

        from mmaccel.evaluation.texts import find_causal_lm, open_texts
        from mmaccel.loading import load_keywords, open_pipeline
        from mmaccel.pipelines.pipeline import read_loading
        from mmaccel.pipelines.text_to_image.model import choose_params, encode_prompts

        loading = read_loading(load_keywords(load))
        source = None if load.family else find_causal_lm(self.model, loading.config.hub)
        if source is None:
            size = self.sides.join()
            pipe = open_pipeline(self.model, load, size=size, decoder=self.decoder)
        else:
            logging.disable_progress_bar()
            pipe = open_texts(source, loading, self.max_new_tokens or _NEW_TOKENS)
        images = pipe.image_model
        examples = MODELS[self.model].examples if self.model in MODELS else images.examples
        texts = self.read_prompts() or list(examples)
        texts = [texts[k % len(texts)] for k in range(count or len(texts))]
        encode_prompts(images, list(dict.fromkeys(texts)), None, images.params)
        return pipe, choose_params(images.params, **given(self.sampling)), texts
