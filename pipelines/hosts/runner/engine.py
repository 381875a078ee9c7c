"""The engine of a call: whether its forward passes are captured in CUDA graphs, and why not."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

import torch

from mmaccel.capabilities import Option, Reason, explain, refuse
from mmaccel.checks import check_fields, check_int, one_of, within
from mmaccel.contracts import PrefixGroups, Prompt, TokenModel
from mmaccel.errors import MissingBackendError, OptionError
from mmaccel.kernels import dispatch
from mmaccel.options import FusedSwitch, PassKeywords
from mmaccel.pipelines.hosts.runner import compiled_passes
from mmaccel.pipelines.hosts.runner.compiled_passes import UseCompile
from mmaccel.pipelines.hosts.runner.cuda_graphs import CudaGraphRunner, GraphCache
from mmaccel.policies import Policy
from mmaccel.samplers.prefix_tree import PREFIX_TREE
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.step_runner import StepRunner

UseGraphs = Literal["auto"] | bool
UseFused = FusedSwitch
UseSharing = Literal["auto"] | bool
GRAPHS = Option("cuda_graphs=True", frozenset({"captured steps"}))
SHARING = Option("share_prefix=True", frozenset({"shared prompts"}))
_FUSED = frozenset({"fused decoder"})
SWITCH = ("auto", True, False)
_LEAST_SHARED = 1024  # entries; for fewer, two attentions in a layer take more than they save


@dataclass(frozen=True)
class Engine:
    """How passes are carried out.

    Args:
        cuda_graphs: True captures one pass per window width in a CUDA graph and replays it, and
            raises where it cannot; False runs every pass as Python; "auto" captures where it can,
            and `Stats.runner_reason` says why not.
        sync_every: captured passes between two synchronisations with the host. With more than 1 the
            device never waits, but up to `sync_every - 1` passes after the last token do nothing.
        fused: True takes the fused decoder instead of the model's own forward, and raises where it
            does not serve the model; False never takes it; "auto" takes it where it serves, and
            `Stats.route_reason` says why not. "exact" is True with logits of the same bits at any
            width and batch, so that `bitwise` holds in bfloat16, too.
        compile: whether the fused decoder's passes on a CPU run as code that `torch.compile` makes.
            True compiles at the first passes, some seconds for each number of rows, and uses what
            is measured to be faster; "auto" does so once passes have taken 20 seconds; False never
            does.
        prefill_chunk_size: tokens of prompts that a pass processes at most, beside rows that
            decode; chunks run eagerly. None: whole prompts. One that the model's own prefill
            processes (images, embeddings, a cache) comes in chunks as well, or whole with
            the reason in `stats.notes`.
        share_prefix: True stores and reads once a prompt that several rows of a call have, as seen
            in their tokens, and raises where the model or the call cannot; "auto" does so where it
            serves and saves at least 1024 entries, and `Stats.notes` says why not; False: each row
            stores its own.
    """

    cuda_graphs: UseGraphs = one_of("auto", SWITCH, "auto uses them where that works")
    sync_every: int = within(1, 1, hint="try 4")
    fused: UseFused = one_of("auto", (*SWITCH, "exact"), "auto takes it where it serves")
    compile: UseCompile = one_of("auto", SWITCH, "auto compiles where long runs pay for it")
    prefill_chunk_size: int | None = within(None, 1, hint="try 512")
    share_prefix: UseSharing = one_of(False, SWITCH, "auto shares where rows have the same prompt")
    cache: GraphCache = field(default_factory=GraphCache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.compile is True and self.fused in (False, "exact"):
            raise OptionError(
                "compile=True: expected the fused decoder, whose passes are compiled, received "
                f"fused={self.fused!r}; leave it out"
            )

    @property
    def parts(self) -> tuple[Option, ...]:
        """What must be, as parts of a run."""
        parts = []
        if self.cuda_graphs is True:
            parts.append(GRAPHS)
        if self.fused in (True, "exact"):
            parts.append(Option(f"fused={self.fused!r}", _FUSED))
        if self.compile is True:
            parts.append(Option("compile=True", _FUSED))
        if self.prefill_chunk_size is not None:
            parts.append(chunks_of(self.prefill_chunk_size))
        if self.share_prefix is True:
            parts.append(SHARING)
        return tuple(parts)

    @property
    def needs_fused(self) -> bool:
        return self.fused in (True, "exact") or self.compile is True

    @property
    def options(self) -> PassKeywords:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return cast(PassKeywords, values)

    def check(self, device: torch.device | str, policy: Policy | None = None) -> None:
        """Refuse what `cuda_graphs=True` or `compile=True` can never serve: MissingBackendError for
        a device or compiler that is not there, OptionError for a policy whose passes cannot be
        captured.
        """
        device = torch.device(device)
        dispatch.check(device.type)
        if self.compile is True:
            _check_compile(device)
        if self.cuda_graphs is not True:
            return
        if device.type != "cuda":
            raise MissingBackendError(
                f"cuda_graphs=True: expected a model on a CUDA device, received one on {device}; "
                'move it with model.to("cuda"), or set cuda_graphs="auto"'
            )
        refuse(explain(policy, GRAPHS))

    def close(self) -> None:
        self.cache.clear()

    def prepare(
        self,
        window: Any,
        prompt: Prompt,
        policy: Any,
        params: SamplingParams,
        *,
        prefill_chunk_size: int | None = None,
    ) -> None:
        """Set a token model's next call: its step runner, how it processes prompts, which rows read
        one together, whether it may take the fused decoder. Canvas passes run eagerly, by the
        model's forward.

        Raises:
            UnsupportedModelError: an option that is True for a model or a call that cannot have it.
        """
        if prefill_chunk_size is not None:
            check_int("prefill_chunk_size", prefill_chunk_size, 1, hint="try 512")
        chunk_size = self.prefill_chunk_size if prefill_chunk_size is None else prefill_chunk_size
        if window.kind == "canvas":
            dispatch.check(window.device.type)
            tree = None if prompt.batching is None else prompt.batching.prefix_tree
            chunks = None if chunk_size is None else chunks_of(chunk_size)
            refuse(explain(self, chunks, None if tree is None else PREFIX_TREE, window))
        self.use_fused(window)
        if window.kind == "canvas":
            return
        window.setup.prefill_chunk_size = chunk_size
        self._share(window, prompt)
        window.setup.ragged = prompt.is_ragged
        runner = self.runner(window, prompt, policy, params)
        if "captured steps" in window.offers:
            window.setup.runner = runner

    def use_fused(self, window: TokenModel) -> None:
        """Say whether a model's next runs may take the fused decoder; refuses where one must."""
        refuse(explain(*(each for each in self.parts if each.needs == _FUSED), window))
        if "fused decoder" in window.offers:
            window.setup.fused = self.fused
            window.setup.compile = self.compile

    def _share(self, window: TokenModel, prompt: Prompt) -> None:
        setup = window.setup
        setup.prefixes = None
        setup.prefix_reason = ""
        if self.share_prefix is False:
            return
        groups = prompt.groups
        n_saved = groups.n_saved
        idle = ""
        if not n_saved:
            idle = "no two rows have the same prompt of two tokens or more"
            if prompt.batch == 1:
                idle = "one row is decoded at a time; decode several together (batch_size)"
        elif self.share_prefix == "auto" and n_saved < _LEAST_SHARED:
            idle = f"it would save {n_saved} entries; {_LEAST_SHARED} are worth it"
        reason = _find_admission(prompt, setup.prefill_chunk_size)
        if not reason and (self.share_prefix is True or not idle):  # a self-check's passes
            reason = window.lack("shared prompts") or find_other_inputs(window, groups)
        if reason and self.share_prefix is True:
            refuse([Reason(SHARING, window, "shared prompts", reason)])
        setup.prefix_reason = reason or idle
        if not setup.prefix_reason:
            setup.prefixes = groups

    def runner(
        self, window: TokenModel, prompt: Prompt, policy: Policy, params: SamplingParams
    ) -> StepRunner:
        """The step runner of a call; refuses `cuda_graphs=True` where it cannot be captured."""
        device = window.device
        self.check(device, policy)
        if self.cuda_graphs is False:
            return StepRunner(self.sync_every)
        reason: str | None = f"the model on {device}; CUDA graphs need a CUDA device"
        if device.type == "cuda":
            reason = find_obstacle(window, policy, params)
        if reason is None:
            falls_back = self.cuda_graphs == "auto"
            return CudaGraphRunner(device, self.sync_every, falls_back, self.cache)
        if self.cuda_graphs is True:
            refuse([Reason(GRAPHS, window, "captured steps", str(reason))])
        return StepRunner(self.sync_every, reason)


