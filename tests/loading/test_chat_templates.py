"""Chat templates of strangers: as transformers renders them, and no longer than they may."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.loading import chat_templates
from mmaccel.pipelines.loading.chat_templates import apply_chat_template, render_chats
from mmaccel.pipelines.loading.headers import check_folder
from tests.fixtures.vlm_processors import make_idefics3, make_tokenizer

CHATS = [
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "blue <cat> & fox"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}],
]
# the idioms of published templates: namespaces, macros, filters, loop controls, errors
PUBLISHED = """
{%- set ns = namespace(system='', n=0) -%}
{%- macro say(role, text) -%}{{ '<|' ~ role ~ '|>' + text | trim }}{{ '\\n' }}{%- endmacro -%}
{%- for m in messages -%}
  {%- if m['role'] == 'system' and loop.first -%}
    {%- set ns.system = m.content -%}{%- continue -%}
  {%- endif -%}
  {%- if m.role not in ['user', 'assistant'] -%}{{ raise_exception('role') }}{%- endif -%}
  {{- say(m.role, m.content) -}}{%- set ns.n = ns.n + 1 -%}
{%- endfor -%}
{{ ns.system | upper }} {{ messages | tojson(indent=2) }} {{ ns.n * 3 }} {{ range(4) | join(',') }}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "doubling": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "a constant": "{{ 'a' * 10**10 }}",
    "a filter": "{{ 'a' | center(10**10) }}",
    "indentation": "{{ 'a\\nb' | indent(10**10) }}",
    "a format": "{{ '%9999999999d' % 1 }}",
    "replacement": "{{ ('a' * 10**6).replace('a', 'a' * 10**6) }}",
    "a power": "{{ 7 ** (10 ** 9) }}",
    "lists": "{{ [0] * 10**10 }}",
    "slices": "{{ 'a' | slice(10**10) | list }}",
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "text": "{% for a in range(9999) %}{{ 'a' * 999 }}{% endfor %}",
    "a coin": "{% if [0, 1] | random in [0, 1] %}{{ 'a' * 10**10 }}{% endif %}",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer("<image>")


@pytest.mark.parametrize("given", [{}, {"add_generation_prompt": True}, {"date": "1 May"}])
def test_ordinary_templates_render_as_ever(tokenizer: Any, given: dict[str, Any]) -> None:
    tokenizer.chat_template = PUBLISHED + "{{ date }}"
    wanted = tokenizer.apply_chat_template(CHATS, tokenize=False, **given)
    assert render_chats(tokenizer, CHATS, **given) == wanted and len(wanted) == 2
    made = apply_chat_template(tokenizer, CHATS, given, tokenize=True, return_dict=True)
    plain = tokenizer.apply_chat_template(CHATS, tokenize=True, return_dict=True, **given)
    assert made["input_ids"] == plain["input_ids"]


def test_an_answer_may_be_continued(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    chat = [CHATS[0][1], {"role": "assistant", "content": "so"}]
    assert render_chats(tokenizer, [chat], continue_final_message=True) == ["<blue <cat> & fox><so"]


def test_a_processor_gets_the_same_inputs() -> None:
    processor = make_idefics3()
    chats = []
    for k, question in enumerate(["what colour ?", "what is the star ?"]):
        image = {"type": "image", "image": Image.new("RGB", (32, 16), (90 * k, 0, 0))}
        chats.append([{"role": "user", "content": [image, {"type": "text", "text": question}]}])
    given = {"add_generation_prompt": True}
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    options["processor_kwargs"] = {"padding": True, "padding_side": "left"}
    made = apply_chat_template(processor, chats, given, **options)
    wanted = processor.apply_chat_template(chats, **given, **options)
    assert made.keys() == wanted.keys() and "pixel_values" in made
    for name, value in wanted.items():
        assert torch.equal(made[name], value), name


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_never_ends_is_refused(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "_SECONDS", 0.4)
    tokenizer.chat_template = HOSTILE[name]
    with pytest.raises(UnsupportedModelError, match="chat template: expected one .* one that") as e:
        render_chats(tokenizer, CHATS[:1])
    assert "\n" not in str(e.value) and len(str(e.value)) < 500


def test_no_child_stays_behind(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    children, fork = [], os.fork

    def forking() -> int:
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", forking)
    tokenizer.chat_template = "hello"
    render_chats(tokenizer, CHATS)
    monkeypatch.setattr(chat_templates, "_SECONDS", 0.2)
    for template in (HOSTILE["nested loops"], "{% for"):
        tokenizer.chat_template = template
        with pytest.raises(UnsupportedModelError):
            render_chats(tokenizer, CHATS)
    assert children
    for child in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def test_what_a_template_says_is_said(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UnsupportedModelError, match=r"fails \(TemplateError: roles must alternate"):
        render_chats(tokenizer, CHATS)


def test_a_long_template_is_not_compiled(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise AssertionError("it was rendered")

    monkeypatch.setattr(os, "fork", fork)
    tokenizer.chat_template = "a" * (chat_templates.MAX_TEMPLATE + 1)
    with pytest.raises(UnsupportedModelError, match="one of 262145 characters, more than 262144"):
        render_chats(tokenizer, CHATS)
    tokenizer.chat_template = {"default": "a" * 200_000, "tools": "a" * 200_000}
    with pytest.raises(UnsupportedModelError, match="one of 400000 characters"):
        render_chats(tokenizer, CHATS)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tools.jinja"])
def test_a_long_file_is_not_read(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.touch()
    check_folder(tmp_path)
    os.truncate(file, 2**20 + 1)
    with pytest.raises(UnsupportedModelError, match="expected at most 1048576 bytes in .*jinja"):
        check_folder(tmp_path)


def test_where_nothing_can_be_forked_it_is_rendered_in_place(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "fork")
    tokenizer.chat_template = PUBLISHED
    assert render_chats(tokenizer, CHATS) == tokenizer.apply_chat_template(CHATS, tokenize=False)
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(UnsupportedModelError, match="chat template: expected"):
        render_chats(tokenizer, CHATS)
