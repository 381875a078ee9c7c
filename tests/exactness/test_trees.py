"""Trees: the tokens of the plain loop whatever branches a pass covers, and bugs that must show."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import Autoregressive, Comb, DySpec, Jacobi, Sequoia, ShapeError
from mmaccel.samplers.drafting import coarse_drafter
from mmaccel.samplers.drafting.contract import Nodes, PassPath
from mmaccel.samplers.trees.entries import TreeEntries
from mmaccel.samplers.trees.sequoia import plan_tree
from mmaccel.samplers.window.passes import RunPasses
from tests.exactness.bitwise_runs import LENGTH, OPTIONS, PROMPTS, assert_same, run
from tests.fixtures.coarse import strong_coarse
from tests.fixtures.lanes import every
from tests.fixtures.tiny_lms import PAD, build_lm, left_padded
from tests.fixtures.tiny_vlms import build_vlm, draw_prompts
from tests.fixtures.tree_language import Known, TreeLanguage, Useless, Written

CHANCES = ((0.5, 0.2, 0.1), (0.4, 0.2, 0.1))
SHAPES = (
    Comb(branches=3, length=4),
    DySpec(14, depth=4),
    Sequoia(14, depth=4, acceptance=CHANCES),
    mmaccel.ForkedComb(3, 3, 2, 1),
    mmaccel.SpecExec(14, depth=4, expand=5),
    mmaccel.TETRIS(14, depth=4, budget=9),
)


def language() -> TreeLanguage:
    return TreeLanguage(5, depth=6)


def grow(policy: Any, options: Any = None, **given: Any) -> Any:
    """A text of the language."""
    return run(policy, options or {}, model=language(), grid=None, **given)


@pytest.fixture(scope="module")
def coarse(tmp_path_factory: pytest.TempPathFactory) -> mmaccel.Coarse:
    """A random C: its branches are often wrong, and sometimes right."""
    folder = tmp_path_factory.mktemp("strong")
    return strong_coarse(language().output_matrix(), folder, candidates=3)


def known(wrong: int, options: dict[str, Any], until: int = 99) -> Known:
    """Drafts of the plain loop's text."""
    texts = run(Autoregressive(), options, grid=None).tokens
    return Known(tuple(map(tuple, texts.tolist())), wrong, until)


@pytest.mark.parametrize(
    ("drafts", "shape"),
    every(9, zip(("token-recycling", "coarse") * len(SHAPES), SHAPES)),
    ids=repr,
)
def test_rows_that_are_admitted_later(drafts: str, shape: Any, coarse: mmaccel.Coarse) -> None:
    """What a batch slot's row before has left in the drafter is forgotten."""
    policy = Jacobi(6, coarse if drafts == "coarse" else drafts, shape)
    whole = grow(policy)
    batching = mmaccel.ContinuousBatching(2)
    made = grow(policy, batching=batching)
    assert_same(made, whole)
    is_alike = not isinstance(shape, Comb | mmaccel.TETRIS)  # TETRIS: rows share a budget
    if is_alike:  # a comb's branches are there in a row's first pass, too
        assert made.passes.equal(whole.passes)


def test_coarse_branches_save_passes(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("mild")
    mild = strong_coarse(language().output_matrix(), folder, candidates=3, strength=0.1)
    alone = grow(Jacobi(8, mild))
    made = grow(Jacobi(8, mild, Comb(6, 4)))
    assert made.stats.row_passes < 0.9 * alone.stats.row_passes


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, OPTIONS["guided greedy"]], ids=["plain", "guided greedy"])
def test_branches_in_parallel_rounds(options: dict[str, Any], coarse: mmaccel.Coarse) -> None:
    """The plain loop's tokens; with a round for every slot, the passes of a sweep."""
    plain = run(Autoregressive(), options, grid=None)
    for shape, rounds in ((Comb(3, 4), 2), (Comb(3, 4), 8), (DySpec(14, depth=4), 3)):
        policy = Jacobi(9, replace(coarse, rounds=rounds), shape)
        made = grow(policy, options)
        assert_same(made, plain)
        if rounds == 8:
            swept = grow(Jacobi(9, coarse, shape), options)
            assert made.stats.accepted == swept.stats.accepted


# evenly spread samples are decoded without trees
WALKED = {name: options for name, options in OPTIONS.items() if name != "spread"}

