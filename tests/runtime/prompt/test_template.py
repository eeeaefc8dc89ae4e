from __future__ import annotations

import contextlib
import importlib
import threading
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings

from tests.support.templates import EXPRESSIONS
from vtx.runtime.errors import TemplateError, VtxError
from vtx.runtime.host.confined import ChildLimits, ChildTask, Subject, confine
from vtx.runtime.prompt.template import MAX_SOURCE, ChatTemplate

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " What's <this>? 猫 "}]},
    {"role": "assistant", "content": "A cat."},
]


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: str) -> str:
    return ChatTemplate(source).render(CHAT if messages is None else messages, variables, add_generation_prompt=True)


def render_as_transformers(source: str, **variables: str) -> str:
    transformers: Any = importlib.import_module("transformers.utils.chat_template_utils")
    rendered, _ = transformers.render_jinja_template(
        [CHAT], chat_template=source, add_generation_prompt=True, **variables
    )
    return str(rendered[0])


GOOD = {
    "loop": (
        "{% for m in messages %}"
        "{{ loop.index0 }}/{{ loop.length }} {{ loop.last }} {{ loop.nextitem is defined }}{% endfor %}"
    ),
    "break": (
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}"
    ),
    "else": (
        "{% for m in [] %}x{% else %}none{% endfor %}"
        "{% for m in messages if m.role == 'user' %}{{ loop.first }}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    ),
    "macro": (
        "{% macro turn(m, end='.') %}{{ m.role ~ end }}{% endmacro %}"
        "{% for m in messages %}{{ turn(m, end='!') }}{% endfor %}"
    ),
    "generation": "{% for m in messages %}{% generation %}\n  {{ m.role }}\n{% endgeneration %}\n{% endfor %}",
    "filters": (
        "{{ messages | map(attribute='role') | join(', ') | upper }} {{ [3, 1, 2] | sort | list }} {{ [1, 2] | sum }}"
    ),
    "select": (
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ (messages | last).content | trim }}"
    ),
    "tojson": "{{ messages | tojson }} {{ {'b': 1, 'a': '<é>'} | tojson(indent=2, sort_keys=True) }}",
    "strings": (
        "{{ ' a,b '.strip().split(',')[-1] }}{{ 'abc'.replace('b', 'x').startswith('ax') }}{{ ','.join(['a', 'b']) }}"
    ),
    "operators": (
        "{{ 'ab' * 2 + 'c' }} {{ '%s-%03d' % ('a', 7) }} {{ 7 // 2 }} {{ 2 ** 8 }} {{ 7 % 4 }} {{ 1.5 | round | int }}"
    ),
    "slices": "{{ messages[1:] | length }}{{ messages[::-1][0].role }}{{ 'abc'[:2] }}{{ (1, 2)[0] }}",
    "tests": (
        "{{ x is defined }}{{ messages is iterable }}{{ 'a' in 'abc' }}"
        "{{ messages[0].content is string }}{{ none is none }}"
    ),
    "tokens": (
        "{{ bos_token }}{{ eos_token }}{{ missing }}{% if add_generation_prompt %}go{% endif %}{{ tools is none }}"
    ),
    "dict": "{% for k, v in dict(a=1, b=2).items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': 1}.get('c', 5) }}",
    "blocks": "\n  {% if true %}\n  yes\n  {% endif %}\n{#- gone -#}\n end \n\n",
    "set block": "{% set x %}{% for m in messages %}{{ m.role }};{% endfor %}{% endset %}{{ x | length }}{{ x }}",
    "indent": "{{ 'a\nb\n\nc' | indent(2) }}{{ 'a' | replace('a', 'bb') }}{{ [1, [2, 'x']] }}{{ 'x' | default('y') }}",
    "groups": (
        "{% for g in messages | groupby('role') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}{{ joiner(',')() }}"
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_templates_render_as_in_transformers(name: str) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert render(GOOD[name], None, **tokens) == render_as_transformers(GOOD[name], **tokens)


def grow(step: str, start: str = "x='a', y='a'", show: str = "{{ n.x | length }}") -> str:
    return f"{{% set n = namespace({start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{show}"


HOSTILE = {
    "class": "{{ ''.__class__.__mro__ }}",
    "class by item": "{{ ''['__class__'] }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "globals of ours": "{{ raise_exception.__globals__ }}",
    "self": "{{ self._TemplateReference__context }}",
    "namespace": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "mutation": "{{ messages.append(1) }}",
    "huge range": "{% for i in range(10**9) %}{% endfor %}",
    "long body": "{% for i in range(100000) %}{% for j in range(99) %}" + "{% set a = 1 %}" * 3000 + "{% endfor %}" * 2,
    "string times": "{{ 'a' * 10**9 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "join": "{{ ('b' * 1000000).join(['a'] * 100000) }}",
    "strip": "{{ ('a' * 1000000).strip('b' * 1000000) }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "strftime": "{{ strftime_now('%1000000000Y') }}",
    "doubling ~": grow("{% set n.x = n.x ~ n.x %}"),
    "shared lists": grow("{% set n.x = [n.x, n.x] %}", show="{{ n.x }}"),
    "shared tuples hashed": grow("{% set n.x = (n.x, n.x) %}", show="{{ {n.x: 1} }}"),
    "many strings": "".join(f"{{% set a{i} = 'a' * 4000000 %}}" for i in range(1500)),
    "long comparisons": "{% set s = 'a' * 4000000 %}{% for i in range(100000) %}{{ s[1:] == s[:-1] }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "block in itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "long output": "{% for i in range(100000) %}" + "x" * 1000 + "{% endfor %}",
    "refund": "{{ [1] | map(' each', -1000000000) | list }}{{ 'a' * 10**8 }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "autoescape": "{% autoescape true %}{{ '<' * 1000000 }}{% endautoescape %}",
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "sum of many": "{{ " + "1+" * 40_000 + "1 }}",
    "many expressions": "{{a}}" * 25_000,
    "nested loops": "{% for i in [1, 2] %}" * 30 + "{% endfor %}" * 30,
    "nested ifs": "{% if 1 %}" * 100 + "{% endif %}" * 100,
    "long source": "a" * (MAX_SOURCE + 1),
    "syntax": "{% for",
    "unknown block": "{% trans %}",
    "undefined": "{{ a.b.c }}",
    "division": "{{ 1 // 0 }}",
}


# What jinja2's sandbox lets through, because it costs a few seconds at most and reveals nothing.
HARMLESS = {
    *("class by item", "globals of ours", "self", "namespace", "strip", "strftime", "autoescape", "many expressions"),
}
CHILD = ChildLimits(memory=1 << 30, cpu_seconds=1)
PATIENT = ChildLimits(memory=1 << 30, cpu_seconds=60)  # for what must succeed: the child's imports count, too


def render_confined(source: str, limits: ChildLimits = CHILD) -> Any:
    return confine(
        ChildTask("tests.support.confined:render", {"source": source, "messages": CHAT}, limits),
        Subject("the template", cure="give another with --chat-template FILE"),
    )


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", sorted(HOSTILE.keys() - HARMLESS))
def test_hostile_templates_end_as_an_error_soon(name: str) -> None:
    with pytest.raises(VtxError, match="--chat-template FILE"):
        render_confined(HOSTILE[name])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_what_the_sandbox_lets_through_reveals_nothing(name: str) -> None:
    text = render_confined(HOSTILE[name], PATIENT)
    assert not any(word in text for word in ("class", "object", "function", "module", "root:"))


@pytest.mark.slow
def test_loops_end_in_another_thread() -> None:
    errors: list[Exception] = []

    def work() -> None:
        try:
            render_confined(HOSTILE["branching"])
        except VtxError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_each_template_of_one_text_has_its_own_date() -> None:
    dated = [ChatTemplate("{{ strftime_now('%Y') }}", lambda year=year: datetime(year, 1, 1)) for year in (2001, 2002)]
    assert [template.render((), {}, add_generation_prompt=True) for template in dated] == ["2001", "2002"]


def test_a_template_that_failed_works_the_next_time() -> None:
    template = ChatTemplate("{% if messages[0].n > 1 %}{{ 1 // 0 }}{% endif %}fine")
    for _ in range(2):
        with pytest.raises(TemplateError):
            template.render([{"n": 100}], {}, add_generation_prompt=False)
        assert template.render([{"n": 1}], {}, add_generation_prompt=False) == "fine"


def test_a_template_may_refuse_a_conversation() -> None:
    with pytest.raises(TemplateError, match="refuses this conversation: Roles must alternate"):
        render("{{ raise_exception('Roles\nmust alternate') }}")


def test_a_megabyte_of_text_is_rendered() -> None:
    text = "word " * 200_000
    source = (
        "{% macro show(c) %}{{ c | trim }}{% endmacro %}"
        "{% for m in messages %}{{ '<' + m.role + '>' + show(m.content) ~ '\n' }}{% endfor %}"
    )
    assert render(source, [{"role": "user", "content": text}]) == f"<user>{text.strip()}\n"


@pytest.mark.slow
@given(EXPRESSIONS)
@settings(max_examples=100, deadline=None)
def test_only_template_errors_come_out(expression: str) -> None:
    with contextlib.suppress(TemplateError):
        assert isinstance(render("{% for i in [1, 2] %}{{ " + expression + " }}{% endfor %}"), str)
