"""Documents of `recall`: lengths, statements and answers against a slow reader; words and back."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from mmaccel.demo.recall.documents import (
    EVALUATION_SEED,
    SHORTEST,
    TRAIN_SEED,
    VALIDATION_SEED,
    Document,
    list_questions,
    make_document,
)
from mmaccel.demo.recall.words import ANSWERED, BOS, EOS, TASKS, WORDS, make_tokenizer, to_text

LENGTHS = (SHORTEST, 100, 512, 2048)


def read_answers(document: Document) -> dict[str, str]:
    """What is asked -> the answer, read word by word."""
    words = to_text(document.tokens).split()
    facts: dict[str, list[str]] = defaultdict(list)
    spans: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    for k, word in enumerate(words):
        if word[0] in "kx":
            facts[word].append(words[k + 1])
        if word[0] == "i":
            counts[word] += 1
        if word[0] == "s":
            letters = []
            while k + 1 < len(words) and words[k + 1][0] == "l":
                k += 1
                letters.append(words[k])
            spans[word] = letters
    found = {}
    for question in document.questions:
        task, *about = to_text(question.prompt).split()
        first = about.pop()
        assert about.pop() == "=" and task == question.task and first == about[0]
        if task in ("recall", "needles", "last"):
            answer = [word for name in about for word in (name, facts[name][-1])][1:]
            assert all(len(facts[word]) == 1 for word in about) or task == "last"
        elif task == "copy":
            answer = spans[about[0]]
        else:
            answer = [f"n{counts[about[0]]}"]
        found[" ".join(about)] = " ".join(answer)
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_answers_are_those_of_a_slow_reader(length: int) -> None:
    for index in range(20):
        document = make_document(7, index, length)
        assert len(document.tokens) == length and document.tokens[0] == BOS
        assert {question.task for question in document.questions} == set(TASKS)
        wanted = read_answers(document)
        assert len(wanted) == len(document.questions)
        for question in document.questions:
            about = to_text(question.prompt[1:-2])
            assert to_text(question.answer[:-1]) == wanted[about]
            assert question.answer[-1] == EOS
        asked = [word for question in document.questions for word in question.prompt[1:-2]]
        assert len(asked) == len(set(asked))


def test_names_are_assigned_anew() -> None:
    document = make_document(7, 0, 512)
    words = to_text(document.tokens).split()
    times = Counter(word for word in words if word[0] == "x")
    assert set(times.values()) <= {2, 3, 4} and len(set(times.values())) > 1
    firsts = {word: words[words.index(word) + 1] for word in times}
    lasts = [question for question in document.questions if question.task == "last"]
    assert len(lasts) == len(times)
    for question in lasts:
        assert to_text(question.answer[:1]) != firsts[WORDS[question.prompt[1]]]


def test_a_document_does_not_depend_on_others() -> None:
    assert make_document(7, 3, 128) == make_document(7, 3, 128) != make_document(7, 4, 128)
    seeds = (TRAIN_SEED, VALIDATION_SEED, EVALUATION_SEED)
    assert len({make_document(seed, 0, 64).tokens for seed in seeds}) == 3


def test_as_many_questions_of_each_task_as_asked() -> None:
    asked = list(list_questions(3, 96))
    assert Counter(question.task for _, question in asked) == dict.fromkeys(ANSWERED, 3)
    assert len(list(list_questions(3, 96, tasks=TASKS))) == 15
    assert len({document.tokens for document, _ in asked}) == 3


def test_words_and_back() -> None:
    tokenizer = make_tokenizer()
    document = make_document(7, 0, 128)
    ids = tokenizer(to_text(document.tokens[1:]))["input_ids"]
    assert tuple(ids) == document.tokens
    assert tokenizer.decode(ids, skip_special_tokens=True) == to_text(document.tokens[1:])
    assert len(set(WORDS)) == len(WORDS) == len(tokenizer)
    both = tokenizer(["f0", "f0 f1"], padding=True)["input_ids"]
    assert both[0][0] == tokenizer.pad_token_id and both[1][0] == BOS
