"""Tests of bench serve against a server with known delays: its requests, their times, and its figures."""

import json
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from benches import ROOT, run_bench
from openai_server import FakeServer
from servers import until

from tridecode.cli.bench import serve
from tridecode.cli.bench.client import Answer, Failed
from tridecode.cli.parser import make_parser

ENDS = [f"_{of}_ms" for of in ("ttft", "tpot", "itl", "e2el")]
FIELDS = {"date", "model_id", "num_prompts", "request_rate", "max_concurrency", "duration", "completed", "failed"} | {
    "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput", "total_token_throughput",
}  # fmt: skip
NO_SERVER = "http://127.0.0.1:9"


@pytest.fixture
def bench(capsys):
    """Run `bench serve` against a server; returns exit code, the row at the end of stdout, stdout and stderr."""

    def bench(server, *argv):
        url = server if isinstance(server, str) else server.url
        code, out, err = run_bench(capsys, "serve", "--url", url, *map(str, argv))
        return code, json.loads(out.split("\n")[-2]) if out else None, out, err

    return bench


def options(*argv):
    return make_parser().parse_args(["bench", "serve", *map(str, argv)])


# figures


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_times_match_the_delays_of_the_server(bench, endpoint):
    with FakeServer(first=0.1, gap=0.02) as server:
        load = ("--num-prompts", 6, "--max-concurrency", 3, "--output-tokens", 11, "--input-tokens", 9)
        code, row, _, err = bench(server, "--endpoint", endpoint, *load)
    assert (code, err) == (0, "")
    # A busy machine makes times longer. If it delays the first token, the times between tokens become shorter.
    for figure, known in (("median_ttft", 90), ("median_tpot", 10), ("mean_itl", 10), ("median_e2el", 270)):
        assert known < row[f"{figure}_ms"] < known + 10_000, figure
    assert row["mean_e2el_ms"] == pytest.approx(row["mean_ttft_ms"] + 10 * row["mean_tpot_ms"], 1e-3)
    # Three requests run at a time, so there are two rounds.
    assert 2 * 0.3 <= row["duration"] <= 6 * row["mean_e2el_ms"] / 1e3
    assert (row["completed"], row["failed"], row["total_output_tokens"]) == (6, 0, 66)
    assert row["total_input_tokens"] == (54 if endpoint == "completions" else 42)  # The server reports this number.
    assert row["request_throughput"] == pytest.approx(6 / row["duration"], 1e-3)
    assert row["output_throughput"] == pytest.approx(66 / row["duration"], 1e-3)


def test_the_row_has_the_fields_of_vllm_and_its_command(bench):
    with FakeServer() as server:
        _, row, out, _ = bench(server, "--num-prompts", 2, "--output-tokens", 1, "--percentiles", "50,99.9")
    times = {f"{figure}{end}" for end in ENDS for figure in ("mean", "median", "std", "p50", "p99.9")}
    assert set(row) == {"command", "bench", "seed", "tridecode"} | FIELDS | times and "P99.9 E2EL (ms):" in out
    assert (row["model_id"], row["request_rate"], row["max_concurrency"]) == ("a-model", "inf", None)
    again = make_parser().parse_args(row["command"].split()[2:])
    assert (again.num_prompts, again.output_tokens, again.url, again.warm_up) == (2, 1, server.url, 1)
    for url in ("http://a:8000", "http://a:8000/", "http://a:8000/v1", "http://a:8000/v1/"):
        assert options("--url", url).url == "http://a:8000"
    read = serve.ServeRow.read({name: value for name, value in row.items() if name != "bench"})
    assert read.as_dict() == row and read.name == "a-model"
    # Answers of one token have no time between tokens.
    assert row["mean_tpot_ms"] is None and row["p99.9_itl_ms"] is None and row["mean_ttft_ms"] > 0
    assert "Mean TPOT (ms):                          -\n" in out