# the right token is the second child of three drafts, one of them behind another
TWICE = {"wrong": 1, "seconds": (1, 3, 4)}


@pytest.mark.parametrize("options", every(4, WALKED.values()), ids=WALKED)
def test_branches_that_fork_again_are_drafted(options: dict[str, Any]) -> None:
    """With room for them the right nodes are there, up to `depth` behind the chain."""
    texts = run(Autoregressive(), options, grid=None)
    source = Known(tuple(map(tuple, texts.tokens.tolist())), **TWICE)
    chances = ((0.9, 0.06), (0.5, 0.4), (0.9, 0.06), (0.5, 0.4), (0.5, 0.4), (0.9, 0.06))
    for shape in (DySpec(80, depth=4), Sequoia(80, depth=4, acceptance=chances)):
        made = grow(Jacobi(9, source, shape), options)
        assert_same(made, texts)
        # a draft of the chain, four nodes, and the token behind them
        assert made.passes.tolist() == [-(-LENGTH // 6)] * len(PROMPTS)
        few = grow(Jacobi(9, source, replace(shape, nodes=1)), options)
        assert few.passes.gt(made.passes).all()


def test_a_large_search_has_the_nodes_of_dyspec_and_a_small_one_its_best() -> None:
    """SpecExec with room for all that is open asks about the same nodes."""
    source = Known(known(1, {}).texts, **TWICE)
    passes = {}
    for shape in (
        DySpec(40, depth=4),
        mmaccel.SpecExec(40, depth=4, expand=40),
        mmaccel.SpecExec(40, depth=4, expand=1),
        mmaccel.TETRIS(40, depth=4, budget=40),
        mmaccel.TETRIS(40, depth=4, budget=1),
    ):
        passes[shape] = grow(Jacobi(9, source, shape)).passes
    dyspec, wide, narrow, rich, poor = passes.values()
    assert dyspec.equal(wide) and dyspec.equal(rich)
    assert int(narrow.sum()) > int(wide.sum()) and int(poor.sum()) > int(rich.sum())


def test_tetris_shares_its_budget() -> None:
    """Over all rows the likeliest, each with its path."""
    chances = torch.tensor([[-0.1, -0.2, -0.3, -9.0], [-0.2, -1.0, -float("inf"), -float("inf")]])
    wanted = mmaccel.TETRIS(4, depth=2, budget=2).is_needed(chances)
    assert wanted.tolist() == [[True, True, True, False], [True, False, False, False]]


def test_twigs_fork_from_branches() -> None:
    """The right token is the second child twice: a comb goes right once, a forked one twice."""
    source = Known(known(1, {}).texts, wrong=1, seconds=(1, 3))
    made = grow(Jacobi(9, source, mmaccel.ForkedComb(2, 3, 4, 3)))
    alone = grow(Jacobi(9, source, mmaccel.ForkedComb(2, 3, 1, 1)))
    assert_same(made, run(Autoregressive(), {}, grid=None))
    assert int(made.passes.sum()) < int(alone.passes.sum())


def likeliest(n: int, chain: list[int], chance: Any, depth: int, most: int) -> list[float]:
    """Chances of the n likeliest paths beside a chain of ranks, one by one from a heap.

    A path leaves the chain by up to `depth` nodes, and has at most `most` drafts before its last.
    """
    on_chain = [1.0]
    for before, rank in enumerate(chain):
        on_chain.append(on_chain[-1] * chance(before, rank))
    heap = [  # value, drafts on the path, nodes behind the chain
        (-on_chain[before] * chance(before, rank), before + 1, 1)
        for before in range(len(chain))
        for rank in {0, 1, 2} - {chain[before]}
    ]
    heapq.heapify(heap)
    best: list[float] = []
    while len(best) < n:
        value, before, n_nodes = heapq.heappop(heap)
        best.append(-value)
        if n_nodes < depth and before <= most:
            for rank in (0, 1, 2):
                heapq.heappush(heap, (value * chance(before, rank), before + 1, n_nodes + 1))
    return best


def test_dyspec_has_the_likeliest_nodes() -> None:
    source, depth, width = Known(known(1, {}).texts, **TWICE), 4, 9
    chain = [0] + [1] * (width - 2)  # by how much its drafts are off

    def chance(before: int, off: int) -> float:
        """Of a child that is off the right token by so much, see `Known`."""
        return ((0.4, 0.5, 0.05) if before in source.seconds else (0.9, 0.06, 0.03))[off]

    seen: list[list[float]] = []

    class Seen(DySpec):
        """Records the chances of the nodes in row 0."""

        def grow(self, run: Any, drafter: Any, drafts: Tensor, noise: Tensor) -> Nodes | None:
            nodes = super().grow(run, drafter, drafts, noise)
            if nodes is None or drafts.shape[1] < width - 1:
                return nodes
            right = source.right(run.rows.slots)[0].tolist()
            values, depths = [1.0], list(range(width))
            for before, off in enumerate(chain):
                values.append(values[-1] * chance(before, off))
            for token, parent in zip(nodes.tokens[0].tolist(), nodes.parents[0].tolist()):
                off = (token - right[depths[parent]]) % run.vocab_size
                values.append(values[parent] * chance(depths[parent], off))
                depths.append(depths[parent] + 1)
            seen.append(values[width:])
            return nodes

    grow(Jacobi(width, source, Seen(40, depth=depth)))
    assert seen
    best = likeliest(40, chain, chance, depth, width - 2)
    for values in seen:
        assert values == pytest.approx(best)


@pytest.mark.parametrize("n_nodes", [1, 5, 23])
def test_the_plan_is_the_best_tree_of_its_size(n_nodes: int) -> None:
    width, depth = 6, 3
    plan = plan_tree(n_nodes, depth, CHANCES, width)

    def chance(before: int, rank: int) -> float:
        return CHANCES[min(before, 1)][rank]

    values = dict(enumerate([1.0] + [0.5 * 0.4**n for n in range(width - 1)]))
    for node in (node for generation in plan for node in generation):
        values[node.number] = values[node.parent] * chance(node.depth - 1, node.rank)
    planned = [value for number, value in values.items() if number >= width]
    best = likeliest(n_nodes, [0] * (width - 1), chance, depth, 99)
    assert len(planned) == n_nodes and sum(planned) == pytest.approx(sum(best))


CHAIN_ALONE = Sequoia(5, depth=3, acceptance=((1.0, 0.0),))


@pytest.mark.parametrize("shape", [Useless(), CHAIN_ALONE], ids=["repeats the chain", "no nodes"])
@pytest.mark.parametrize("drafts", ["coarse", "token-recycling"])
def test_a_tree_of_the_chain_has_the_passes_of_the_chain(
    drafts: str, shape: Any, coarse: mmaccel.Coarse
) -> None:
    source = coarse if drafts == "coarse" else drafts
    alone = grow(Jacobi(6, source))
    made = grow(Jacobi(6, source, shape))
    assert made.passes.equal(alone.passes)
    is_wider = made.stats.tokens_processed > alone.stats.tokens_processed
    assert is_wider == (shape != CHAIN_ALONE)


def generate(policy: Any, fused: bool, **options: Any) -> tuple[Tensor, Any]:
    """Tokens of a tiny Llama for a left-padded batch."""
    given: dict[str, Any] = {"max_new_tokens": 30, "do_sample": True, "pad_token_id": PAD}
    rows = [[5, 6, 7, 8, 9], [4, 5], [7, 7, 8]]
    with mmaccel.attach(build_lm("llama"), policy, seed=3, fused=fused, strict=True) as handle:
        model: Any = handle._target
        out = model.generate(**left_padded(rows), **given | options)
    return out, handle.stats


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.2}, {"return_dict_in_generate": True, "output_scores": True}],
)
def test_calls_that_no_branch_can_serve_have_the_chain_alone(options: dict[str, Any]) -> None:
    made, stats = generate(Jacobi(8, "token-recycling", Comb(5, 3)), True, **options)
    plain, _ = generate(Autoregressive(), True, **options)
    tokens = [getattr(each, "sequences", each) for each in (made, plain)]
    assert torch.equal(*tokens)
    assert any(note.startswith("tree: the chain alone") for note in stats.notes)


