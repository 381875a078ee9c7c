"""The grammar's data and checker: every task's answers by hand, the distribution, ids and back."""

from collections import Counter

import pytest

from mmaccel.demo.grammar import tasks
from mmaccel.demo.grammar.evaluate import is_right, total_variation
from mmaccel.demo.grammar.tasks import CANVAS, END, MASK, TRAIN_SEED, encode_answer, make_examples
from scripts.training.grammar_masked import share_right


def answers(text: str) -> list[str]:
    return [" ".join(answer) for answer in tasks.right_answers(tuple(text.split()))]


def test_right_answers_by_hand() -> None:
    assert answers("copy d a d b") == ["d a d b"]
    assert answers("reverse d a d b") == ["b d a d"]
    assert answers("sort d a d b") == ["a b d d"]
    assert answers("replace d d b") == ["z d b", "d z b", "d d z"]
    assert answers("shuffle b a c") == ["a b c", "a c b", "b a c", "b c a", "c a b", "c b a"]
    assert answers("add 0 7 + 9 5") == ["1 0 2"]
    assert answers("add 1 2 3 + 0 0 7") == ["0 1 3 0"]
    told = answers("tell bob fox")
    assert len(set(told)) == len(told) == 12
    assert "bob has one red fox . his fox is red ." in told
    assert "bob likes his fox . the fox is green ." in told
    assert "the black fox likes bob ." in told


@pytest.mark.parametrize("task", tasks.TASKS)
def test_examples_fit_the_line_and_are_right(task: str) -> None:
    for example in make_examples(TRAIN_SEED, range(200), task):
        assert example.prompt[0] == task
        front, canvas = tasks.encode_prompt(example.prompt), encode_answer(example.answer)
        assert front[0] == tasks.BOS and front[-1] == tasks.ASK and len(front) <= 19
        assert len(canvas) == CANVAS and canvas[-1] == END and max(canvas) < MASK
        assert is_right(example.prompt, canvas)
        found = tasks.right_answers(example.prompt)
        assert len(found) == len(set(found))


def test_an_example_depends_on_seed_and_index_alone() -> None:
    whole = make_examples(TRAIN_SEED, range(50))
    assert make_examples(TRAIN_SEED, [7, 3]) == [whole[7], whole[3]]
    assert make_examples(tasks.VALIDATION_SEED, range(50)) != whole
    assert {e.prompt[0] for e in whole} == set(tasks.TASKS)


def test_answers_are_drawn_uniformly() -> None:
    rows = (tasks.make_example(TRAIN_SEED, k, "tell") for k in range(6000))
    drawn = Counter(e.answer for e in rows if e.prompt == ("tell", "ann", "cat"))
    count = sum(drawn.values())
    assert len(drawn) == 12 and count > 400
    assert all(abs(n / count - 1 / 12) < 0.05 for n in drawn.values())


def test_the_checker_refuses_what_is_almost_right() -> None:
    prompt = ("replace", "a", "b", "c")
    right = encode_answer(("a", "z", "c"))
    assert is_right(prompt, right)
    assert not is_right(prompt, encode_answer(("z", "z", "c")))
    assert not is_right(prompt, encode_answer(("a", "b", "c")))
    assert not is_right(prompt, [*right[:-1], right[0]])  # something behind the end
    assert not is_right(prompt, [right[0]] * CANVAS)  # no end
    assert not is_right(prompt, [MASK, *right[1:]])
    assert share_right([prompt, prompt], [right, [END] * CANVAS]) == 0.5


def test_ids_and_back() -> None:
    assert len(set(tasks.WORDS)) == len(tasks.WORDS) == MASK < 64
    assert tasks.decode_answer(encode_answer(("a", "z"))) == ("a", "z")
    assert tasks.decode_answer(encode_answer(())) == ()


def test_total_variation_by_hand() -> None:
    prompt = ("replace", "a", "b")
    one, two = ("z", "b"), ("a", "z")
    assert total_variation(prompt, {one: 0.5, two: 0.5}) == 0
    assert total_variation(prompt, {one: 1.0}) == pytest.approx(0.5)
    assert total_variation(prompt, {one: 0.5, two: 0.25}) == pytest.approx(0.25)
    assert total_variation(prompt, {}) == 1