def test_console_output_matches_vllm():
    assert serve.latency_stats([0.001, 0.002, 0.004], [50, 75]) == {
        "mean": 2.3333, "median": 2.0, "std": round(float(np.std([1, 2, 4])), 4), "p50": 2.0, "p75": 3.0,
    }  # fmt: skip
    figures = dict(date="", model_id="m", num_prompts=100, completed=100, failed=0, duration=11.409, seed=1)
    figures |= dict(total_input_tokens=23260, total_output_tokens=21657, request_throughput=8.77)
    figures |= dict(output_throughput=1898.67, total_token_throughput=3937.88)
    times = {f"{figure}{end}": 76.371 for end in ENDS for figure in ("mean", "median", "std", "p99")}
    lines = serve.ServeRow.from_times(times, **figures, request_rate="inf", max_concurrency=None).block(160).split("\n")
    assert lines[:2] + lines[3:4] + lines[6:7] + lines[9:11] == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     100",
        "Benchmark duration (s):                  11.41",
        "Request throughput (req/s):              8.77",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          76.37",
    ]
    assert lines[17] == "---------------Inter-token Latency----------------" and lines[-2:] == ["=" * 50, ""]
    limited = serve.ServeRow.from_times(times, **figures, request_rate=2.5, max_concurrency=8).block(40)
    assert "Maximum request concurrency:   8\n" in limited and "Request rate configured (RPS): 2.50\n" in limited
    assert max(map(len, limited.split("\n"))) == 40


# requests


def test_random_prompts(bench):
    with FakeServer() as server:
        load = ("--num-prompts", 3, "--input-tokens", 12, "--output-tokens", 2, "--warm-up", 2)
        bench(server, *load, "--seed", 5)
        first = server.bodies
        bench(server, *load, "--seed", 5)
        assert server.bodies[5:] == first
        bench(server, *load)
        assert {str(body["prompt"]) for body in server.bodies[10:]}.isdisjoint(str(body["prompt"]) for body in first)
        bench(server, *load, "--endpoint", "chat", "--no-ignore-eos", "--temperature", 0.5, "--model", "another")
    assert {path for _, path, _, _ in server.got[:15]} == {"/v1/completions"}
    prompts = [body.pop("prompt") for body in first]
    assert len({str(prompt) for prompt in prompts}) == 5  # A measured prompt must differ from those of the warm-up.
    assert all(len(prompt) == 12 and all(1000 <= token < 4000 for token in prompt) for prompt in prompts)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    assert first[0] == {"model": "a-model", "max_tokens": 2, "temperature": 0.0, "ignore_eos": True} | usage
    _, path, _, body = server.got[-1]
    (message,) = body.pop("messages")
    assert path == "/v1/chat/completions" and message["role"] == "user" and len(message["content"].split()) == 12
    assert body == {"model": "another", "max_tokens": 2, "temperature": 0.5} | usage


