"""Rows of a bench: the commands that make them, their formats, comparison with earlier ones, what is published."""

import csv
import importlib.util
import io
import json
from functools import partial
from pathlib import Path

import pytest
from benches import run_bench

from tridecode import cli as commands
from tridecode.cli.bench import report, suite
from tridecode.cli.parser import make_parser
from tridecode.models.presets import PRESETS

ROOT = Path(__file__).parents[2]
ROW = {"command": "python cli.py bench decode", "bench": "decode", "preset": "qwen3-4b", "context": 1024} | {
    "sampling": "greedy", "us_per_token": 2306.94, "us_p5": 2305.0, "us_p95": 2308.0, "tokens_per_second": 433.5,
    "bytes_per_step": 8205294592, "read_bandwidth_gbs": 4646.9, "pct_bandwidth": 76.5,
}  # fmt: skip


def options(*argv):
    return make_parser().parse_args(["bench", *argv])


@pytest.fixture
def bench(capsys):
    return partial(run_bench, capsys)


# commands and rows


@pytest.mark.parametrize("name", suite.SUITES)
def test_each_row_of_a_suite_names_the_command_that_makes_it(name):
    for args in suite.suite_args(name):
        words = suite.command_of(args).split()
        assert words[:3] == ["python", "cli.py", "bench"]
        assert vars(make_parser().parse_args(words[2:])) == vars(args)


def test_the_suite_has_every_row():
    rows = suite.suite_args("targets")
    steps = {(a.what, a.preset, a.context, a.sampling) for a in rows if a.what in ("decode", "stream")}
    others = [(a.what, a.preset, getattr(a, "prompt_tokens", None)) for a in rows if a.what in ("prefill", "start")]
    assert steps == SUITE_ROWS and len(rows) == len(steps) + len(others)
    assert others == [("prefill", "qwen3-4b", [2048]), ("prefill", "qwen3-4b", [64]), ("start", "qwen3-4b", None)]
    assert (rows[0].capacity, rows[0].steps) == (16384, 127)


def test_the_suite_of_prompts_has_every_length_in_every_mode():
    rows = suite.suite_args("prompts")
    found = {(a.preset, n, a.cached) for a in rows if a.what == "prefill" for n in a.prompt_tokens}
    assert found == {
        *(("qwen3-4b", n, 0) for n in (64, 512, 2048, 8192, 32000)), ("qwen3-4b", 64, 2000),
        *(("qwen3-0.6b", n, 0) for n in (64, 512, 2048)), ("qwen3-0.6b", 64, 2000),
    }  # fmt: skip
    assert {tuple(a.graph) for a in rows} == {("full", "full_and_piecewise", "full_decode_only")}


def test_modes_stand_side_by_side_and_are_compared_each_with_its_own():
    row = {"bench": "prefill", "preset": "qwen3-4b", "prompt_tokens": 2048, "cached": 0, "ttft_ms": 30.0}
    rows = [row | {"graph": mode, "reads": mode, "command": mode, "prefill_ms": 29.0} for mode in ("full", "none")]
    text = report.render(rows, "md")
    assert "| prefill | prompt tokens | graph | read by | ms | ms to first token |\n" in text
    assert "| qwen3-4b | 2,048 | none | none | 29.00 | 30.00 |\n" in text
    assert "| prompt tokens | cached | graph |" in report.render([*rows, row | {"cached": 2000}], "md")
    found = report.deviations([rows[0] | {"ttft_ms": 33.0}, rows[1]], rows)
    assert [(command, figure, round(percent)) for command, figure, percent in found] == [
        ("full", "ttft_ms", 10), ("none", "prefill_ms", 0),
    ]  # fmt: skip


