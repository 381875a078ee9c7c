"""`mmaccel doctor`: which packages, devices, kernels and models work on this machine."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import typer

from mmaccel.commands.flags import as_command
from mmaccel.errors import MMAccelError, OptionError, UnsupportedModelError
from mmaccel.options import option

_NEEDED = {  # the oldest versions that pyproject.toml accepts
    "torch": "2.6",
    "transformers": "5.17",
    "numpy": "1.26",
    "einops": "0.8",
    "safetensors": "0.4",
    "pillow": "10",
}
_MARKS = {"yes": ("yes", "green"), "no": ("no", "yellow"), "needed": ("missing", "red")}
_ATTACH = 'with mmaccel.attach(model, "jacobi") as run: model.generate(...)'
_PASSES = 3  # of a model that is tried


class Finding(NamedTuple):
    """One row of the report: `state` is "yes", "no" or "needed" (missing, and nothing works)."""

    what: str
    state: str
    detail: str
    ready: str = ""  # what to run next; by default an image


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Report what this machine can run, and why not the rest. Exit code 1 if nothing can run."""

    model: str = option("scenes", "demo model, path or hub id")
    out: Path = option(Path("out"), "folder that images would go to")
    trust_remote_code: bool = option(
        False, "run Python code that the model's folder brings; read it first"
    )

    def run(self) -> None:
        from rich.text import Text

        from mmaccel.commands.terminal import make_table, wide_console

        findings = [*list_packages(), try_writing(self.out)]
        ready = ""
        if ("torch", "needed") not in [finding[:2] for finding in findings]:
            tried = try_model(self.model, self.trust_remote_code)
            findings += [*list_devices(), *list_kernels(), tried]
            ready = tried.ready
        table = make_table("what", "", "detail", title="mmaccel doctor")
        for finding in findings:
            table.add_row(finding.what, Text(*_MARKS[finding.state]), finding.detail)
        console = wide_console()
        console.print(table)
        broken = [finding.what for finding in findings if finding.state == "needed"]
        if broken:
            console.print(f"Cannot generate until this is fixed: {', '.join(broken)}.")
            raise typer.Exit(1)
        named = "" if self.model == "scenes" else f" --model {self.model}"
        console.print(f"Ready: {ready or f'mmaccel generate --compare{named}'}")


doctor = as_command(Doctor, pauses=False)


def list_packages() -> list[Finding]:
    from mmaccel.outputs.machine import package_version

    findings = [Finding("python", "yes", sys.version.split()[0])]
    for name, oldest in _NEEDED.items():
        version = package_version(name)
        if version is None or _numbers(version) < _numbers(oldest):
            detail = f"{version} is too old" if version else "not installed"
            findings.append(Finding(name, "needed", f"{detail}; pip install '{name}>={oldest}'"))
        else:
            findings.append(_look_at(name, version))
    triton = package_version("triton")
    missing = "not installed; only fused kernels need it"
    return [*findings, _unless("triton", "" if triton else missing, str(triton))]


def _look_at(name: str, version: str) -> Finding:
    """A package that is new enough: whether torch imports, and whether transformers is tested."""
    if name == "torch":
        try:
            import torch  # noqa: F401
        except (ImportError, OSError) as error:
            return Finding(name, "needed", f"torch does not import: {error}")
    if name == "transformers":
        from mmaccel.pipelines.hosts.transformers_release import describe_untested

        return Finding(name, "yes", "; ".join(filter(None, (version, describe_untested(version)))))
    return Finding(name, "yes", version)


def _unless(what: str, lack: str, detail: str) -> Finding:
    return Finding(what, "no", lack) if lack else Finding(what, "yes", detail)


def _numbers(version: str) -> list[int]:
    """The numbers of a version before its local part: "2.13.0+cpu" gives 2, 13 and 0."""
    return [int(digits) for digits in re.findall(r"\d+", version.partition("+")[0])]


def list_devices() -> list[Finding]:
    """CPU and GPUs, the number formats of each, and what makes passes on a CPU faster."""
    import torch

    from mmaccel.outputs.machine import cpu_name
    from mmaccel.pipelines.hosts.runner import compiled_passes, onednn

    lack = onednn.find_lack(torch.float32) or onednn.find_lack(torch.bfloat16)
    compiled = "compile=True makes passes on a CPU faster"
    findings = [
        Finding("cpu", "yes", f"{cpu_name()}; {_formats('cpu')}"),
        Finding("threads", "yes", _describe_threads()),
        _unless("compiler", compiled_passes.find_obstacle(), compiled),
        _unless("oneDNN", lack, "products in float32 and bfloat16"),
    ]
    if not torch.cuda.is_available():
        built = f"has CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        findings.append(Finding("cuda", "no", f"this torch {built}, and finds no NVIDIA GPU"))
    for index in range(torch.cuda.device_count()):
        detail = f"{torch.cuda.get_device_name(index)}; {_formats(f'cuda:{index}')}"
        findings.append(Finding(f"cuda:{index}", "yes", detail))
    return findings