def test_prompts_from_a_file(bench, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello"}\n\n{"prompt_ids": [5, 6], "max_tokens": 3}\n')
    with FakeServer() as server:
        code, row, _, _ = bench(server, "--jsonl", path, "--output-tokens", 2, "--warm-up", 0)
        assert code == 0 and row["num_prompts"] == 2
        assert sorted((str(b["prompt"]), b["max_tokens"]) for b in server.bodies) == [("Hello", 2), ("[5, 6]", 3)]
        assert not any("ignore_eos" in body for body in server.bodies)
        path.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n{"prompt": "Hello"}\n')
        bench(server, "--jsonl", path, "--endpoint", "chat", "--ignore-eos", "--warm-up", 0, "--num-prompts", 1)
    *_, last = server.bodies
    assert len(server.bodies) == 3 and last["messages"] == [{"role": "user", "content": "Hi"}] and last["ignore_eos"]


@pytest.mark.parametrize(
    ("line", "endpoint", "message"),
    [
        ("", "chat", "contains no prompts"),
        ("[1]", "chat", "line 2: expected an object"),
        ("{}", "chat", "line 2: expected one of prompt, messages and prompt_ids, got none"),
        ('{"prompt": "a", "prompt_ids": [1]}', "chat", "got prompt and prompt_ids"),
        ('{"prompt": "a", "temperature": 1}', "chat", 'unknown field "temperature"'),
        ('{"prompt": ""}', "chat", "prompt must be a nonempty string"),
        ('{"prompt_ids": ["a"]}', "completions", "prompt_ids must be a list of token ids"),
        ('{"prompt": "a", "max_tokens": true}', "chat", "max_tokens must be a positive integer, got true"),
        ('{"prompt_ids": [1]}', "chat", "prompt_ids need --endpoint completions"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "completions", "messages need --endpoint chat"),
        ('{"messages": [{"role": "user"}]}', "chat", "message 1"),
        ('{"prompt": "a"}', "completions", "1 prompt, fewer than --num-prompts 2"),
    ],
)
def test_invalid_prompt_files_are_refused(bench, tmp_path, line, endpoint, message):
    (tmp_path / "prompts.jsonl").write_text(f"\n{line}\n")
    argv = ("--jsonl", tmp_path / "prompts.jsonl", "--endpoint", endpoint, "--num-prompts", 2)
    code, _, out, err = bench(NO_SERVER, *argv)
    assert (code, out) == (1, "") and message in err and err.count("\n") == 1


def test_an_api_key_is_sent_and_not_shown(bench, tmp_path, monkeypatch):
    (tmp_path / "key").write_text("from-a-file\n")
    monkeypatch.setenv("TRIDECODE_API_KEY", "from-the-environment")
    with FakeServer() as server:
        load = ("--num-prompts", 1, "--output-tokens", 1, "--warm-up", 0)
        _, _, first, _ = bench(server, *load)
        _, _, second, _ = bench(server, *load, "--api-key-file", tmp_path / "key")
    keys = [headers["authorization"] for _, _, headers, _ in server.got]
    assert keys == ["Bearer from-the-environment", "Bearer from-a-file"]
    assert "from-" not in first + second and str(tmp_path) not in second
    (tmp_path / "key").write_text("one\ntwo")
    _, _, _, err = bench(NO_SERVER, "--api-key-file", tmp_path / "key")
    assert err.endswith("key: expected one line of printable ASCII characters, the API key\n")


@pytest.mark.parametrize(("limit", "largest"), [(("--max-concurrency", 3, "--warm-up", 5), 3), (("--warm-up", 0), 12)])
def test_concurrency_is_limited(bench, limit, largest):
    with FakeServer(first=0.05) as server:
        bench(server, "--num-prompts", 12, "--output-tokens", 2, *limit)
    assert server.max_running == largest


def test_requests_are_sent_at_their_times(bench):
    rng = np.random.default_rng(0)
    times = serve.arrivals(20_000, 4.0, 1.0, rng)
    gaps = np.diff(times)
    assert times[0] == 0 and len(times) == 20_000
    # The gaps have an exponential distribution.
    assert gaps.mean() == pytest.approx(0.25, 0.03) and gaps.std() == pytest.approx(0.25, 0.03)
    even = np.diff(serve.arrivals(20_000, 4.0, 100.0, rng))
    assert even.mean() == pytest.approx(0.25, 0.03) and even.std() == pytest.approx(0.025, 0.05)
    assert serve.arrivals(3, options().request_rate, 1.0, rng).tolist() == [0, 0, 0]
    args = ("--num-prompts", 12, "--request-rate", 20, "--output-tokens", 1, "--seed", 3, "--warm-up", 0)
    with FakeServer() as server:
        _, row, _, _ = bench(server, *args)
    expected = serve.Load(options(*args), None, 3).times
    late = np.array([at - server.got[0][0] for at, *_ in server.got]) - expected
    assert row["request_rate"] == 20.0 and expected[-1] > 0.2
    assert -0.05 < late.min() and late.max() < 10


# failures


def test_failures_are_counted_with_their_reasons(bench):
    kinds = ["ok", "500", "cut", "garbage", "error", "no usage", "text", "ok"]
    with FakeServer(behave=lambda number: kinds[number % 8]) as server:
        code, row, _, err = bench(server, "--num-prompts", 16, "--output-tokens", 6, "--warm-up", 0)
    assert code == 0 and (row["completed"], row["failed"], row["total_output_tokens"]) == (4, 12, 24)
    lines = err.splitlines()
    assert len(lines) == 6 and all(line.startswith("tridecode: error: 2 requests failed: ") for line in lines)
    for reason in (
        "500: out of luck",
        "peer closed connection",
        'does not follow the API: {"choices": [}',
        "the engine died",
    ):
        assert reason in err
    assert "ended without usage" in err and "502: <html>Bad gateway</html>" in err


def test_bench_without_a_complete_answer_fails(bench, tmp_path, monkeypatch):
    for kind, message in (
        ("500", "the warm-up failed: 500: out of luck"),
        ("401", "401: no key; set TRIDECODE_API_KEY or --api-key-file"),
    ):
        with FakeServer(behave=lambda number, kind=kind: kind) as server:
            code, _, _, err = bench(server, "--num-prompts", 50)
        assert code == 1 and len(server.got) == 1 and err.count("\n") == 1 and err.endswith(f"{message}\n")
    with FakeServer(behave=lambda number: "500" if number else "ok") as server:
        code, _, out, err = bench(server, "--num-prompts", 3, "--output", tmp_path / "row.json")
        assert "other/v1/models lists no model; set --model" in bench(f"{server.url}/other")[3]
    assert (code, out) == (1, "") and not (tmp_path / "row.json").exists()
    assert err.splitlines() == [
        "tridecode: error: 3 requests failed: 500: out of luck",
        "tridecode: error: bench serve: all of 3 requests failed",
    ]
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "tridecode.cli.bench.client")
    monkeypatch.delattr("tridecode.cli.bench.client")
    line = 'tridecode: error: bench serve needs httpx; pip install "tridecode[serve]"\n'
    assert bench(NO_SERVER) == (1, None, "", line)


