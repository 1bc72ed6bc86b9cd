"""Tests that Jinja's filters and globals work in a process that cannot open files."""

import pytest

from tridecode.errors import PromptError
from tridecode.text.chat_template import ChatTemplate
from tridecode.text.rendering import make_environment

USER = [{"role": "user", "content": "Hello"}]
FILTERS = sorted(make_environment().filters)
ARGUMENTS = {"batch": "2", "slice": "2", "attr": "'x'", "groupby": "'content'", "format": "1", "map": "'upper'",
             "replace": "'a', 'b'", "reject": "'none'", "select": "'string'", "selectattr": "'role'",
             "rejectattr": "'role'", "xmlattr": "true"}  # fmt: skip
INPUTS = ("'<p>a &lt; b</p> www.example.org ' * 9", "3", "'%s'", "messages", "messages[0]", "['a', 'b']", "[1]")


@pytest.fixture(scope="module")
def every_filter():
    """A template whose variable `which` selects a filter and the index of an input, such as "trim0"."""
    cases = (
        f"{{% if which == '{name}{i}' %}}{{{{ ({value}) | {name}({ARGUMENTS.get(name, '')}) | string }}}}{{% endif %}}"
        for name in FILTERS
        for i, value in enumerate(INPUTS)
    )
    return ChatTemplate("".join(cases), {}, "x.jinja")


@pytest.mark.parametrize("name", FILTERS)
def test_filters_open_no_files(name, every_filter):
    """A filter that imports a module at its first use would fail, because the process cannot open files."""
    refusals = []
    for i in range(len(INPUTS)):
        try:
            every_filter.render(USER, {"which": f"{name}{i}"})
        except PromptError as error:
            refusals.append(str(error))
    assert len(refusals) < len(INPUTS) and "open files" not in str(refusals), refusals


def test_globals_open_no_files():
    source = "{{ lipsum(1) | length > 0 }} {% set c = cycler(1, 2) %}{{ c.next() }}{{ dict(a=joiner()()) }}"
    assert ChatTemplate(source, {}).render(USER, {}) == "True 1{'a': ''}"
