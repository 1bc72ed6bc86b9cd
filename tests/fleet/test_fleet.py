"""Two replicas of the bundled model on Ray Serve."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from servers import ANSWER, CHAT, GREEDY, until

pytest.importorskip("ray", reason="ray is not installed: pip install 'tridecode[fleet]'")

QUESTIONS = [f"What is {i} + {i + 7}?" for i in range(10, 22)]
MODEL = {"model": "bundled", "gpus": 0, "cpus": 1, "replicas": 2, "options": {"device": "cpu", "slots": 4}}


class Fleet:
    """A running fleet."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def replicas(self) -> int:
        return httpx.get(f"{self.url}/health", timeout=30).json()["replicas"]["bundled"]

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"tridecode:{name}{{"))

    def ask(self, messages: list[dict], **more) -> tuple[str, int]:
        """Return the answer, which arrives as a stream, and the number of reused tokens of the prompt."""
        options = {"model": "bundled", "messages": messages, "temperature": 0, "max_tokens": 16} | more
        stream = self.client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
        text, reused = "", 0
        for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            if chunk.usage is not None:
                reused = chunk.usage.prompt_tokens_details.cached_tokens
        return text, reused


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def deploy(port: int, **model) -> None:
    from ray import serve

    from tridecode.fleet import build

    values = {"models": [MODEL | model], "port": port, "grace": 20}
    serve.run(build(values), name="fleet", route_prefix="/")


def processes() -> list[int]:
    """Return the ids of the replicas' processes, which the raylet of this process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes()
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            above = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:  # The process has ended.
            continue
        if name.startswith(b"ray::ServeReplica:fleet:bundled") and int(above) == os.getpid():
            found.append(int(folder.name))
    return found


@pytest.fixture(scope="module")
def fleet():
    import ray
    from ray import serve

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Workers import the package of this checkout.
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=100_000_000,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    try:
        serve.start(proxy_location="Disabled")
        port = free_port()
        deploy(port)
        running = Fleet(port)
        running.port = port
        until(lambda: running.replicas() == 2, 60)
        yield running
        serve.delete("fleet")
    finally:
        ray.shutdown()


def test_conversations_return_to_their_replica(fleet):
    def converse(question: str) -> list[int]:
        messages, reused = [{"role": "user", "content": question}], []
        for _ in range(3):
            text, tokens = fleet.ask(messages)
            reused.append(tokens)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
        return reused

    before = fleet.metric("prompt_tokens_total")
    with ThreadPoolExecutor(4) as pool:
        reused = list(pool.map(converse, QUESTIONS))
    assert all(second > first and third > second for first, second, third in reused)
    assert fleet.metric("prompt_tokens_total") > before


def test_both_replicas_answer_alike(fleet):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: fleet.ask(CHAT, extra_body={"cache_salt": f"{i}"})[0], range(16)))
    assert set(answers) == {ANSWER}


def test_a_response_has_the_request_id_of_the_gateway(fleet):
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=GREEDY, timeout=60)
    assert answer.status_code == 200 and answer.headers["x-request-id"].startswith("req_")


def test_a_cancelled_stream_frees_its_slot(fleet):
    body = {"model": "bundled", "prompt": "Once upon a time", "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
        assert fleet.metric("num_requests_running") == 1
    until(lambda: fleet.metric("num_requests_running") == 0)


def test_a_killed_replica_loses_no_request_without_an_answer(fleet):
    def ask(question: str) -> str:
        try:
            return fleet.ask([{"role": "user", "content": question}], max_tokens=64)[0]
        except (openai.APIError, openai.APIStatusError) as error:
            return f"error: {error}"

    assert len(processes()) == 2
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, question) for question in QUESTIONS * 3]
        time.sleep(0.5)
        os.kill(processes()[0], signal.SIGKILL)
        texts = [answer.result(60) for answer in answers]
    errors = [text for text in texts if text.startswith("error: ")]
    assert all(texts) and len(errors) <= 4
    assert all("the replica failed" in error for error in errors)
    until(lambda: len(processes()) == 2 and fleet.replicas() == 2, 60)


def test_a_rolling_update_fails_no_request(fleet):
    stopped, failed, count = [], [], 0

    def ask_until_stopped(number: int) -> int:
        count = 0
        while not stopped:
            try:
                assert fleet.ask([{"role": "user", "content": f"{number} {count}"}])[0]
            except Exception as error:
                failed.append(error)
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        counts = [pool.submit(ask_until_stopped, number) for number in range(2)]
        before = set(processes())
        try:
            deploy(fleet.port, options={"device": "cpu", "slots": 3})
            until(lambda: not before & set(processes()), 60)
        finally:
            stopped.append(True)
        count = sum(each.result(60) for each in counts)
    assert [str(error) for error in failed] == [] and count > 4
    until(lambda: fleet.metric("slots") == 6)
