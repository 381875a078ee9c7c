"""`mmaccel doctor`: which packages, devices, kernels and models work on this machine."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from mmaccel.checks import check_number
from mmaccel.commands.options import TrustRemoteCode, check_count, parse_path
from mmaccel.errors import MMAccelError, OptionError
from mmaccel.limits import MAX_BATCH, MAX_MEASURED

_NEEDED = {  # the oldest versions that pyproject.toml accepts
    "torch": "2.6",
    "transformers": "5.17",
    "numpy": "1.26",
    "einops": "0.8",
    "safetensors": "0.4",
    "pillow": "10",
}


class Finding(NamedTuple):
    """One row of the report; `state` is "yes", "no" or "needed" (missing, and nothing works)."""

    what: str
    state: str
    detail: str


def doctor(
    model: Annotated[str, typer.Option(help="demo model or folder")] = "scenes",
    out: Annotated[Path, typer.Option(help="folder that images would go to")] = Path("out"),
    image: Annotated[
        Path | None,
        typer.Option(
            help="of a question to a vision-language model", parser=parse_path, metavar="FILE"
        ),
    ] = None,
    keep: Annotated[float, typer.Option(help="fraction of its visual tokens that stays")] = 0.22,
    answer_tokens: Annotated[int, typer.Option(help="of its answer")] = 64,
    concurrency: Annotated[int, typer.Option(help="questions at a time")] = 1,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Report what this machine can run, and why not the rest. Of a vision-language model also
    measure whether fewer visual tokens pay here. Exit code 1 if nothing can run."""
    from rich.text import Text

    from mmaccel.commands.terminal import make_table, wide_console

    check_number("--keep", keep, 0, 1, "give the fraction that stays", above_low=True)
    check_count("answer-tokens", answer_tokens, MAX_MEASURED)
    check_count("concurrency", concurrency, MAX_BATCH)
    found = check_model(model, trust_remote_code)
    reads = "family vision_language" in found.detail
    if image is not None and not reads:
        raise OptionError(
            f"--image: expected a vision-language model with it, received --model {model}; leave "
            "it out"
        )
    findings = [*check_packages(), *check_devices(), *check_kernels(), found, check_writing(out)]
    table = make_table("what", "", "detail", title="mmaccel doctor")
    marks = {"yes": ("yes", "green"), "no": ("no", "yellow"), "needed": ("missing", "red")}
    for finding in findings:
        table.add_row(finding.what, Text(*marks[finding.state]), finding.detail)
    console = wide_console()
    console.print(table)
    broken = [finding.what for finding in findings if finding.state == "needed"]
    if broken:
        console.print(f"Cannot generate until this is fixed: {', '.join(broken)}.")
        raise typer.Exit(1)
    if reads:
        tell_visual_tokens(model, image, keep, answer_tokens, concurrency)
    if "attach takes" in found.detail:
        console.print('Ready: with mmaccel.attach(model, "jacobi") as run: model.generate(...)')
    else:
        named = "" if model == "scenes" else f" --model {model}"
        console.print(f"Ready: mmaccel generate --compare{named}")


def check_packages() -> list[Finding]:
    """Versions of Python, of the required packages and of triton."""
    from mmaccel.outputs.machine import package_version

    findings = [
        Finding(
            "python", "yes" if sys.version_info >= (3, 11) else "needed", sys.version.split()[0]
        )
    ]
    for name, oldest in _NEEDED.items():
        found = package_version(name)
        if found is None:
            findings.append(Finding(name, "needed", f"not installed; pip install {name}"))
        elif _numbers(found) < _numbers(oldest):
            old = f"{found} is too old; pip install '{name}>={oldest}'"
            findings.append(Finding(name, "needed", old))
        else:
            findings.append(Finding(name, "yes", found + _describe_release(name, found)))
    triton = package_version("triton")
    missing = "not installed; only fused kernels need it"
    findings.append(Finding("triton", "yes" if triton else "no", triton or missing))
    return [*findings, _find_compiler(), _find_onednn()]


def _describe_release(name: str, found: str) -> str:
    """What to add to the version of a package that is newer than the tests; else empty."""
    if name != "transformers":
        return ""
    from mmaccel.pipelines.transformers_release import describe_untested

    untested = describe_untested(found)
    return "" if untested is None else f"; {untested}"


def _find_compiler() -> Finding:
    """Whether passes on a CPU can be compiled."""
    try:
        from mmaccel.pipelines.runner.compiled_passes import find_obstacle
    except ImportError:  # of torch, which has a line of its own
        return Finding("compiler", "no", "unknown without torch")
    obstacle = find_obstacle()
    return Finding(
        "compiler",
        "no" if obstacle else "yes",
        obstacle or "compile=True makes passes on a CPU faster",
    )