@pytest.mark.parametrize("model", [(), ("--model", "m"), ("--model", "m", "--warm-up", "0", "--num-prompts", "7")])
def test_a_server_that_is_not_running(bench, model):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # The port does not listen.
        code, _, out, err = bench(f"http://127.0.0.1:{unused.getsockname()[1]}", *model)
    assert (code, out) == (1, "") and "cannot connect" in err
    assert "7 requests failed" in err if len(model) > 2 else err.count("\n") == 1


def test_endless_answer_fails_after_the_timeout(bench):
    with FakeServer(behave=lambda number: "stuck" if number == 1 else "ok") as server:
        code, row, _, err = bench(server, "--num-prompts", 2, "--warm-up", 0, "--timeout", 1, "--output-tokens", 4)
    assert code == 0 and row["failed"] == 1 and "1 request failed: no end within 1 s (--timeout)" in err


def test_invalid_events_are_refused():
    for data in (
        b"", b"1", b"null", b"[]", b'{"choices": 1}', b'{"choices": [1]}', b'{"choices": [{"delta": 1}]}', b"\xff",
        b'{"usage": {"tokens": 1}}', b'{"usage": {"prompt_tokens": "x", "completion_tokens": 1}}', b'{"usage": 1}',
    ):  # fmt: skip
        with pytest.raises(Failed, match="does not follow the API"):
            Answer(0.0).event(data, 1.0)


def test_times_count_events_with_text():
    answer = Answer(1.0)
    answer.event(b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', 2.0)
    answer.event(b'{"choices": [{"delta": {"reasoning_content": "a"}}], "usage": null}', 3.0)
    answer.event(b'{"choices": [{"delta": {"content": "b"}}], "error": null}', 5.0)
    answer.event(b'{"choices": [{"delta": {}, "finish_reason": "stop"}]}', 5.5)
    answer.event(b'{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 6}}', 8.0)
    answer.finish()
    assert (answer.ttft, answer.gaps, answer.latency, answer.tpot) == (2.0, [2.0], 7.0, 1.0)
    answer = Answer(1.0)
    answer.event(b'{"choices": [{"text": "", "finish_reason": "stop"}]}', 2.0)
    answer.event(b'{"usage": {"prompt_tokens": 4, "completion_tokens": 1}}', 2.5)
    answer.finish()
    assert (answer.ttft, answer.latency, answer.tpot) == (1.5, 1.5, None), "an answer without text has wrong times"


# interrupts


def test_an_interrupt_shows_the_figures_so_far(tmp_path):
    load = ("--num-prompts", "3000", "--max-concurrency", "2", "--output-tokens", "2", "--output", tmp_path / "row")
    with FakeServer(first=0.02) as server:
        command = [sys.executable, "cli.py", "bench", "serve", "--url", server.url, *load]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            try:
                until(lambda: len(server.got) > 10, 60)
                child.send_signal(signal.SIGINT)
                out, err = child.communicate(timeout=60)
            finally:
                child.kill()
    assert "Traceback" not in err and not (tmp_path / "row").exists()
    assert child.returncode == 130 and "Serving Benchmark Result" in out and '"bench"' not in out
    assert "interrupted: partial figures, " in err and "of 3,000 requests had ended" in err