def _describe_threads() -> str:
    """Processors, torch's threads, the load, and how commands choose the number of threads."""
    import torch

    from mmaccel.pipelines.hosts.runner.threads import is_chosen_already

    n_threads = torch.get_num_threads()
    text = f"torch takes {n_threads} of {os.cpu_count()} processors"
    if hasattr(os, "getloadavg"):
        text += f"; load {os.getloadavg()[0]:.1f} (processes that want one, in the last minute)"
    chosen = (
        f"mmaccel generate measures a pass with 1 to {n_threads} threads at its first passes "
        "(about half a second) and takes the fastest"
    )
    if "OMP_NUM_THREADS" in os.environ:
        chosen = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} fixes their number"
    elif is_chosen_already():
        chosen = "one thread leaves nothing to choose"
    return f"{text}; {chosen}; --threads N sets their number"


def _formats(device: str) -> str:
    """Number formats in which a matrix product runs on a device."""
    import torch

    works = []
    for name in ("float64", "float32", "bfloat16", "float16"):
        try:
            ones = torch.ones(8, 8, dtype=getattr(torch, name), device=device)
            works += [name] if bool(((ones @ ones) == 8).all()) else []
        except RuntimeError:  # the device does not support this format
            continue
    return ", ".join(works)


def list_kernels() -> list[Finding]:
    """Which version of each kernel runs here; one finding if MMACCEL_KERNELS is wrong."""
    import torch

    from mmaccel.kernels import dispatch

    kinds = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    try:
        choices = {kind: dispatch.choose(kind) for kind in kinds}
    except OptionError as error:
        return [Finding("kernels", "needed", str(error))]
    said = "; ".join(f"{kind}: {each.backend}, {each.reason}" for kind, each in choices.items())
    runs = dispatch.mode() != "triton" or any(c.backend == "triton" for c in choices.values())
    if not runs:
        said += f"; calls raise, as {dispatch.VARIABLE}=triton"
    state = "yes" if runs else "no"
    return [Finding(f"kernel {kernel}", state, said) for kernel in dispatch.KERNELS]


def try_model(name: str, trust_remote_code: bool = False) -> Finding:
    """Whether the weights exist and load, and a forward pass computes finite logits."""
    try:
        from mmaccel.config_files import read_json
        from mmaccel.loading import open_pipeline
        from mmaccel.options import LoadOptions
        from mmaccel.pipelines.models.omnivoice import MODEL_TYPE
        from mmaccel.pipelines.text_to_image.registry import find_source

        source = find_source(name)
        config = read_json(source / "config.json", may_lack=True)
        if config.get("model_type") == MODEL_TYPE:  # which transformers does not know
            return try_speech(name)
        if (source / "config.json").is_file() and not (source / "words.json").is_file():
            return try_checkpoint(source, name, trust_remote_code)
        load = LoadOptions(device="cpu", trust_remote_code=trust_remote_code)
        pipe = open_pipeline(name, load)
        _run_passes(pipe)
    except (MMAccelError, ImportError, OSError, ValueError, TypeError, ArithmeticError) as error:
        return Finding(f"model {name}", "needed", " ".join(str(error).split()))
    return Finding(f"model {name}", "yes", f"{pipe.length} tokens an image")


def _run_passes(pipe: Any) -> None:
    def stop(state: Any) -> Any:
        return state.lengths * 0 if state.passes >= _PASSES else None

    policy = "autoregressive" if pipe.model.kind == "window" else "stepwise"
    example = pipe.image_model.examples[0]
    pipe(example, seed=0, policy=policy, output_type="tokens", on_step=stop)


def try_speech(name: str) -> Finding:
    """Whether a model that speaks by a canvas loads, with its codec, and a pass is finite."""
    from mmaccel.loading import open_with_parts
    from mmaccel.options import LoadOptions

    pipe = open_with_parts("TextToSpeech", name, LoadOptions(device="cpu"))
    pipe("a", seed=0, policy="stepwise", on_step=lambda progress: progress.lengths * 0)
    return Finding(f"model {name}", "yes", "speaks texts", f"mmaccel speak TEXT --model {name}")


def try_checkpoint(folder: Path, name: str, trust_remote_code: bool = False) -> Finding:
    """Whether policies attach to the transformers model of a folder, and whether it draws."""
    import torch
    import transformers

    from mmaccel.handle import supports
    from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, load_config_file, load_model
    from mmaccel.pipelines.hosts.loading.refusal import refusing
    from mmaccel.pipelines.text_to_image.registry import find_image_family

    what = f"model {name}"
    transformers.utils.logging.disable_progress_bar()
    config = load_config_file(folder, LoadConfig(trust_remote_code=trust_remote_code))
    kind = str((config.architectures or ["no architecture"])[0])
    found = getattr(transformers, kind, transformers.AutoModelForCausalLM)
    is_known = hasattr(transformers, kind) and issubclass(found, transformers.PreTrainedModel)
    if not is_known and not trust_remote_code:
        return Finding(what, "needed", f"this transformers has no {kind}")
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    load_config = LoadConfig(dtype=dtype, trust_remote_code=trust_remote_code)
    model = load_model(found, folder, load_config, optional="")
    with refusing(f"a model in {folder}", "one that fails", "copy the folder again"):
        support = supports(model)
    if not support:
        return Finding(what, "no", support.reason)
    try:
        draws = f"with it as {find_image_family(folder, name)}"
    except UnsupportedModelError:
        draws = "with other models only"
    detail = f"attach takes {', '.join(support.policies)}; generate draws {draws}"
    return Finding(what, "yes", f"family {support.family}; {detail}", _ATTACH)


def try_writing(folder: Path) -> Finding:
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        return Finding("write access", "needed", f"{nearest}: {error.strerror}; choose --out")
    return Finding("write access", "yes", f"{nearest.absolute()} on {platform.system()}")