def _find_onednn() -> Finding:
    """Whether products of few rows on a CPU read weights in oneDNN's order."""
    try:
        import torch

        from mmaccel.pipelines.runner.onednn import find_lack
    except ImportError:
        return Finding("oneDNN", "no", "unknown without torch")
    lack = find_lack(torch.float32) or find_lack(torch.bfloat16)
    return Finding("oneDNN", "no" if lack else "yes", lack or "products in float32 and bfloat16")


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" gives (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def check_devices() -> list[Finding]:
    """CPU and GPUs, and the number formats that each supports."""
    try:
        import torch
    except ImportError as error:
        return [Finding("devices", "needed", f"torch does not import: {error}")]
    from mmaccel.outputs.machine import cpu_name

    findings = [
        Finding("cpu", "yes", f"{cpu_name()}; {_formats('cpu')}"),
        Finding("threads", "yes", describe_cpu_threads()),
    ]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            name = f"cuda:{index}"
            detail = f"{torch.cuda.get_device_name(index)}; {_formats(name)}"
            findings.append(Finding(name, "yes", detail))
    elif torch.version.cuda is None:
        findings.append(Finding("cuda", "no", "this torch is built without CUDA; use cpu"))
    else:
        reason = f"torch has CUDA {torch.version.cuda}, but finds no NVIDIA GPU or driver"
        findings.append(Finding("cuda", "no", reason))
    return findings


def describe_cpu_threads() -> str:
    """Processors, torch's threads, the load, and how commands choose the number of threads."""
    import torch

    from mmaccel.pipelines.runner.threads import is_chosen_already

    own = torch.get_num_threads()
    there = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    text = f"torch takes {own} of {there} processors"
    text += "" if usable == there else f" ({usable} for this process)"
    if hasattr(os, "getloadavg"):
        text += f"; load {os.getloadavg()[0]:.1f} (processes that want one, in the last minute)"
    if "OMP_NUM_THREADS" in os.environ:
        chosen = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} fixes their number"
    elif is_chosen_already():
        chosen = "one thread leaves nothing to choose"
    else:
        chosen = (
            f"mmaccel generate measures a pass with 1 to {own} threads at its first passes (about "
            "half a second) and takes the fastest"
        )
    return f"{text}; {chosen}; --threads N sets their number"


def _formats(device: str) -> str:
    """Number formats in which a matrix product runs on a device."""
    import torch

    works = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        try:
            ones = torch.ones(8, 8, dtype=dtype, device=device)
            if bool(((ones @ ones) == 8).all()):
                works.append(str(dtype).removeprefix("torch."))
        except RuntimeError:  # the device does not support this format
            continue
    return ", ".join(works)


def check_kernels() -> list[Finding]:
    """Which version of each kernel runs here; one finding if MMACCEL_KERNELS or torch is wrong."""
    from mmaccel.errors import OptionError

    try:
        import torch

        from mmaccel.kernels import dispatch
    except ImportError as error:
        return [Finding("kernels", "needed", f"torch does not import: {error}")]
    kinds = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    try:
        surveys = {kind: dispatch.survey(kind) for kind in kinds}
    except OptionError as error:
        return [Finding("kernels", "needed", str(error))]
    findings = []
    for kernel in dispatch.KERNELS:
        choices = {kind: survey[kernel] for kind, survey in surveys.items()}
        texts = [f"{kind}: {choice.backend}, {choice.reason}" for kind, choice in choices.items()]
        runs = dispatch.mode() != "triton" or any(c.backend == "triton" for c in choices.values())
        findings.append(Finding(f"kernel {kernel}", "yes" if runs else "no", "; ".join(texts)))
    return findings


def check_model(name: str, trust_remote_code: bool = False) -> Finding:
    """Whether the weights exist and load, and a forward pass computes finite logits."""
    try:
        from mmaccel.loading import open_pipeline
        from mmaccel.options import LoadOptions
        from mmaccel.pipelines.text_to_image.contact_sheet import make_plain
        from mmaccel.pipelines.text_to_image.generator import warm_up
        from mmaccel.pipelines.text_to_image.model import pick_policy
        from mmaccel.pipelines.text_to_image.registry import find_source

        source = find_source(name)
        if is_checkpoint(source):
            return check_checkpoint(source, name, trust_remote_code)
        load = LoadOptions(device="cpu", trust_remote_code=trust_remote_code)
        pipe = open_pipeline(name, load)
        policy = make_plain(pick_policy(None, pipe.model))
        options = pipe.image_model.params, pipe.image_model.examples[0], 1
        warm_up(pipe, policy, *options)
        measured = measure_passes(lambda: warm_up(pipe, policy, *options))
    except (MMAccelError, ImportError, OSError, ValueError, TypeError, ArithmeticError) as error:
        return Finding(f"model {name}", "needed", " ".join(str(error).split()))
    return Finding(f"model {name}", "yes", f"{pipe.length} tokens an image{measured}")


