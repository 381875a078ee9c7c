"""Quantised models: what their matrix products round, and what that leaves of a guarantee.

Quantised weights alone change nothing: they are constants. Where activations are quantised at every
pass, a last bit moves a number by a step of int8 (1/127 of the largest number), and a scale that a
pass's tokens share makes the logits of each depend on the others, later ones included.

Source: attributes of torchao 0.18, bitsandbytes 0.50, compressed-tensors 0.20, torch 2.13 and
transformers' `quantization_config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

_WEIGHTS_ALONE = {  # quant_method of transformers' loaders whose products keep the model's dtype
    "aqlm", "auto-round", "awq", "bitnet", "bitsandbytes", "compressed-tensors", "eetq", "gguf",
    "gptq", "higgs", "hqq", "mxfp4", "quanto", "spqr", "sinq", "torchao", "vptq",
}  # fmt: skip
_QUANTIZERS = ("bitsandbytes.", "torchao.", "torch.ao.nn.quantized", "compressed_tensors.")


@dataclass(frozen=True)
class Activations:
    """How a model rounds what goes into its matrix products."""

    method: str  # who does, such as "torchao's Int8Tensor"
    format: str  # of numbers, such as "int8"
    # whether tokens of a pass share a scale or a choice of columns: the logits of one then depend
    # on the others, and the remedy says how to load the model without that
    is_shared: bool = False
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.format} activations of {self.method}"


def find_activations(model: nn.Module) -> Activations | None:
    """How a model's activations are quantised; None where products keep its dtype. Of several
    kinds, one with a shared scale. Cost: one visit of each module.
    """
    kinds = list(dict.fromkeys(_find_kinds(model)))
    if kinds:
        return max(kinds, key=lambda kind: (kind.is_shared, kind.format.endswith("8")))
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    method = _read(config, "quant_method")
    name = str(getattr(method, "value", method) or "")
    return Activations(name, name) if name and name not in _WEIGHTS_ALONE else None


def find_quantization(model: nn.Module) -> str:
    """Who quantised a model's weights, such as "bitsandbytes"; empty for plain weights."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None:
        method = _read(config, "quant_method")
        return str(getattr(method, "value", method) or "a quantization_config")
    for module in model.modules():
        weight = module._parameters.get("weight")
        for name in (type(module).__module__, type(weight).__module__):
            if name.startswith(_QUANTIZERS):
                return name if name.startswith("torch.ao") else name.partition(".")[0]
    return ""


def describe_sharing(model: nn.Module) -> str:
    """What to tell the caller of a model whose tokens share a scale; empty for others."""
    activations = find_activations(model)
    if activations is None or not activations.is_shared:
        return ""
    return (
        f"{activations}: tokens of a pass share its rounding, so that the logits of one depend on "
        f"the others, in plain generate on the other rows; {activations.remedy}"
    )


def _find_kinds(model: nn.Module) -> Iterator[Activations]:
    for module in model.modules():
        kind = type(module)
        weight = module._parameters.get("weight")
        if kind.__module__.startswith("bitsandbytes."):
            yield from _of_bitsandbytes(module)
        elif kind.__module__.startswith("torch.ao.nn.quantized.dynamic"):
            yield Activations(
                "torch.ao.quantization", "int8", True,
                "torchao's Int8DynamicActivationInt8WeightConfig has a scale for each token",
            )  # fmt: skip
        elif weight is not None and type(weight).__module__.startswith("torchao."):
            yield from _of_torchao(weight)
        scheme = getattr(module, "quantization_scheme", None)
        if getattr(scheme, "input_activations", None) is not None:
            yield _of_compressed_tensors(scheme)


def _of_bitsandbytes(module: Any) -> Iterator[Activations]:
    name = type(module).__name__
    if name == "Linear8bitLt":
        chooses = module.state.threshold > 0  # columns of outliers, over all tokens of a pass
        remedy = "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0) does not"
        yield Activations(f"bitsandbytes' {name}", "int8", chooses, remedy if chooses else "")
    elif name == "Linear4bit" and module.weight.device.type == "cpu":
        # where the processor has AVX512-BF16 its kernel computes in bfloat16, whatever it is asked
        yield Activations(f"bitsandbytes' {name}", "bfloat16")
    elif name == "Linear4bit" and module.compute_dtype is not None:
        dtype = str(module.compute_dtype).removeprefix("torch.")
        if dtype != "float32":
            yield Activations(f"bitsandbytes' {name}", dtype)


def _of_torchao(weight: Any) -> Iterator[Activations]:
    name = type(weight).__name__
    options = getattr(weight, "act_quant_kwargs", None)
    if options is None and not getattr(weight, "activation_quantization", None):
        if "ActivationQuantized" not in name:  # the tensors of earlier versions
            return
    is_static = getattr(weight, "act_quant_scale", None) is not None
    per_tensor = type(getattr(options, "granularity", None)).__name__ == "PerTensor"
    remedy = "granularity=PerRow() gives each token its own"
    is_shared = per_tensor and not is_static
    number = "float8" if "Float8" in name or "Float8" in type(options).__name__ else "int8"
    yield Activations(f"torchao's {name}", number, is_shared, remedy if is_shared else "")


def _of_compressed_tensors(scheme: Any) -> Activations:
    inputs = scheme.input_activations
    strategy = str(getattr(inputs.strategy, "value", inputs.strategy))
    number = str(getattr(inputs.type, "value", inputs.type))
    is_shared = bool(inputs.dynamic) and strategy == "tensor"
    remedy = "the strategy 'token' gives each its own scale" if is_shared else ""
    return Activations("compressed-tensors", f"{number}{inputs.num_bits}", is_shared, remedy)


def _read(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)
