"""Tests of the documents: their links, the README of a package index, and the commands that they contain."""

import re
import runpy
import shlex
import subprocess
import sys
from email import message_from_string
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt

from tridecode.cli.parser import make_parser

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "training/README.md")),
    ROOT / "tridecode" / "bundled" / "MODEL_CARD.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "training" / "results").glob("*.md")),
]
BUILT_FROM = ("README.md", "pyproject.toml", "setup.py", "LICENSE", "tridecode/version.py", "tridecode/bundled/NOTICE")
RECORDER = runpy.run_path(str(ROOT / "docs" / "record_pages.py"))
RECORDED = [each for each in DOCUMENTS if "<!-- recorded: cpu -->" in each.read_text(encoding="utf-8")]


def commands(text: str):
    """Yield the arguments of tridecode in the blocks of a document, except those of commands that show an error."""
    for kind, block in re.findall(r"(?ms)^```(sh|console)\n(.*?)^```$", text):
        for line in re.sub(r" \\\n>? *", " ", block).splitlines():
            if (kind == "sh" or line.startswith("$ ")) and "exit code $?" not in line:
                yield from re.findall(r"(?:python cli\.py|\btridecode) ([^|><&;\n]*)", line)


COMMANDS = [
    (document.name, command.strip())
    for document in DOCUMENTS
    for command in commands(document.read_text(encoding="utf-8"))
]


def test_slow_files_exist(request):
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    assert all((conftest.TESTS / f"{name}.py").is_file() for name in conftest.SLOW)


def targets(markdown: str) -> list[str]:
    """Return the targets of a document's links and pictures."""
    tokens = [child for token in MarkdownIt("commonmark").parse(markdown) for child in token.children or []]
    return [token.attrs[name] for token in tokens for name in ("href", "src") if name in token.attrs]


def anchors(markdown: str) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.+)$", markdown)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def description(tmp_path_factory):
    """The long description of the built metadata, which a package index shows."""
    pytest.importorskip("setuptools", "77")
    copy = tmp_path_factory.mktemp("sources")
    for name in BUILT_FROM:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    build = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    metadata = message_from_string((copy / done.stdout.splitlines()[-1] / "METADATA").read_text(encoding="utf-8"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    return metadata.get_payload()


def test_package_index_has_no_relative_links(description):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = [target for target in targets(readme) if not target.startswith(("https://", "#"))]
    assert "docs/chat.svg" in relative and "docs/benchmarks.md#where-the-rest-goes" in relative
    assert [target for target in targets(description) if target in relative] == []
    for target in relative:
        assert f"`{target.partition('#')[0]}`" in description


def test_package_index_shows_the_whole_readme(description):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert description.count("\n") == readme.count("\n") + 2  # The two additional lines describe the files.
    published = set(description.splitlines())
    changed = [line for line in readme.splitlines() if line not in published]
    assert changed and all(re.search(r"\]\([^)]+\)", line) for line in changed)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_have_targets(document):
    text = document.read_text(encoding="utf-8")
    for target in targets(text):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        other = (document.parent / path).resolve() if path else document
        assert other.exists() and other.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(other.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("document, command", COMMANDS, ids=lambda part: part)
def test_documented_commands_have_existing_options(document, command):
    arguments = shlex.split(command, comments=True)
    if arguments[0] != "--print-completion":
        # A question without a command starts a chat.
        assert make_parser().parse_args(arguments).command in ("chat", arguments[0])


def test_documents_contain_commands():
    assert len(COMMANDS) > 30
    assert {"README.md", "chat.md", "generate.md", "benchmarks.md"} <= {name for name, _ in COMMANDS}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the outputs were recorded on a CPU")
@pytest.mark.parametrize("document", RECORDED, ids=lambda path: path.name)
def test_examples_run(document):
    """An example that fails raises an error. Another processor may round other sums, so answers may differ."""
    text = document.read_text(encoding="utf-8")
    before, after = (list(RECORDER["BLOCK"].finditer(each)) for each in (text, RECORDER["recorded"](text)))
    assert [match[2] for match in before] == [match[2] for match in after]
    assert [bool(match[3].strip()) for match in before] == [bool(match[3].strip()) for match in after]


def test_every_console_block_is_recorded():
    blocks = [match for each in DOCUMENTS for match in RECORDER["BLOCK"].finditer(each.read_text(encoding="utf-8"))]
    assert {match[1].split(",")[0] for match in blocks if match[2] == "console"} == {"cpu", "gpu"}
    assert "README.md" in {document.name for document in RECORDED}


def test_outputs_are_compared_without_times():
    shape, speed = RECORDER["shape"], "12 tokens · 154 tok/s · first token 0.02 s · 3 of 18 reused · seed 4"
    output = f"17 + 25 = 42.\n{speed} · cut by max_tokens\n"
    assert shape(output) == shape(output.replace("154", "98.5").replace("first token 0.02", "first 1.25"))
    assert shape(output) == shape(output.replace("3 of 18", "3/18").replace("seed 4", "seed 51"))
    for part, other in (("3 of", "0 of"), (" · cut by max_tokens", ""), ("max_tokens", "the context")):
        assert shape(output) != shape(output.replace(part, other))
    assert shape("2 answered, 0 failed · 30 tokens in 0.2 s") == shape("2 answered, 0 failed · 30 tokens in 11.9 s")
    assert shape(output) != shape(output.replace("42", "43")) and shape(output) != shape(output.replace("12 t", "11 t"))