SUITE_ROWS = {
    ("decode", "llama-3.2-1b", 32, "greedy"),
    *(("decode", preset, 64, "greedy") for preset in ("qwen3-0.6b", "qwen3-4b", "llama-3.1-8b", "qwen3-8b")),
    *(("decode", preset, 1024, "greedy") for preset in ("qwen3-4b", "llama-3.2-1b")),
    ("decode", "qwen3-4b", 4096, "greedy"),
    ("decode", "qwen3-4b", 32000, "greedy"),
    ("decode", "qwen3-4b", 64, "all"),
    ("stream", "qwen3-4b", 64, "greedy"),
    ("stream", "qwen3-0.6b", 64, "greedy"),
}


def test_a_checkpoint_is_named_in_the_command():
    args = options("decode", "--model", "a dir", "--ablate")
    assert "--model 'a dir'" in suite.command_of(args) and "--preset" not in suite.command_of(args)
    assert suite.command_of(args).endswith("--ablate")


@pytest.mark.parametrize(
    "argv",
    ["prefill --prompt-tokens 3,x", "prefill --graph full,half", "prefill --graph full,full", "prefill --cached -1"]
    + ["decode --model a --preset qwen3-4b", "start --steps 3", "suite --runs 2"],
)
def test_wrong_options(argv, capsys):
    with pytest.raises(SystemExit) as exit:
        commands.main(["bench", *argv.split()])
    assert exit.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("form", ["md", "csv", "json", "jsonl"])
def test_formats(form):
    other = {"command": "x", "bench": "start", "preset": "qwen3-4b", "first_start_s": 31.0, "second_start_s": 8.25}
    text = report.render([ROW, other], form)
    if form == "md":
        assert "| qwen3-4b | 1,024 | 2,307 | 2,305 | 2,308 | 434 | 8.205 | 4,647 | 76.5 |\n" in text
        assert "| start | first start, s | later start, s |\n" in text and "over greedy" not in text
    elif form == "csv":
        first, second = csv.DictReader(io.StringIO(text))
        assert first["us_per_token"] == "2306.94" and second["first_start_s"] == "31.0" and first["first_start_s"] == ""
    else:
        assert (json.loads(text) if form == "json" else [json.loads(line) for line in text.splitlines()]) == [
            ROW,
            other,
        ]


def test_markdown_cells_cannot_end_a_cell():
    assert "a\\|b" in report.render([ROW | {"preset": "a|b"}], "md")


@pytest.mark.parametrize(
    ("name", "starts"), [("a.csv", "command,"), ("a.md", "| decode"), ("a.jsonl", "{"), ("a", "[")]
)
def test_the_suffix_of_the_output_names_its_format(bench, tmp_path, name, starts):
    (tmp_path / "rows.json").write_text(json.dumps([ROW]))
    code, out, _ = bench("report", str(tmp_path / "rows.json"), "--output", str(tmp_path / name))
    assert code == 0 and (tmp_path / name).read_text().startswith(starts)
    assert json.loads(out.split("\n")[-2]) == ROW


def test_a_suffix_of_no_format_is_refused_before_anything_is_measured(bench, tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([ROW]))
    argv = ("report", str(tmp_path / "rows.json"), "--output", str(tmp_path / "rows.xml"))
    code, out, err = bench(*argv)
    assert (code, out, err.count("\n")) == (1, "", 1) and not (tmp_path / "rows.xml").exists()
    assert "rows.xml: the suffix must be one of .md, .csv, .json, .jsonl, or give --format" in err
    assert bench(*argv, "--format", "csv")[0] == 0 and (tmp_path / "rows.xml").read_text().startswith("command,")


def test_several_rows_are_one_object_at_the_end(bench, tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([ROW, ROW]))
    _, out, _ = bench("report", str(tmp_path / "rows.json"))
    assert json.loads(out.split("\n")[-2]) == {"rows": [ROW, ROW]}


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "[1]", '[{"bench": "x"}]', '[{"bench": []}]', "[" * 100_000, json.dumps([ROW | {"context": "x"}])]
    + [json.dumps([ROW]).replace("}", f', "more": {number}}}') for number in ("1e999", "NaN", "7" * 5000)],
    ids=lambda text: text[-20:],
)
def test_files_that_hold_no_rows(bench, tmp_path, text):
    (tmp_path / "rows.json").write_text(text)
    code, out, err = bench("report", str(tmp_path / "rows.json"))
    assert code == 1 and out == "" and err.count("\n") == 1 and "rows.json: expected a JSON list" in err