# beside a chain that is wrong from its third draft on, in a window of 9 entries
FORKS_AGAIN = Written(
    ((2, 0), (9, 1), (9, 0), (11, 2), (11, 0), (10, 0), (13, 0))  # right: 9, 11, 13, 15
)
TWINS = Written(((2, 0), (2, 0), (10, 0)))  # two nodes hold the right token, and one goes on


def check_passes(options: dict[str, Any], shape: Any, wrong: int, until: int, gain: int) -> None:
    """The plain loop's tokens, and `gain` of them in each pass that has nodes."""
    plain = run(Autoregressive(), options, grid=None)
    made = grow(Jacobi(9, known(wrong, options, until), shape), options)
    assert_same(made, plain)
    left, passes = LENGTH, 0
    while left:
        has_nodes = left >= 9 or isinstance(shape, Comb)
        left -= min(left, gain if has_nodes else wrong + 1)
        passes += 1
    assert made.passes.tolist() == [passes] * len(PROMPTS)


CHECKED = (
    (Comb(3, 4), 0, 99, 5),
    (Comb(3, 4), 2, 99, 7),
    (FORKS_AGAIN, 2, 99, 7),
    (TWINS, 2, 99, 5),
)


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: f"{case[0]!r}-{case[1]}")
@pytest.mark.parametrize("options", every(4, WALKED.values()), ids=WALKED)
def test_the_longest_right_path_is_taken(options: dict[str, Any], case: Any) -> None:
    check_passes(options, *case)


