"""What goes with what: every part of a run declares words, and `explain` alone says no.

A part is whatever may be combined: a policy, its drafts and its tree, a method of a slot, an option
of the caller's, a model. A word of `GLOSSARY` is something that a run may do: a part *needs* what
it does itself, a model *offers* what its runs may do, and a part *excludes* what cannot be done
beside it. Where one excludes or lacks what the other needs, they do not go together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from mmaccel.errors import OptionError, UnsupportedModelError


class Word(NamedTuple):
    """Something that a run may do: a phrase behind "expected", and what helps where it is missing
    or cannot be; without a remedy, to leave a part out.
    """

    meaning: str
    remedy: str = ""


_AT_EXIT = "take DivPrune, which needs nothing but the visual tokens"

GLOSSARY = {
    # what decoding does
    "attentions": Word("the attentions of all tokens as an output"),
    "caller's cache": Word("a cache that the caller gives or sees"),
    "captured steps": Word("steps that are captured as CUDA graphs", 'set cuda_graphs="auto"'),
    "chunked prompts": Word("prompts that are processed in chunks"),
    "copied entries": Word("rows that take over cached entries of others"),
    "draft canvas": Word("entries that see each other", "draft by another source"),
    "draft passes": Word("passes over part of the cache", "draft by another source"),
    "corrections": Word("drafts that their source corrects", "choose Jacobi()"),
    "drafts": Word("tokens that are drafted", "choose Autoregressive()"),
    "finished blocks": Word("blocks that later passes never change", 'choose cache="none"'),
    "fixed noise": Word("drafts that depend on noise or on other rows", "choose Jacobi()"),
    "fused decoder": Word("a decoder whose weights are packed and whose layers are ours"),
    "guesses": Word("drafts that learn what passes guess of later slots", "use drafts='auto'"),
    "hidden slots": Word("slots that passes leave out", "leave far out of the cache"),
    "kept entries": Word(
        "entries that later passes read", 'choose cache="none", layout="rows" and revise="edit"'
    ),
    "layer states": Word("hidden states of layers, which heads read", "draft by another source"),
    "mask token": Word("a token that stands for an open slot", 'choose revise="edit" or "redo"'),
    "mixed passes": Word("passes over windows and pieces of prompts at once"),
    "own chunks": Word("chunks of a prompt that the model itself processes"),
    "own prompts": Word("prompts of more than tokens, which the model itself processes"),
    "own scheduler": Word("a scheduler of LLaDA2Pipeline's", "try EntropyBounded()"),
    "scales": Word("scales of tokens that a pass computes at once", "choose LosslessUnmask()"),
    "seeds": Word("noise by seeds", "give generator= to the call"),
    "shared prompts": Word("rows that read one stored prompt together", "set share_prefix='auto'"),
    "token layouts": Word("tokens that are known slot by slot"),
    "trees": Word("passes over a tree of drafts"),
    "verified canvases": Word("canvases of drafts that a pass verifies", "try EntropyBounded()"),
    # what methods of caches and attention do
    "eviction": Word("entries of prompts that leave the caches of layers"),
    "hidden states": Word("hidden states of a prompt's entries", "give a scorer of this model"),
    "own attention": Word("layers whose cache and attention can be chosen"),
    "packed entries": Word("cached entries that are held in fewer bits"),
    "prompt blocks": Word("blocks that are chosen for the queries of a prompt"),
    "prompt keys": Word("scores of a prompt's entries by keys and queries"),
    "repeated prompts": Word("prompts that are processed twice"),
    "rounds": Word("a cache that changes while tokens are generated"),
    "step blocks": Word("blocks that are chosen for every pass"),
    "turned keys": Word("keys that are turned to other positions"),
    "uneven heads": Word("heads that hold different numbers of entries"),
    # what reducers of a prompt look at
    "prompt words": Word("a causal LM that lets words of a prompt go at a method's layers"),
    "visual tokens": Word("a vision-language model that lets visual tokens go at its stage"),
    "pixels": Word("the image's pixels, before the encoder", _AT_EXIT),
    "keys": Word("the keys of a layer", _AT_EXIT),
    "cls_attention": Word("the attention of an encoder's class token", _AT_EXIT),
    "all_attention": Word("the attention of all visual tokens", _AT_EXIT),
    "last_attention": Word("the attention of the prompt's last token", _AT_EXIT),
    "text_attention": Word("the attention of the text tokens", _AT_EXIT),
    "text": Word("the states of the text tokens", _AT_EXIT),
    "grid": Word("the row and column of each token", _AT_EXIT),
    "tiles": Word("an image in tiles with an overview", _AT_EXIT),
    "frames": Word("a video in frames", _AT_EXIT),
}
"""Everything that `needs`, `offers` and `excludes` may name."""

Words = frozenset[str]
Exclusions = Mapping[str, str]
NOTHING: Words = frozenset()


class Capable:
    """Base of what declares its words; `slot` is the argument that it is given by, or "model"."""

    slot: ClassVar[str] = ""

    @property
    def needs(self) -> Words:
        """What it does."""
        return NOTHING

    @property
    def offers(self) -> Words:
        """Of a model: what its runs may do."""
        return NOTHING

    @property
    def excludes(self) -> Exclusions:
        """What cannot be done beside it, each with the reason: words behind "which"."""
        return {}

    @property
    def limits(self) -> Mapping[str, int]:
        """The largest values of a policy's fields, which are fixed beside it."""
        return {}

    @property
    def parts(self) -> tuple[Any, ...]:
        """What it brings along, parts as well."""
        return ()

    def lack(self, word: str, part: Any = None) -> str:
        """Of a model: why a part cannot have what it needs; empty where it can."""
        return "" if word in self.offers else f"it has no {word}"


