"""Images: calls, requests, checkpoints and options that are refused before any pass."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import mmaccel
from mmaccel import Request, SamplingParams, TextToImage
from mmaccel.errors import MMAccelError, OptionError, UnsupportedModelError
from mmaccel.pipelines.text_to_image.model import spread_negatives
from tests.fixtures.checkpoints import SIZES, build_checkpoint
from tests.fixtures.tiny_model import CAPTIONS, build_tiny, masked_beside_plain
from tests.messages.case import Refused

_QUERY = "encoder.block.0.layer.0.SelfAttention.q.weight"
_NO = UnsupportedModelError
_Spoil = Callable[[Path], Any]


@cache
def _home() -> Any:
    return tempfile.TemporaryDirectory()  # which Python removes at its end


@cache
def _folder(family: str) -> Path:
    """The folder of a family's tiny checkpoint, of the tiny model, or of the masked one."""
    folder = Path(_home().name) / family
    folder.mkdir()
    if family == "tiny":
        return build_tiny(folder)
    return (
        masked_beside_plain(folder)[0] if family == "masked" else build_checkpoint(family, folder)
    )


@cache
def _pipe(family: str) -> TextToImage:
    return TextToImage.from_pretrained(_folder(family), size=SIZES.get(family))


def _call(family: str, prompt: Any = CAPTIONS[0], **options: Any) -> Callable[[], Any]:
    """A call that must be refused before any pass."""

    def call() -> Any:
        def fail(progress: Any) -> None:
            raise AssertionError("a pass was made")

        _pipe(family)(prompt, on_step=fail, **options)

    return call


def _arguments(family: str, *rows: tuple[dict[str, Any], str]) -> list[Refused]:
    """Rows of arguments of a call, and what the refusal says."""
    return [
        Refused(f"{family}: {options}", _call(family, **options), says=tuple(said.split(" … ")))
        for options, said in rows
    ]


def _serve(requests: Any, *says: str, **options: Any) -> Refused:
    """A list of requests that is refused before any pass."""

    def call() -> Any:
        pipe = _pipe("tiny")
        given = {"params": pipe.image_model.params, "deliver": print, **options}
        pipe.serve(requests, **given)

    return Refused(f"requests {requests!r} with {options}", call, says=says)


def _open(family: str, said: str, /, **options: Any) -> Refused:
    """Options that a model cannot be opened with."""
    name = f"{family} opened with {options}"
    call = lambda: TextToImage.from_pretrained(_folder(family), **options)  # noqa: E731
    return Refused(name, call, says=tuple(said.split(" … ")))


def _named(name: str, *says: str, error: Any = MMAccelError) -> Refused:
    """A name that is no model."""
    return Refused(f"model {name[:9]!r}", lambda: TextToImage.from_pretrained(name), says, error)


def _spoilt(family: str, spoil: _Spoil, said: str, error: Any = _NO) -> Refused:
    """A checkpoint with a part that is missing or does not fit."""

    def call() -> Any:
        source = _folder(family)
        with tempfile.TemporaryDirectory() as folder:
            base = source if source.is_dir() else source.parent
            copy = Path(shutil.copytree(base, Path(folder) / "spoilt"))
            spoil(copy)
            name = copy if source.is_dir() else copy / source.name
            TextToImage.from_pretrained(name, size=SIZES.get(family))

    return Refused(f"a spoilt {family}: {said}", call, tuple(said.split(" … ")), error)


def _edit(part: str, change: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    (file,) = (folder / part).glob("model.safetensors" if part == "." else "*.safetensors")
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def _drop(name: str, part: str = ".") -> _Spoil:
    return partial(_edit, part, lambda weights: weights.pop(name))


def _set(name: str, shape: Sequence[int], part: str = ".") -> _Spoil:
    return partial(_edit, part, lambda weights: weights.update({name: torch.zeros(shape)}))


def _without(name: str) -> _Spoil:
    return lambda folder: (folder / name).unlink()


def _bytes(name: str, content: bytes, old: str | None = None) -> _Spoil:
    def spoil(folder: Path) -> None:
        if old is not None:
            (folder / old).unlink()
        (folder / name).write_bytes(content)

    return spoil


def _cut(name: str) -> _Spoil:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:40])


def _json(name: str, **content: object) -> _Spoil:
    return lambda folder: (folder / name).write_text(json.dumps(content))


def _short_palette(folder: Path) -> None:
    file = folder / "preprocessor_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"clusters": content["clusters"][:5]}))


def _alone(folder: Path) -> None:
    """Without the folder beside it that has the image tokenizer."""


def _tell_callback(change: Callable[[dict[str, Any]], Any]) -> Callable[[], Any]:
    def callback(pipe: Any, step: int, timestep: int, state: dict[str, Any]) -> Any:
        return change(state)

    return lambda: _pipe("tiny")(CAPTIONS[0], seed=0, callback_on_step_end=callback)


def _change_in_place(state: dict[str, Any]) -> None:
    state["tokens"] += 1


_GOOD = Request(CAPTIONS[0], 1)
_TEXT_FOR_ALL = "negative prompt: expected a text for all, or a list"