def mask_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Nodes that leave the chain see one draft less."""
    forward = RunPasses.forward_tree

    def wrong(self: Any, tokens: Tensor, parents: Tensor, *given: Any) -> Any:
        width = self._rows.slots.shape[1]
        behind = parents[:, width:]
        behind = behind - ((behind > 0) & (behind < width)).long()
        return forward(self, tokens, torch.cat([parents[:, :width], behind], 1), *given)

    patch.setattr(RunPasses, "forward_tree", wrong)


def in_draft_order(patch: pytest.MonkeyPatch) -> None:
    """The cache keeps the chain's entries, whichever path was accepted."""
    commit = RunPasses.commit

    def wrong(self: Any, path: Tensor) -> None:
        commit(self, torch.arange(path.shape[1]).expand_as(path))

    patch.setattr(RunPasses, "commit", wrong)


def _forget_ancestors(patch: pytest.MonkeyPatch) -> None:
    """An entry counts as right whatever it follows."""

    def wrong(self: TreeEntries, targets: Tensor) -> Tensor:
        right = targets.gather(1, self.parents.clamp(min=0)) == self.tokens
        return right | (self.parents < 0)

    patch.setattr(TreeEntries, "is_right", wrong)


def _shift_second_forks(parents: Tensor, width: int) -> Tensor:
    """Parents that are off by one where a node forks that is no node before its child."""
    number = torch.arange(parents.shape[1])
    return torch.where((parents >= width) & (number - parents > 1), parents + 1, parents)


def _walk_other_parents(patch: pytest.MonkeyPatch) -> None:
    is_right = TreeEntries.is_right

    def wrong(self: TreeEntries, targets: Tensor) -> Tensor:
        parents = _shift_second_forks(self.parents, self.width)
        return is_right(replace(self, parents=parents), targets)

    patch.setattr(TreeEntries, "is_right", wrong)


def _pass_other_parents(patch: pytest.MonkeyPatch) -> None:
    forward = RunPasses.forward_tree

    def wrong(self: Any, tokens: Tensor, parents: Tensor, *given: Any) -> Any:
        return forward(self, tokens, _shift_second_forks(parents, 9), *given)

    patch.setattr(RunPasses, "forward_tree", wrong)


def _take_the_first_twin(patch: pytest.MonkeyPatch) -> None:
    """Of two nodes with the right token behind one entry, the later counts as wrong."""
    is_right = TreeEntries.is_right

    def wrong(self: TreeEntries, targets: Tensor) -> Tensor:
        pair = self.parents * 5 + self.tokens
        is_later = (pair[:, :, None] == pair[:, None]).tril(-1).any(-1)
        return is_right(replace(self, tokens=torch.where(is_later, -1, self.tokens)), targets)

    patch.setattr(TreeEntries, "is_right", wrong)


def _keep_scores_of_a_lost_branch(patch: pytest.MonkeyPatch) -> None:
    view = TreeEntries.view

    def wrong(self: TreeEntries, last: Tensor) -> Tensor:
        return view(self, torch.where(last >= self.width, self.width, last))

    patch.setattr(TreeEntries, "view", wrong)


