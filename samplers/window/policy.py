"""WindowPolicy: what the window policies have in common."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

from mmaccel.capabilities import Capable, Exclusions, explain, refuse
from mmaccel.checks import check_callable, check_choice, check_fields, check_int, check_kind
from mmaccel.contracts import Prompt, TokenModel
from mmaccel.errors import OptionError
from mmaccel.policies import check_window
from mmaccel.results import Exactness, Generation, OnStep
from mmaccel.samplers.arithmetic import own_arithmetic
from mmaccel.samplers.checks import check_noise
from mmaccel.samplers.drafting.contract import NO_GRAPHS, DraftSource
from mmaccel.samplers.drafting.sources import NAMES, find_source, parse_source
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.run_lock import turn_of
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.trees.contract import TreeShape, check_tree
from mmaccel.samplers.window.run import WindowRun


class WindowPolicy(Capable):
    """Base of window policies; a child is a frozen dataclass that implements `decode`.

    A child that drafts has the fields `window` and `drafts`, which are checked here. "adaptive" is
    a window of bitwise policies only: under others the tokens depend on the width.
    """

    exactness: ClassVar[Exactness]
    is_capturable: ClassVar[bool] = False  # whether its steps may be captured as CUDA graphs
    takes_corrections: ClassVar[bool] = True  # whether a source may correct its drafts
    takes_guesses: ClassVar[bool] = True  # whether a source may learn what passes guess of slots
    # how nodes of a tree may come from drafts (`TreeShape.ways`), and drafts that come so
    tree_ways: ClassVar[frozenset[str]] = frozenset({"grown"})
    tree_remedy: ClassVar[str] = "drafts='coarse', drafts='token-recycling'"
    needs_rows: ClassVar[bool] = False  # decodes nothing but tokens that a layout has in rows
    window: int | str = 1  # tokens processed per pass, or "adaptive"
    tree: TreeShape | None = None  # what a pass verifies beside the window's chain of drafts
    drafts: str | DraftSource = "left"

    needs = frozenset({"drafts"})

    @property
    def excludes(self) -> Exclusions:
        excluded = {} if self.is_capturable else dict(NO_GRAPHS)
        if not self.takes_corrections:
            excluded |= {"corrections": "takes drafts as final"}
        if not self.takes_guesses:
            excluded |= {"guesses": "makes tokens that depend on drafts"}
        if self.exactness != "bitwise":
            excluded |= {"fixed noise": f"is exact as {self.exactness!r}"}
        return excluded

    @property
    def parts(self) -> tuple[Capable | None, ...]:
        return self.draft_source(), self.tree

    @property
    def freezes_noise(self) -> bool:
        """Whether a slot's token is what its scores and its frozen noise choose."""
        return self.exactness == "bitwise"

    def __post_init__(self) -> None:
        check_window(self.window, adaptive=self.exactness == "bitwise")
        drafts = vars(self).get("drafts")  # of policies with that field
        if isinstance(drafts, str | Path):
            object.__setattr__(self, "drafts", parse_source(drafts))
        if find_source(self.drafts) is None:
            check_choice("drafts", self.drafts, NAMES, hint="'auto' suits most models")
        if self.tree is not None:
            check_tree(self)
        check_fields(self)
        refuse(explain(self))

    def draft_source(self) -> DraftSource:
        source = find_source(self.drafts)
        assert source is not None, "checked when the policy was made"
        return source

    @own_arithmetic()
    def sample(
        self,
        model: TokenModel,
        prompt: Prompt,
        length: int,
        *,
        params: SamplingParams,
        noise: Noise,
        on_step: OnStep | None = None,
    ) -> Generation:
        """Generate up to `length` tokens a row; see `mmaccel.policies.Policy.sample`.

        Raises:
            OptionError: a model that fills a canvas, a draft source that needs a layout which the
                prompt lacks, evenly spread samples of a policy that is not bitwise, or tokens that
                form no rows under one that needs them.
            ShapeError: noise of another batch.
        """
        name = type(self).__name__
        source = self.draft_source()
        check_callable("on_step", on_step)
        if not isinstance(model, TokenModel):
            raise OptionError(
                f"model: expected a TokenModel for {self!r}, which decodes token after token, "
                f"received a {type(model).__name__}; a model of transformers is one as "
                "CausalLMWindow(model), and one that fills a canvas takes Stepwise()"
            )
        check_int("length", length, 1, 2**31 - 1, hint="ask for 1 or more tokens")
        check_noise(noise.seeds, prompt.batch)
        source.check_layout(prompt.layout)
        if params.is_spread and self.exactness != "bitwise":
            raise OptionError(
                f"spread: expected None under {name}, which is not bitwise, received "
                f"{params.spread}; take Jacobi(), or leave it out"
            )
        if self.needs_rows and (prompt.layout is None or not prompt.layout.columns):
            raise OptionError(
                f"policy: expected a model whose tokens form the rows of an image for {name}, "
                f"received a {type(model).__name__} with no rows; choose SpeculativeJacobi()"
            )
        drafting = source.other_model
        with nullcontext() if drafting is None else turn_of(drafting):
            run = WindowRun(
                self, model, prompt, length, params=params, noise=noise, on_step=on_step
            )
            try:
                run.begin()
                generation: Generation = check_kind(f"{name}.decode", self.decode(run), Generation)
                return generation
            except BaseException:
                run.drafter.close(run)
                raise

    def decode(self, run: WindowRun) -> Generation:
        """Decode all rows of a fresh run."""
        raise NotImplementedError