@dataclass(frozen=True)
class Option(Capable):
    """An argument of a call as a part; `text` is as it is typed, `share_prefix=True`."""

    text: str
    needed: Words = NOTHING

    @property
    def needs(self) -> Words:
        return self.needed

    @property
    def slot(self) -> str:  # type: ignore[override]
        return self.text.partition("=")[0]

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Reason:
    """Why two parts do not go together: `part` needs a `word` of `GLOSSARY` that `other` excludes
    or lacks, or has a field `word` beyond a limit.
    """

    part: Any
    other: Any
    word: str
    why: str

    @property
    def is_of_model(self) -> bool:
        return slot_of(self.other) == "model"

    @property
    def short(self) -> str:
        """In a few words, for statistics."""
        return (
            self.why if self.is_of_model else f"{self.part!r} with {self.other!r}, which {self.why}"
        )

    def __str__(self) -> str:
        slot = slot_of(self.part)
        known = GLOSSARY.get(self.word)
        if known is None:
            return (
                f"{slot}: expected a {self.word} of at most {self.why} beside {self.other!r}, "
                f"received {self.part!r}; give a narrower one, or leave {slot_of(self.other)} out"
            )
        if self.is_of_model:
            remedy = known.remedy or f"leave {slot} out"
            model = getattr(self.other, "model", None) or self.other
            return (
                f"{slot}: expected {known.meaning} for {self.part!r}, received a "
                f"{type(model).__name__}: {self.why}; {remedy}"
            )
        remedy = f"{known.remedy}, or " if known.remedy else ""
        return (
            f"{slot}: expected no {self.word} ({known.meaning}) beside {self.other!r}, which "
            f"{self.why}, received {self.part!r}; {remedy}leave {slot} or {slot_of(self.other)} out"
        )


def explain(*parts: Any) -> list[Reason]:
    """All reasons why parts do not go together; what declares nothing, and None, goes with
    everything. A model may run a self-check for what is needed, once.
    """
    every = [each for part in parts for each in flatten(part)]
    pairs = [(part, other) for part in every for other in every if part is not other]
    return [reason for pair in pairs for reason in compare(*pair)]


def flatten(part: Any) -> Iterator[Any]:
    if part is not None:
        yield part
        for each in getattr(part, "parts", ()):
            yield from flatten(each)


def compare(part: Any, other: Any) -> Iterator[Reason]:
    is_model = slot_of(other) == "model"
    excluded = getattr(other, "excludes", {})
    reasons = set[str]()
    for word in sorted(getattr(part, "needs", NOTHING)):
        why = excluded.get(word, "") or (other.lack(word, part) if is_model else "")
        if why and why not in reasons:
            reasons.add(why)
            yield Reason(part, other, word, why)
    limits = getattr(other, "limits", {}) if slot_of(part) == "policy" else {}
    for name, most in limits.items():
        value = getattr(part, name, 0)
        if not isinstance(value, int) or value > most:
            yield Reason(part, other, name, str(most))


def slot_of(part: Any) -> str:
    """The argument that a part is given by; of what does not say it, "policy"."""
    return getattr(part, "slot", "") or "policy"


def refuse(reasons: Iterable[Reason]) -> None:
    """Raise an error with all reasons: UnsupportedModelError where only another model would do."""
    listed = list(reasons)
    if listed:
        kind = UnsupportedModelError if all(each.is_of_model for each in listed) else OptionError
        raise kind("; also ".join(map(str, listed)))