def chunks_of(size: int | None) -> Option:
    return Option(f"prefill_chunk_size={size}", frozenset({"chunked prompts"}))


def find_other_inputs(window: Any, groups: PrefixGroups) -> str:
    """Why rows of the same tokens are not alike; empty where they are."""
    inputs: dict[str, Any] = getattr(window, "get_row_inputs", dict)()
    for value in inputs.values():
        for rows in groups.rows if value is not None else ():
            if not torch.equal(value[list(rows)], value[[rows[0]] * len(rows)]):
                return "rows with the same tokens have other inputs beside them"
    return ""


def _find_admission(prompt: Prompt, chunk_size: int | None) -> str:
    """Which rows of a prompt begin later than others; empty where none do."""
    batching = prompt.batching
    if batching is None:
        return ""
    if batching.arrivals is not None:
        return "rows that may join the run"
    if batching.prefix_tree is not None:
        return "prompts that begin with what a prefix tree holds"
    if chunk_size is not None:
        return "prompts that are processed in chunks beside the rows that decode"
    if batching.max_num_seqs < prompt.batch:
        return f"{prompt.batch} rows of which {batching.max_num_seqs} are decoded at a time"
    return ""


def _check_compile(device: torch.device) -> None:
    received = ""
    if device.type != "cpu":
        received = f"one on {device}; move it"
    elif obstacle := compiled_passes.find_obstacle():
        received = f"a machine on which {obstacle}"
    if received:
        raise MissingBackendError(
            f"compile=True: expected a model on a CPU and a C++ compiler, received {received}, "
            'or set compile="auto"'
        )


def is_capturable(policy: Policy) -> bool:
    """Whether a policy and its draft source declare that passes never synchronise with the host."""
    return getattr(policy, "is_capturable", False) and not explain(policy, GRAPHS)


def find_obstacle(window: TokenModel, policy: Policy, params: SamplingParams) -> str | None:
    """Why passes on a CUDA device cannot be captured; None: they can, if none synchronises."""
    if not is_capturable(policy):
        return f"{type(policy).__name__}, whose passes synchronise with the host"
    recorder = window.setup.recorder
    if recorder is not None and recorder.is_active:
        return "outputs of every step, which the host stores"
    if why := window.lack("captured steps"):
        return why
    if params.processor is not None and not getattr(params.processor, "is_capturable", False):
        return "logits processors, which may synchronise with the host"
    model = window if window.model is None else window.model
    if hasattr(getattr(model, "_hf_hook", None), "prev_module_hook"):
        return "a model that enable_model_cpu_offload moves between calls"
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        return f"a model spread over {len(devices)} devices"
    return None
