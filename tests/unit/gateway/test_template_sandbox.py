"""Templates of models that were made to harm: they end in time, in a refusal, without a trace outside."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from octavo.gateway import template_sandbox
from octavo.gateway.chat_template import ChatTemplate
from octavo.gateway.http_errors import FieldError

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


def rendered(source: str) -> str:
    return ChatTemplate(source, {}).render(MESSAGES)


def refusal(source: str) -> str:
    with pytest.raises(FieldError) as refused:
        rendered(source)
    assert refused.value.param == "messages"
    return refused.value.message


ENDLESS = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "a loop that writes": "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
    "a macro that doubles itself": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "recursion of a loop": "{% for n in [99] recursive %}{% if n %}{{ loop([n - 1, n - 1]) }}{% endif %}{% endfor %}",
    "a filter over all": "{% for a in range(9999) %}{{ range(9999) | map('string') | join | length }}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_does_not_end_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "RENDER_TIMEOUT_S", 0.2)
    start = time.monotonic()
    assert "takes more than 0.2 s" in refusal(source)
    assert time.monotonic() - start < 5


LARGE = {
    "a text repeated": "{{ 'a' * 1000000000 }}",
    "a list repeated": "{{ (1000000000 * [0]) | length }}",
    "a power": "{{ 10 ** 100000000 }}",
    "a power of a power": "{{ 10 ** 60 ** 60 ** 60 ** 60 }}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a width from elsewhere": "{{ '%*d' % (1000000000, 1) }}",
    "doubling by concatenation": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by a block": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "text without end": "{% for a in range(99999) %}{{ messages[0].content * 100 }}{% endfor %}",
}


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_a_template_cannot_make_values_without_bound(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CHARS", 2**20)
    assert refusal(source).startswith("messages: the chat template refuses them: the template ")


ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals through cycler": "{{ cycler.__init__.__globals__.os.popen('touch PLACE').read() }}",
    "attr filter": "{{ ('' | attr('__class__')).mro() }}",
    "a format string": "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
    "an import": "{% import 'os' as os %}{{ os.system('touch PLACE') }}",
    "an include": "{% include '/etc/passwd' %}",
    "the messages": "{{ messages.append(1) }}",
    "one message": "{{ messages[0].update({'role': 'system'}) }}",
    "the environment": "{{ self.__init__.__globals__ }}",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_a_template_reaches_nothing_outside(source: str, tmp_path: Path) -> None:
    before = [dict(message) for message in MESSAGES]
    try:
        text = rendered(source.replace("PLACE", str(tmp_path / "proof")))
    except FieldError as error:
        text = error.message
    assert not (tmp_path / "proof").exists()
    assert not any(word in text for word in ("<class 'os", "sys", "root:", "module '", "__builtins__")), text
    assert before == MESSAGES


def test_what_ordinary_templates_do_is_untouched() -> None:
    source = (
        "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}"
        "{{ loop.index }}/{{ loop.length }}{{ '!' if loop.last }}{{ loop.revindex }}:{{ m.role }}|{%- endfor -%}"
        "{%- for k, v in messages[0] | items if k != 'x' -%}{{ k }}={{ v }};{%- endfor -%}"
        "{%- set a, b = 1, 2 -%}{{ a + b * 3 }}{%- set c -%}[{{ ns.n }}]{%- endset -%}{{ c }}"
        "{{ '%02d' % 7 }}{{ '-' * 3 }}{%- for x in nothing -%}{%- else -%}none{%- endfor -%}"
    )
    assert rendered(source) == "1/22:user|2/2!1:assistant|role=user;content=hello;7[2]07---none"
