"""Which twin of every kernel runs on this machine, and why: a part of `mmaccel doctor`."""

from __future__ import annotations

from mmaccel.commands.doctor import Finding


def check_kernels() -> list[Finding]:
    """A finding per kernel; one alone where MMACCEL_KERNELS or torch rules all of them out."""
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
        said = [f"{kind}: {choice.backend}, {choice.reason}" for kind, choice in choices.items()]
        runs = dispatch.mode() != "triton" or any(c.backend == "triton" for c in choices.values())
        findings.append(Finding(f"kernel {kernel}", "yes" if runs else "no", "; ".join(said)))
    return findings