def test_a_file_that_is_not_there(bench, tmp_path):
    code, _, err = bench("decode", "--compare", str(tmp_path / "absent"))
    assert code == 1 and "absent" in err and err.count("\n") == 1  # before anything is measured
    for path in ("/dev/zero", str(tmp_path)):
        code, out, err = bench("report", path)
        assert (code, out) == (1, "") and err.endswith(f"{path}: not a file; give a JSON file that a bench wrote\n")


def test_deviations_name_the_figure_that_changed_most():
    prefill_row = {"command": "p", "bench": "prefill", "prefill_ms": 10.0, "ttft_ms": 20.0}
    rung = {"command": "a", "bench": "ablate", "variant": "graph", "wall_us": 110.0}
    before = [ROW | {"us_per_token": 2000.0}, prefill_row, rung | {"wall_us": 100.0}, rung | {"variant": "eager"}]
    now = [ROW, prefill_row | {"prefill_ms": 10.1, "ttft_ms": 19.0}, rung, ROW | {"command": "new"}]
    found = report.deviations(now, before)
    assert [(command, figure) for command, figure, _ in found] == [
        (ROW["command"], "us_per_token"), ("p", "ttft_ms"), ("a", "wall_us")
    ]  # fmt: skip
    assert [percent for *_, percent in found] == pytest.approx([15.347, -5.0, 10.0])


def test_compare_says_the_largest(bench, tmp_path):
    rows = [ROW, ROW | {"command": "y"}]
    earlier = [ROW | {"us_per_token": 2300.0}, ROW | {"command": "y", "us_per_token": 2400.0}]
    for name, value in (("now", rows), ("then", earlier)):
        (tmp_path / name).write_text(json.dumps(value))
    code, _, err = bench("report", str(tmp_path / "now"), "--compare", str(tmp_path / "then"))
    assert code == 0 and err.count("\n") == 3
    assert "largest deviation of 2 rows" in err and "-3.88%" in err.split("\n")[-2]


def test_compare_with_other_rows(bench, tmp_path):
    for name, value in (("now", [ROW]), ("then", [ROW | {"command": "y"}])):
        (tmp_path / name).write_text(json.dumps(value))
    code, _, err = bench("report", str(tmp_path / "now"), "--compare", str(tmp_path / "then"))
    assert code == 1 and "none of these rows" in err


# what is published


def test_the_tables_are_what_the_files_say():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    readme = (ROOT / "README.md").read_text()
    assert readme.count("<!-- table: benchmarks/h200.json -->") == 1
    for name in tables.DOCUMENTS:
        text = (ROOT / name).read_text()
        assert text == tables.filled(text), f"{name}: run python benchmarks/tables.py"
    assert tables.filled(readme.replace("| 4,6", "| 9,9")) == readme  # a wrong figure would be put right


def test_every_published_row_has_its_figures():
    for row in report.read_rows(str(ROOT / "benchmarks" / "h200.json")):
        assert row["command"].startswith(f"python cli.py bench {row['bench']} ") and row["preset"] in PRESETS
        args = make_parser().parse_args(row["command"].split()[2:])
        assert args.what == row["bench"] and args.preset == row["preset"]
        for key in ("gpu", "torch", "triton", *report.COMPARED[row["bench"]]):
            assert row[key]
        if row["bench"] == "decode":
            pct = row["bytes_per_step"] / row["us_per_token"] / row["read_bandwidth_gbs"] / 10
            assert pct == pytest.approx(row["pct_bandwidth"], abs=0.1)
            assert row["context"] == args.context
