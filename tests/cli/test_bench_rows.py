"""Rows of a bench: formats and commands, suites, reports, comparisons, and recorded rows."""

import csv
import io
import json
import re
import shlex

import pytest
import torch
from benches import ROOT, bench_on_tiny_engines
from models import FAMILIES, tiny_config

from benchmarks import offload, peers, report, suite, tables
from benchmarks.rows import TYPES, read_rows
from tridecode.checkpoint.slices import parameter_count
from tridecode.cli.bench.decode import DecodeRow
from tridecode.cli.bench.prefill import PrefillRow
from tridecode.cli.bench.rows import render
from tridecode.cli.bench.run import command_of
from tridecode.cli.parser import make_parser

ROW = {"command": "python cli.py bench decode", "bench": "decode", "preset": "qwen3-4b", "context": 1024} | {
    "steps": 128, "runs": 9, "sampling": "greedy", "us_per_token": 2306.94, "us_p5": 2305.0, "us_p95": 2308.0,
    "tokens_per_second": 433.5, "bytes_per_step": 8205294592, "read_bandwidth_gbs": 4646.9, "pct_bandwidth": 76.5,
}  # fmt: skip
RECORDED = sorted((ROOT / "benchmarks").glob("*.json"))


def decode_row(**changes) -> DecodeRow:
    return DecodeRow.read({key: value for key, value in (ROW | changes).items() if key != "bench"})


def prefill_row(**changes) -> PrefillRow:
    figures = dict(prefill_ms=29.0, prefill_ms_p5=28.0, prefill_ms_p95=30.0, ttft_ms=30.0, flops=10**13)
    how = dict(preset="qwen3-4b", prompt_tokens=2048, graph="full", runs=9, reads="full", matmul_tflops=700.0)
    return PrefillRow(**how | figures | {"pct_matmul": 50.0} | changes)


