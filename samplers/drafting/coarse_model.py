"""The coarse model of coarse drafts: a small network that scores a token from its neighbours.

It sees the tokens at `neighbours` (of a grid, of the previous frame, or the last tokens of a text),
the slot, and two hidden states of the large model: that of slot 0, which carries the prompt, and
that of the slot itself, as the last pass computed it on other tokens (distance 0), or of the last
slot of that pass (distance 1 and more). What the network says is added to the latter: a coarse
model of zeros leaves the scores of the last pass as they are. Embeddings and output scores come
from the large model's output matrix.

A folder stores one as `coarse.json` (`CoarseConfig`, how its large model is recognised, and what
was measured) and `coarse.safetensors` (float16, without the large model's weights).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmaccel.checks import Domain, show, within
from mmaccel.config_files import read_value
from mmaccel.errors import OptionError
from mmaccel.kernels.coarse_rounds import SweepWeights
from mmaccel.kernels.coarse_rounds_numpy import SlotWeights
from mmaccel.weight_folders import Schema, open_folder, save_folder, shapes_of

GRID_NEIGHBOURS = (  # (frames back, rows up, columns to the right)
    (0, 0, -1), (0, 0, -2), (0, 0, -3),
    (0, 1, -2), (0, 1, -1), (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 1, 3),
    (0, 2, -1), (0, 2, 0), (0, 2, 1), (0, 3, 0),
)  # fmt: skip
VIDEO_NEIGHBOURS = (*GRID_NEIGHBOURS, (1, 0, 0), (1, -1, 0), (1, 0, 1), (1, 0, -1), (1, 1, 0))
TEXT_NEIGHBOURS = tuple((0, 0, -k) for k in range(1, 9))
_RELATIVE = 0.02  # by which two fingerprints of one model may differ: other dtypes, quantization


@dataclass(frozen=True)
class CoarseConfig:
    vocab_size: int = field(metadata={"domain": Domain(2)})  # V
    hidden_size: int = field(metadata={"domain": Domain(1, 2**16)})  # D, of the large model
    # (frames back, rows up, columns to the right) of each, all of them earlier slots
    neighbours: tuple[tuple[int, int, int], ...] = within(GRID_NEIGHBOURS, -4095, 4095)
    columns: int = 0  # slots of a row, 0 where tokens form none
    frame: int = 0  # slots of a frame, 0 where there is one
    n_slots: int = 0  # slots with an embedding of their own; 0 if none has
    embedding: int = within(48, 1, 4096)
    width: int = within(256, 1, 4096)  # H, of both hidden layers
    reach: int = within(32, 1, 4096)  # the largest distance with an embedding of its own

    def find_neighbours(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Neighbours `[..., N]` of `slots`, which exist; without rows some lie before slot 0."""
        frames, rows, columns = slots.new_tensor(self.neighbours).unbind(1)
        slots = slots[..., None]
        others = slots - frames * self.frame - rows * self.columns + columns  # [..., N]
        if not self.columns:
            return others, others < slots
        # on a grid a neighbour must not lie beyond the ends of a row, nor in another frame's rows
        inside = slots % self.frame if self.frame else slots
        column = inside % self.columns + columns
        row = inside // self.columns - rows
        exists = (column >= 0) & (column < self.columns) & (row >= 0) & (others >= 0)
        if self.frame:
            exists &= row < -(-self.frame // self.columns)
        return others, exists & (others < slots)


class CoarseModel(nn.Module):
    """Scores of a token from its neighbours, slot and hidden state; `output` is `[V, D]`."""

    drafts_new_slots = True

    def __init__(self, config: CoarseConfig, output: Tensor) -> None:
        super().__init__()
        self.config = config
        self.output = output.detach().float()
        scaled = self.output / self.output.std()
        self.embedded = torch.cat([scaled, scaled.new_zeros(1, scaled.shape[1])])
        width = config.width
        self.project = nn.Linear(config.hidden_size, config.embedding, bias=False)
        self.mix = nn.Linear(len(config.neighbours) * config.embedding, width)
        self.slots = nn.Embedding(max(1, config.n_slots), width)
        self.distances = nn.Embedding(config.reach + 1, width)
        self.gates = nn.Embedding(config.reach + 1, 1)
        self.state = nn.Linear(config.hidden_size, width, bias=False)
        self.prompt = nn.Linear(config.hidden_size, width, bias=False)
        self.inner = nn.Linear(width, width)
        self.out = nn.Linear(width, config.hidden_size)
        for table in (self.slots, self.distances):
            nn.init.normal_(table.weight, std=0.02)
        nn.init.constant_(self.gates.weight, -0.9)  # a state far away says little
        nn.init.zeros_(self.out.bias)

    def sweep_weights(self) -> SweepWeights:
        """The weights as a sweep reads them: a table instead of embeddings and their matrix."""
        config = self.config
        mix = self.mix.weight.view(config.width, len(config.neighbours), config.embedding)
        table = torch.einsum("ve,hke->kvh", self.project(self.embedded), mix)
        head = self.output @ self.out.weight  # [V, H]
        return SweepWeights(
            table.reshape(-1, config.width).contiguous(),
            self.inner.weight.T.contiguous(),
            self.inner.bias.detach(),
            head.contiguous(),
            self.output @ self.out.bias,
        )

    def slot_weights(self) -> SlotWeights:
        """The weights of `base` as the sweep of a row reads them, and those of `gate`."""
        return SlotWeights(
            self.state.weight.T.contiguous(),
            self.slots.weight,
            self.distances.weight,
            1 + self.gates.weight[:, 0],
        )

    def of_prompt(self, prompts: Tensor) -> Tensor:
        """What is known of all slots, `[..., H]`, from states `[..., D]` of slot 0."""
        known: Tensor = self.prompt(prompts)
        return known + self.mix.bias

    def base(self, slots: Tensor, distances: Tensor, states: Tensor, prompts: Tensor) -> Tensor:
        """What is known of slots `[...]` before their neighbours are, `[..., H]`."""
        config = self.config
        slots = slots.clamp(max=max(1, config.n_slots) - 1)
        distances = distances.clamp(max=config.reach)
        known = self.state(states) + self.of_prompt(prompts)
        return known + self.slots(slots) + self.distances(distances)

    def gate(self, distances: Tensor) -> Tensor:
        """Weights `[..., 1]` of a state at distances `[...]` of 1 and more."""
        weights: Tensor = 1 + self.gates(distances.clamp(max=self.config.reach))
        return weights

    def hidden(self, neighbours: Tensor, base: Tensor) -> Tensor:
        """The second hidden layer `[..., H]` from the ids `[..., N]` of neighbours, V for none."""
        ids, index = neighbours.unique(return_inverse=True)
        tokens = self.project(self.embedded[ids])  # [ids, E]: few of a large vocabulary
        mixed = F.linear(F.embedding(index, tokens).flatten(-2), self.mix.weight)
        first = torch.relu(mixed + base)
        return first + torch.relu(self.inner(first))

    def new_state(self, hidden: Tensor, distances: Tensor, states: Tensor) -> Tensor:
        """The large model's state `[..., D]` at slots that no pass has seen."""
        state: Tensor = self.gate(distances) * states + self.out(hidden)
        return state

    def corrected_state(self, now: Tensor, seen: Tensor, states: Tensor) -> Tensor:
        """The state `[..., D]` of slots seen on other tokens, from both `hidden`."""
        return states + F.linear(now - seen, self.out.weight)


def make_fingerprint(output: Tensor) -> list[float]:
    """Eight numbers by which a model's output matrix `[V, D]` is recognised in any dtype."""
    index = torch.linspace(0, len(output) - 1, 8, dtype=torch.float32).long().to(output.device)
    return [round(x, 6) for x in output[index].float().abs().mean(1).tolist()]


def _find_sizes(content: dict[str, Any], file: Path) -> dict[str, Any]:
    sizes: dict[str, Any] = read_value(content, "config", dict, file, "drafts")
    return sizes


FOLDER = Schema(
    "a coarse model",
    CoarseConfig,
    "make one with scripts/training/coarse.py",
    "coarse.json",
    "coarse.safetensors",
    dtype=torch.float32,
    find=_find_sizes,
)


def save_coarse(model: CoarseModel, folder: str | Path, card: dict[str, Any]) -> None:
    content = {
        "config": asdict(model.config),
        "fingerprint": make_fingerprint(model.output),
        **card,
    }
    save_folder(FOLDER, folder, content, model.state_dict())


def find_coarse(folder: Path) -> Path | None:
    return folder if (folder / FOLDER.config).is_file() else None


def describe_coarse(folder: str | Path) -> dict[str, Any]:
    opened = open_folder(FOLDER, folder)
    file = opened.weights.file
    with file.open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()
    card = {name: value for name, value in opened.content.items() if name != "fingerprint"}
    return {**card, "sha256": digest, "bytes": file.stat().st_size}


def load_coarse(folder: str | Path, output: Tensor) -> CoarseModel:
    """Read a coarse model for the tokens of the model whose output matrix `[V, D]` this is.

    Raises:
        OptionError: no such folder, no coarse model in it, or one of another model.
        UnsupportedModelError: files that do not belong together, or weights that are not finite.
    """
    opened = open_folder(FOLDER, folder)
    config = opened.settings
    shape = (config.vocab_size, config.hidden_size)
    if tuple(output.shape) != shape:
        raise OptionError(
            f"drafts: expected a coarse model for {output.shape[0]} tokens and states of "
            f"{output.shape[1]}, received one for {shape[0]} and {shape[1]} in {folder}; make one "
            "for this model"
        )
    fingerprint = opened.content.get("fingerprint")
    expected = make_fingerprint(output)
    if not _is_same(fingerprint, expected):
        raise OptionError(
            f"drafts: expected a coarse model made for this model, received one of another model "
            f"in {folder} (fingerprint {show(fingerprint)}, this model's is {expected}); make one "
            "for this model"
        )
    with torch.device("meta"):
        model = CoarseModel(config, output)
    model.load_state_dict(opened.weights.read(shapes_of(model)), assign=True)
    return model.to(output.device).eval().requires_grad_(False)


def _is_same(fingerprint: Any, expected: list[float]) -> bool:
    if not isinstance(fingerprint, list) or len(fingerprint) != len(expected):
        return False
    pairs = zip(fingerprint, expected)
    return all(isinstance(a, float) and math.isclose(a, b, rel_tol=_RELATIVE) for a, b in pairs)