CASES = (
    *_arguments(
        "tiny",
        ({"prompt": "a green circle"}, "received 'green'; it knows: a red blue … name another"),
        ({"prompt": ""}, "at least one word"),
        ({"prompt": []}, "prompt: expected a prompt or a list"),
        ({"prompt": 5}, "prompt: expected a prompt or a list"),
        ({"prompt": [5]}, "prompt: expected a prompt, received 5"),
        ({"prompt": " ".join(["a"] * 13)}, "at most 12 words, received 13"),
        ({"policy": 5}, "policy: expected a policy such as … received 5"),
        ({"policy": mmaccel.Jacobi}, "policy: expected a policy such as"),
        ({"policy": "jacobbi"}, "did you mean jacobi"),
        ({"policy": {"window": 5}}, 'a dictionary with a name, received … write for example {"na'),
        ({"policy": {"name": "jacobi", "windows": 5}}, "options out of window … did you mean win"),
        ({"policy": {"name": 3}}, "a dictionary with a name"),
        ({"policy": mmaccel.Stepwise()}, "such as mmaccel.Jacobi(window=32)"),
        ({"temperature": -1.0}, "temperature: expected a finite number >= 0"),
        ({"temperature": "hot"}, "temperature: expected a finite number >= 0, received 'hot'"),
        ({"temperature": float("nan")}, "temperature: expected a finite number >= 0"),
        ({"guidance_scale": "2"}, "guidance_scale: expected a finite number, received '2'"),
        ({"top_k": 2.5}, "top_k: expected an integer >= 1, received 2.5"),
        ({"top_k": True}, "top_k: expected an integer >= 1, received True"),
        ({"top_p": 0.0}, "top_p: expected a number in"),
        ({"min_p": "some"}, "min_p: expected a number in … received 'some'"),
        ({"batch_size": 0}, "batch_size: expected an integer >= 1"),
        ({"batch_size": 1.5}, "batch_size: expected an integer >= 1, received 1.5"),
        ({"num_images_per_prompt": 0}, "num_images_per_prompt: expected an integer"),
        ({"seed": [1, 2]}, "seed: expected an integer or 1"),
        ({"seed": 1.5}, "seed: expected an integer or one per row, received 1.5"),
        ({"seed": [1.5]}, "seed: expected an integer or one per row"),
        ({"generator": 3}, "expected a torch.Generator or a list"),
        ({"generator": []}, "expected a torch.Generator or a list"),
        ({"generator": torch.Generator(), "seed": 0}, "expected it or a seed"),
        ({"generator": [torch.Generator()] * 2}, "seed: expected"),
        ({"output_type": "latent"}, "output_type: expected one of pil, pt, np, tokens"),
        ({"num_inference_steps": 50}, "received 50; … leave it out, or choose passes with policy"),
        ({"height": 512, "width": 512}, "size: expected … received 512x512"),
        ({"height": 0.5}, "height: expected an integer"),
        ({"negative_prompt": "red", "guidance_scale": 1}, "guidance_scale other than 1 with it"),
        ({"negative_prompt": "a dragon"}, "negative prompt: expected words the … 'dragon'"),
        ({"negative_prompt": ["red", "blue"]}, "negative prompt: expected a text for all"),
        ({"negative_prompt": 3}, "negative prompt: expected a text for all"),
    ),
    *_arguments(
        "emu3",
        ({"prompt": "a red fox", "negative_prompt": "a <boi>"}, "negative prompt: … <boi>"),
        ({"prompt": "a red fox", "negative_prompt": "cat " * 300}, "positions: expected at most"),
    ),
    *_arguments(
        "masked",
        ({"policy": mmaccel.Jacobi()}, "such as mmaccel.LosslessUnmask(), received Jacobi"),
        (
            {"policy": "stepwise", "num_inference_steps": 5},
            "none under Stepwise … MaskedParallel()",
        ),
        ({"policy": "masked-parallel", "num_inference_steps": 0}, "num_inference_steps: expected"),
    ),
    *(
        Refused(
            f"negative prompts {given!r} for two",
            partial(spread_negatives, given, 2),
            (_TEXT_FOR_ALL,),
        )
        for given in (["a"], ["a", 3], 3, b"ab")
    ),
    *(
        Refused(f"a callback that {does}", _tell_callback(change), says=(said,))
        for does, change, said in (
            ("returns more", lambda s: {"tokens": s["tokens"] + 1}, "tokens as it was given"),
            ("changes in place", _change_in_place, "tokens as it was given"),
            ("returns a list", lambda s: {"lengths": [1]}, "lengths as it was given"),
            (
                "returns others",
                lambda s: {**s, "latents": 1},
                "lengths in return, received 'latents'",
            ),
        )
    ),
    Refused(
        "a bar that is asked for",
        lambda: _pipe("tiny").set_progress_bar_config(leave=False),
        says=("calls show no bar, received", "on_step="),
    ),
    Refused(
        "saving",
        lambda: _pipe("tiny").save_pretrained("folder"),
        says=("copy the folder or file it was loaded from",),
        error=AttributeError,
    ),
    Refused(
        "attaching to a pipeline of ours",
        lambda: mmaccel.attach(_pipe("tiny"), "jacobi"),
        says=("to its call: pipe(..., policy=policy)",),
        error=_NO,
    ),
    Refused(
        "attaching to a name",
        lambda: mmaccel.attach("scenes", "jacobi"),
        says=("AutoModelForCausalLM",),
        error=_NO,
    ),
    *(
        Refused(
            f"attaching {policy!r}",
            lambda policy=policy: mmaccel.attach(_pipe("tiny").model.model, policy),  # type: ignore[misc]
            says=(said,),
        )
        for policy, said in (("jacobbi", "did you mean jacobi"), (7, "policy: expected"))
    ),
    _serve([_GOOD, Request("a purple dragon", 1)], "dragon"),
    _serve([], "requests: expected a list"),
    _serve([_GOOD, CAPTIONS[0]], "requests: expected a list"),
    _serve(_GOOD, "requests: expected a list"),
    _serve([Request(CAPTIONS[0], [1, 2])], "seed: expected one integer"),  # type: ignore[arg-type]
    _serve([Request(CAPTIONS[0], 2**64)], "seed: expected a 64-bit"),
    _serve([_GOOD], "rows: expected an integer >= 1", rows=0),
    _serve([_GOOD], "deliver: expected a function", deliver=None),
    _serve([_GOOD], "params: expected", params=None),
    _serve([_GOOD], "policy: expected", policy=mmaccel.Stepwise()),
    _serve(
        [Request(CAPTIONS[0], 1, None, "red")],
        "guidance_scale other than 1 with it",
        params=SamplingParams(),
    ),
    _named("no-such", "model: expected a folder", "'no-such'", error=OptionError),
    *(_named(name, "model: expected") for name in ("..", ".", "x" * 300, "a/b/c", "~")),
    _open("janus", "size: expected 16x16, the only one of this model", size=(512, 512)),
    _open("emu3", "size: expected multiples of 8, received 30x32", size=(30, 32)),
    _open("lumina-mgpt", "size: expected multiples of 32", size=(64, 48)),
    _open("lumina-mgpt", "size: expected sides the model has a token for", size=(96, 64)),
    _open("glm-image", "size: expected multiples of 32", size=(100, 64)),
    _open("llamagen-c2i", "size: expected a square", size=(64, 32)),
    _open("imagegpt", "size: expected 8x8", size=(9, 9)),
    _open("emu3", "family: expected one of words, masked-words, janus", family="janos"),
    _open("llamagen-c2i", "decoder: expected a file", decoder="/no/such.pt", size=(64, 64)),
    _open("janus", "decoder: expected none for janus", decoder=__file__),
    _open("emu3", "size: expected a list, received 64", size=64),
    _open("emu3", "size: expected", size=(64.0, 64)),
    _open("emu3", "decoder: expected a Path, received 3", decoder=3),
    _spoilt("emu3", _drop("text_model.model.norm.weight"), "1 missing,  … norm"),
    _spoilt("emu3", _set("extra", [2]), "1 surplus, such as extra"),
    _spoilt("emu3", _set("lm_head.weight", [41, 32]), "1 of another shape,  … lm_head"),
    _spoilt(
        "emu3",
        _bytes("pytorch_model.bin", b"x" * 99, "model.safetensors"),
        "refuses (UnpicklingError",
    ),
    _spoilt(
        "glm-image",
        _drop("transformer_blocks.0.attn1.to_q.weight", "transformer"),
        "1 missing,  … to_q",
    ),
    _spoilt("chameleon", _bytes("vqgan.ckpt", b"hello"), "checkpoint of tensors"),
    _spoilt(
        "chameleon",
        _bytes("vqgan.safetensors", b"x" * 50, "vqgan.ckpt"),
        "(SafetensorError",
    ),
    _spoilt("janus", _without("chat_template.jinja"), "expected a chat template"),
    _spoilt("janus", _without("processor_config.json"), "JanusProcessor"),
    _spoilt(
        "chameleon", _without("vqgan.ckpt"), "decoder: expected weights of VQGAN's", OptionError
    ),
    _spoilt(
        "chameleon", _json("config.json", model_type="vit"), "expected words.json, config.json"
    ),
    _spoilt("imagegpt", _without("preprocessor_config.json"), "ImageProcessor"),
    _spoilt("imagegpt", _short_palette, "palette [32, 3] …  received [5, 3]"),
    _spoilt(
        "llamagen-t2i", _drop(_QUERY, "flan-t5-tiny"), "T5EncoderModel …  1 missing,  … SelfAttent"
    ),
    _spoilt("masked", _alone, "tokenizer", OptionError),
    *(
        _spoilt("tiny", spoil, said, MMAccelError)
        for spoil, said in (
            (_json("words.json", words=["a"], max_words=3), "vocabulary of 34 ids … received 41"),
            (_without("words.json"), "expected words.json,  … received llama"),
            (_json("config.json", model_type="vit"), "expected the AutoModelForCausalLM"),
            (_cut("model.safetensors"), "refuses (SafetensorError"),
            (_json("words.json"), "words.json with words and max_words"),
        )
    ),
)