@pytest.fixture
def run(capsys, tmp_path):
    """Run `python -m benchmarks.report` on rows; returns exit code, stdout and stderr."""

    def run(rows, *argv, earlier=None):
        for name, value in (("rows.json", rows), ("earlier.json", earlier)):
            (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
        more = () if earlier is None else ("--compare", str(tmp_path / "earlier.json"))
        code = report.main([str(tmp_path / "rows.json"), *argv, *more])
        return code, *capsys.readouterr()

    return run


# formats


@pytest.mark.parametrize("form", ["md", "csv", "json", "jsonl"])
def test_formats(form):
    text = render([decode_row(), prefill_row(preset="a|b")], form)
    other = prefill_row(preset="a|b").as_dict()
    if form == "md":
        assert "| qwen3-4b | 1,024 | 2,307 | 2,305 | 2,308 | 434 | 8.205 | 4,647 | 76.5 |\n" in text
        assert "| prefill | prompt tokens | graph |" in text and "over greedy" not in text
        assert "| a\\|b | 2,048 | full | full | 29.00 | 28.00 |" in text
    elif form == "csv":
        first, second = csv.DictReader(io.StringIO(text))
        assert first["us_per_token"] == "2306.94" and second["ttft_ms"] == "30.0" and first["ttft_ms"] == ""
    else:
        assert (json.loads(text) if form == "json" else list(map(json.loads, text.splitlines()))) == [ROW, other]


def test_values_are_rounded_and_missing_figures_omitted():
    row = decode_row(us_per_token=2306.94321, us_over_greedy=13.00721, sampling="all", quantize="int4", kv_dtype="fp8")
    assert (row.us_per_token, row.us_over_greedy) == (2306.94, 13.01)
    assert row.name == "qwen3-4b, int4, K/V in fp8, all sampling filters"
    assert decode_row().as_dict() == ROW and list(decode_row(gpu="a").as_dict())[-1] == "gpu"
    assert "| prompt tokens | cached | graph |" in render([prefill_row(), prefill_row(cached=2000)], "md")


def test_the_suffix_of_the_output_names_its_format(run, tmp_path):
    for name, starts in (("a.csv", "command,"), ("a.md", "| decode"), ("a.jsonl", "{"), ("a", "[")):
        code, out, _ = run([ROW, ROW], "--output", str(tmp_path / name))
        assert code == 0 and (tmp_path / name).read_text().startswith(starts)
        assert json.loads(out.split("\n")[-2]) == {"rows": [ROW, ROW]}
    argv = ("--output", str(tmp_path / "rows.xml"))
    code, out, err = run([ROW], *argv)
    assert (code, out, err.count("\n")) == (1, "", 1) and not (tmp_path / "rows.xml").exists()
    assert "rows.xml: the suffix must be one of .md, .csv, .json, .jsonl, or give --format" in err
    code, out, _ = run([ROW], *argv, "--format", "csv")
    assert code == 0 and (tmp_path / "rows.xml").read_text().startswith("command,")
    assert json.loads(out.split("\n")[-2]) == ROW


# files and comparison


@pytest.mark.parametrize(
    "text",
    ["", "[]", '[{"bench": "x"}]', '[{"bench": []}]', "[" * 100_000, json.dumps([ROW | {"us_p5": "x"}])]
    + [json.dumps([ROW | {"more": 1}]), '[{"bench": "decode"}]', json.dumps([ROW]).replace("}", ', "more": NaN}')],
    ids=lambda text: text[-20:],
)
def test_files_without_rows(run, capsys, text):
    code, out, err = run(text)
    assert code == 1 and out == "" and err.count("\n") == 1 and "rows.json: expected a JSON list" in err
    for path, words in (("/no/rows", "No such file"), ("/dev/zero", "not a file")):
        assert report.main([path]) == 1 and f"{path}: {words}" in capsys.readouterr().err


def test_a_comparison_ends_with_the_largest_deviation(run):
    earlier = [ROW | {"us_per_token": 2300.0}, ROW | {"command": "y", "us_per_token": 2400.0}]
    code, _, err = run([ROW, ROW | {"command": "y"}, ROW | {"command": "new"}], earlier=earlier)
    assert code == 0 and err.count("\n") == 3
    assert "largest deviation of 2 results" in err and "-3.88%" in err.split("\n")[-2]
    code, _, err = run([ROW], earlier=[ROW | {"command": "y"}])
    assert code == 1 and "no earlier result" in err


# suites and peers


@pytest.fixture
def suite_of(capsys, monkeypatch, tmp_path):
    """Run a suite of these lines on tiny engines; returns exit code, stdout and stderr."""
    bench_on_tiny_engines(capsys, monkeypatch, "decode", "prefill")
    monkeypatch.setattr(suite, "need_gpu", lambda: None)

    def suite_of(lines):
        monkeypatch.setitem(suite.SUITES, "targets", lines)
        code = suite.main(["targets", "--output", str(tmp_path / "rows.json")])
        return code, *capsys.readouterr()

    return suite_of


def test_suite_writes_rows_that_succeeded(suite_of, tmp_path):
    fails = "prefill --prompt-tokens 900 --capacity 8 --runs 1"
    code, out, err = suite_of(f"decode --context 5 --steps 2 --runs 1\n{fails}")
    before = (tmp_path / "rows.json").read_text()
    (row,) = json.loads(before)
    assert code == 1 and row["bench"] == "decode" and json.loads(out.split("\n")[-2]) == row
    assert "prefill" in err and "900" in err and "[2/2]" in err and f"us_per_token {row['us_per_token']}" in err
    code, out, err = suite_of(fails)
    assert code == 1 and out == "" and "every measurement failed" in err
    assert (tmp_path / "rows.json").read_text() == before


@pytest.mark.parametrize("name", suite.SUITES)
def test_suites_have_existing_options(name):
    parsed = [suite.parse(line) for line in suite.lines_of(name)]
    assert parsed and all(callable(measured) for _, measured in parsed)


def test_transformers_has_the_same_parameters_and_is_timed_with_both_caches():
    pytest.importorskip("transformers", reason="transformers is not installed")
    for family in FAMILIES:
        config = tiny_config(**FAMILIES[family])
        model = peers.peer_model(config, "cpu", torch.float32)
        assert sum(p.numel() for p in model.parameters()) == parameter_count(config), family
    for cache in (None, "static"):
        assert len(peers.time_peer(model, config, 6, 8, 2, cache)) == 2


# recorded rows


def parsed_command(command: str) -> str:
    """Parse a command and return the command line of its options."""
    words = shlex.split(command)
    if words[:2] == ["python", "-m"]:
        script = {"benchmarks.peers": peers, "benchmarks.offload": offload}[words[2]]
        return command_of(" ".join(words[:3]), script.parse(words[3:]))
    assert words[:3] == ["python", "cli.py", "bench"]
    return command_of(" ".join(words[:4]), make_parser().parse_args(words[2:]))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_recorded_rows_are_read_and_have_valid_commands(path):
    rows, found = read_rows(str(path)), json.loads(path.read_text())
    assert [row.as_dict() for row in rows] == found
    for row in rows:
        assert type(row) is TYPES[row.bench] and row.compared()
        assert parsed_command(row.command) == row.command


def test_command_omits_only_automatic_choices():
    assert " --tokenizer auto" in parsed_command("python cli.py bench speculate --texts-only --tokenizer auto")
    assert "--tokenizer" not in parsed_command("python cli.py bench speculate --texts-only")
    assert "auto" not in parsed_command("python cli.py bench decode --quantize int4")


def test_tables_show_the_recorded_rows():
    readme = (ROOT / "README.md").read_text()
    assert readme.count("<!-- table: benchmarks/h200.json -->") == 1
    for name in tables.DOCUMENTS:
        text = (ROOT / name).read_text()
        assert text == tables.filled(text), f"{name}: run python -m benchmarks.tables"
    assert tables.filled(readme.replace("| 4,6", "| 9,9")) == readme  # tables.filled corrects a wrong figure.


def test_documented_scripts_exist():
    texts = [path.read_text() for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md"))]
    names = {name for text in texts for name in re.findall(r"python -m benchmarks\.(\w+)", text)}
    assert names >= {"suite", "report", "peers", "tables"}
    assert [name for name in names if not (ROOT / "benchmarks" / f"{name}.py").is_file()] == []
