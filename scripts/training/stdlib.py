"""`stdlib`, a small `LlamaForCausalLM` of Python source: its modules, its words, its training.

Byte pairs are found on the training modules (R. Sennrich et al., "Neural Machine Translation of
Rare Words with Subword Units", ACL 2016, on bytes). A batch holds pieces of the modules, each of
which begins with `BOS` where it is the beginning of one. Which module is held out follows from its
path alone, so that it is held out on every machine and in every version of Python.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.training.loop import WEIGHTS, Batch, Plan, Task, build_llama

PLANS = {"pieces": Plan(6000, 2000, 8)}
SIZES: dict[str, Any] = dict(
    hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=3,
    num_key_value_heads=1, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
WORDS = 2048
SPECIAL = BOS, EOS, PAD = "<s>", "</s>", "<pad>"
LONGEST = 2048  # positions
PIECE = 512  # tokens
EVALUATION_SEED = _SEED = 41
_LEFT_OUT = {  # tests repeat themselves, tables are no text, and what is installed differs
    *("__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3"),
    *("pydoc_data", "site-packages", "test", "tests", "turtledemo"),
}
_ONE_IN = 20  # modules are held out
_MOST_BYTES = 400_000  # of a module; longer ones are tables


def open_stdlib(folder: Path = WEIGHTS / "stdlib") -> tuple[Any, Any]:
    """The model in float32 and its tokenizer; `head` and `coarse` in its folder draft for it."""
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), PreTrainedTokenizerFast.from_pretrained(WEIGHTS / "stdlib")


@dataclass(frozen=True)
class Module:
    """A file of the standard library; `name` is its path there, with slashes."""

    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Whether no model was trained on it."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % _ONE_IN == 0


def read_modules(folder: Path | None = None) -> list[Module]:
    """All modules of a library, by default the running Python's, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    found = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if _LEFT_OUT.isdisjoint(parts) and not parts[0].startswith("config-"):
            data = file.read_bytes()
            if len(data) <= _MOST_BYTES:
                found.append(Module("/".join(parts), data.decode("utf-8", errors="replace")))
    return found


def held_out_modules(shortest: int = 0) -> list[Module]:
    """The modules of so many bytes that no model was trained on, in the order of their names."""
    held_out = [module for module in read_modules() if module.is_held_out]
    return [module for module in held_out if len(module.text.encode()) >= shortest]


def make_prompts(
    tokenizer: Any, count: int, length: int, seed: int = EVALUATION_SEED
) -> list[list[int]]:
    """`count` pieces of held-out modules, each of `length` ids and beginning with a line."""
    rng = np.random.default_rng(seed)
    modules = held_out_modules(shortest=8 * length)
    prompts: list[list[int]] = []
    while len(prompts) < count:
        lines = modules[rng.integers(len(modules))].text.splitlines(keepends=True)
        first = int(rng.integers(len(lines)))
        ids = tokenizer("".join(lines[first : first + length]), verbose=False)["input_ids"]
        if len(ids) >= length:
            prompts.append(ids[:length])
    return prompts


def make_tokenizer(texts: list[str]) -> Any:
    """A tokenizer of `WORDS` byte pairs, `BOS` before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=LONGEST,
    )


class Stdlib(Task):
    """Pieces of modules, drawn at random.

    Attributes:
        bytes_a_token: of the held-out modules.
    """

    def __init__(self, length: int = PIECE, checks: int = 48) -> None:
        modules = read_modules()
        held_out = [module for module in modules if module.is_held_out]
        training = [module for module in modules if not module.is_held_out]
        self.length = length
        self.tokenizer = make_tokenizer([module.text for module in training])
        self.training = self._encode(training)
        tokens = self._encode(held_out)
        n_bytes = sum(len(module.text.encode()) for module in held_out)
        self.bytes_a_token = n_bytes / len(tokens)
        n = len(tokens) // length
        chosen = np.linspace(0, n - 1, min(checks, n)).astype(int)
        pieces = torch.from_numpy(tokens[: n * length].reshape(n, length)[chosen])
        self.checks = [(part, part) for part in pieces.split(8)]

    def _encode(self, modules: list[Module]) -> np.ndarray:
        ids = [encode(self.tokenizer, module) for module in modules]
        return np.array([k for own in ids for k in own])

    def build(self, before: Path | None) -> Any:
        bos, eos, pad = range(3)
        return build_llama(
            vocab_size=WORDS,
            max_position_embeddings=LONGEST,
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token_id=pad,
            **SIZES,
        )

    def batch(self, step: int, size: int) -> Batch:
        """Ids `[size, length]` twice."""
        rng = np.random.default_rng((_SEED, step))
        first = rng.integers(len(self.training) - self.length, size=size)
        ids = torch.from_numpy(self.training[first[:, None] + np.arange(self.length)])
        return ids, ids

    def validate(self, model: Any, device: str) -> dict[str, float]:
        """Nats a token, and bits a byte, of pieces of held-out modules."""
        figures = super().validate(model, device)
        bits = figures["validation"] / math.log(2) / self.bytes_a_token
        return figures | {"bits_a_byte": bits}

    def save(self, model: Any, folder: Path) -> None:
        super().save(model, folder)
        self.tokenizer.save_pretrained(folder)


def encode(tokenizer: Any, module: Module) -> list[int]:
    """A module's ids, the one of its beginning first and that of its end last."""
    ids: list[int] = tokenizer(module.text, verbose=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id]