BUGS = {  # and how many of CHECKED see it
    _forget_ancestors: 4,
    _walk_other_parents: 1,
    _pass_other_parents: 1,
    mask_off_by_one: 3,
    _take_the_first_twin: 1,
    in_draft_order: 4,
    _keep_scores_of_a_lost_branch: 1,
}


@pytest.mark.parametrize("plant", every(4, BUGS), ids=lambda plant: plant.__name__)
def test_planted_bugs_are_seen(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    n_seen = 0
    for case in CHECKED:
        try:
            check_passes({}, *case)
        except AssertionError:
            n_seen += 1
    assert n_seen >= BUGS[plant], n_seen


def test_a_branch_that_won_is_what_the_next_drafts_saw(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Drafts that take the chain's neighbours for a branch's cost passes, and no tokens."""
    record, passes = coarse_drafter.CoarseDrafter._record, []

    def forgets(self: Any, run: Any, values: Tensor, ids: Tensor, scores: Any) -> None:
        record(self, run, values, ids, scores._replace(path=_unsaid(scores.path)))

    folder = tmp_path_factory.mktemp("mild")
    mild = strong_coarse(language().output_matrix(), folder, candidates=3, strength=0.3)
    policy = Jacobi(8, mild, Comb(8, 3))
    for is_broken in (False, True):
        if is_broken:
            monkeypatch.setattr(coarse_drafter.CoarseDrafter, "_record", forgets)
        made = grow(policy)
        assert_same(made, run(Autoregressive(), {}, grid=None))
        passes.append(made.stats.row_passes)
    assert passes[0] != passes[1]


def _unsaid(path: PassPath | None) -> PassPath | None:
    return None if path is None else path._replace(is_branch=torch.zeros_like(path.is_branch))


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        (((2, 0), (2, 7)), "tokens: expected 0..4"),
        (((2, 0), (-1, 0)), "parents before their nodes"),
        (((8, 0), (9, 0)), "paths of up to 8 drafts"),
    ],
)
def test_nodes_that_are_no_tree_end_the_call(tree: Any, named: str) -> None:
    with pytest.raises(ShapeError, match=named):
        grow(Jacobi(9, known(2, {}), Written(tree)))


@pytest.mark.parametrize(
    ("kind", "kv_cache"),
    [("ids", mmaccel.SnapKV(budget=12, window=4)), ("embeddings", None)],
    ids=repr,
)
def test_a_tree_over_a_prompt_that_lost_entries_or_is_the_models_own(
    kind: str, kv_cache: Any
) -> None:
    model, ids = build_lm("llama"), torch.randint(4, 40, (2, 30), generator=_drawn(5))
    model.generation_config.eos_token_id = None
    given: dict[str, Any] = {"input_ids": ids}
    if kind == "embeddings":
        given = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    settings: dict[str, Any] = {"seed": 3, "strict": True, "kv_cache": kv_cache}
    with mmaccel.attach(model, Autoregressive(), **settings):
        plain = model.generate(**given, max_new_tokens=25, do_sample=True)
    answer = Known(tuple(map(tuple, plain[:, -25:].tolist())), wrong=2)
    for drafts in ("token-recycling", answer):
        with mmaccel.attach(model, Jacobi(9, drafts, Comb(3, 4)), **settings) as handle:
            made = model.generate(**given, max_new_tokens=25, do_sample=True)
        assert made.equal(plain)
        assert bool(handle.stats.reference) == (kv_cache is not None)  # type: ignore[union-attr]
    # the first pass, behind a prompt that the model read itself, takes a branch as all others do
    assert handle.stats.row_passes == 2 * -(-25 // 7)  # type: ignore[union-attr]


def _drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_tree_behind_layers_that_lost_visual_tokens() -> None:
    model, made = build_vlm("llava"), []
    inputs = draw_prompts("llava", model)
    for policy in (Autoregressive(), Jacobi(8, "token-recycling", Comb(5, 3))):
        method = mmaccel.FastV(keep=0.5, layer=1)
        with mmaccel.attach(model, policy, strict=True, visual_tokens=method) as handle:
            made.append(model.generate(**inputs, max_new_tokens=20, do_sample=False))
        assert "FastV" in handle.stats.reference  # type: ignore[union-attr]
    assert torch.equal(*made)