def measure_passes(run: Callable[[], float]) -> str:
    """Milliseconds of a pass by number of CPU threads, and which number `generate` would take.

    Empty where nothing is to be chosen. Cost: two or more passes for each number, about 0.3 s.

    Args:
        run: runs a few passes and returns the seconds that one took.
    """
    import torch

    from mmaccel.pipelines.runner.threads import (
        choose_threads,
        describe_threads,
        is_chosen_already,
        list_counts,
        measure_threads,
    )

    if is_chosen_already():
        return ""
    own = torch.get_num_threads()
    measured = measure_threads(run, list_counts(own), budget=0.3)
    chosen = choose_threads(measured, own)
    return f"; a pass takes, with threads {describe_threads(measured)}: {chosen} now"


def is_checkpoint(source: Path) -> bool:
    """Whether a path is a folder with a transformers model other than those of mmaccel."""
    return (source / "config.json").is_file() and not (source / "words.json").is_file()


def check_checkpoint(folder: Path, name: str, trust_remote_code: bool = False) -> Finding:
    """Whether policies attach to the transformers model of a folder, and whether it draws."""
    import torch
    import transformers
    from transformers import PreTrainedModel

    from mmaccel.errors import UnsupportedModelError
    from mmaccel.handle import supports
    from mmaccel.pipelines.loading.checkpoint import LoadConfig, load_config_file, load_model
    from mmaccel.pipelines.loading.refusal import refusing
    from mmaccel.pipelines.text_to_image.registry import find_image_family
    from mmaccel.pipelines.transformers_release import VERSION

    what = f"model {name}"
    transformers.utils.logging.disable_progress_bar()
    config = load_config_file(folder, LoadConfig(trust_remote_code=trust_remote_code))
    names = [*map(str, config.architectures or ())] or ["no architecture"]
    kind = getattr(transformers, names[0], None)
    if trust_remote_code and kind is None:
        kind = transformers.AutoModelForCausalLM
    is_auto = kind is transformers.AutoModelForCausalLM
    if not is_auto and not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        detail = f"transformers {VERSION} has no {names[0]}"
        return Finding(what, "needed", detail)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    load_config = LoadConfig(dtype=dtype, trust_remote_code=trust_remote_code)
    model = load_model(kind, folder, load_config, optional="")
    with refusing(f"a model in {folder}", "one that fails", "copy the folder again"):
        support = supports(model)
    if not support:
        return Finding(what, "no", support.reason)
    detail = f"family {support.family}; attach takes {', '.join(support.policies)}"
    try:
        detail += f"; generate draws with it as {find_image_family(folder, name)}"
    except UnsupportedModelError:
        detail += "; generate draws with other models only"
    return Finding(what, "yes", detail)


def tell_visual_tokens(
    name: str, image: Path | None, keep: float, answer_tokens: int, concurrency: int
) -> None:
    """Measure whether fewer visual tokens pay, and print it; or why that cannot be measured.

    Args:
        name: of a vision-language model, see `doctor`.
        image: a file; None: noise of 672x672 pixels.
        keep, answer_tokens, concurrency: see `mmaccel.plan_visual_tokens`.

    Raises:
        OptionError: a file that is no image.
    """
    from PIL import Image

    import mmaccel
    from mmaccel.commands.terminal import say, stderr_console
    from mmaccel.evaluation.questions import Question
    from mmaccel.evaluation.visual_tokens import open_model
    from mmaccel.pipelines.loading.placement import choose_placement

    shown = Image.effect_noise((672, 672), 64).convert("RGB") if image is None else image
    question = Question("", "what is in this image?", "", image=shown)
    stderr_console().print("measuring whether fewer visual tokens pay")
    try:
        vlm = open_model(name, *choose_placement())
        inputs = vlm.encode([question])
        plan = mmaccel.plan_visual_tokens(
            vlm.model, inputs, keep, max_new_tokens=answer_tokens, concurrency=concurrency
        )
    except OptionError:
        raise
    except MMAccelError as error:
        say(f"visual tokens: not measured: {error}")
        return
    made_up = "a made-up image of 672x672 (give --image)" if image is None else str(image)
    say(f"Visual tokens of {made_up}.\n{plan}")


def check_writing(folder: Path) -> Finding:
    """Whether the folder for results, or the nearest existing one above it, can be written."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        return Finding("write access", "needed", f"{nearest}: {error.strerror}; choose --out")
    return Finding("write access", "yes", f"{nearest.absolute()} on {platform.system()}")
