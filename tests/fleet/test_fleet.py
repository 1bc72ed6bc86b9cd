"""Two replicas of the bundled model on Ray Serve, each on its own node of a cluster on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from servers import ANSWER, CHAT, until

pytest.importorskip("ray", reason="ray is not installed: pip install 'tridecode[fleet]'")

SECONDS = 240  # Only a fleet that hangs reaches this limit.
QUESTIONS = [f"What is {i} + {i + 7}?" for i in range(10, 22)]
MODEL = {"model": "bundled", "gpus": 0, "options": {"device": "cpu", "slots": 4, "max_queue": 2}}
# Workers import the package of this checkout.
PATH = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
NODE = {"num_cpus": 1, "object_store_memory": 100_000_000}


class Fleet:
    """A running fleet, whose replicas have one node each."""

    def __init__(self, cluster):
        self.cluster, self.port = cluster, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)

    def deploy(self, **model) -> None:
        """Start the fleet, or update it."""
        from ray import serve

        from tridecode.fleet import build

        models = [MODEL | {"replicas": 2} | model]
        serve.run(build({"models": models, "port": self.port, "gateways": 2}), name="fleet", route_prefix="/")

    def replicas(self) -> int:
        """Return the number of replicas that the gateway knows."""
        return httpx.get(f"{self.url}/health", timeout=SECONDS).json()["replicas"]["bundled"]

    def ready(self) -> None:
        """Wait until both replicas are ready."""
        until(lambda: self.replicas() == len(processes()) == 2, SECONDS)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over the replicas."""
        lines = httpx.get(f"{self.url}/metrics", timeout=SECONDS).text.splitlines()
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

    def outcome(self, question: str) -> str:
        """Return the answer to a question, or an error."""
        try:
            return self.ask([{"role": "user", "content": question}])[0]
        except openai.APIError as error:
            return f"error: {error.message}"

    @contextmanager
    def load(self):
        """Send requests from two threads, and yield the list of (question, outcome) pairs so far."""
        outcomes: list[tuple[str, str]] = []
        stopped = False

        def run(first: int) -> None:
            number = first
            while not stopped:
                question = QUESTIONS[number % len(QUESTIONS)]
                outcomes.append((question, self.outcome(question)))
                number += 1

        with ThreadPoolExecutor(2) as pool:
            threads = [pool.submit(run, first) for first in (0, 6)]
            try:
                until(lambda: len(outcomes) > 4, SECONDS)
                yield outcomes
                before = len(outcomes)
                until(lambda: len(outcomes) > before + 4, SECONDS)
            finally:
                stopped = True
            for thread in threads:
                thread.result(SECONDS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def processes() -> list[int]:
    """Return the ids of the replicas' processes, which the raylets of this process have started."""
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
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    try:
        cluster.add_node(**NODE)
        environment = {"env_vars": {"PYTHONPATH": PATH}}
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)
        serve.start(proxy_location="Disabled")
        running = Fleet(cluster)
        running.deploy()
        running.ready()
        yield running
        serve.delete("fleet")
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def expected(fleet) -> dict[str, str]:
    """The answers of one engine."""
    from tridecode import Engine, SamplingParams

    with Engine.load(device="cpu", slots=4) as engine:
        params = SamplingParams(temperature=0, max_tokens=16)
        return {each: engine.generate([{"role": "user", "content": each}], params).text for each in QUESTIONS}


def test_conversations_return_to_their_replica(fleet):
    def converse(question: str) -> list[int]:
        messages, reused = [{"role": "user", "content": question}], []
        for _ in range(3):
            text, tokens = fleet.ask(messages)
            reused.append(tokens)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
        return reused

    # A gateway may count a request for a moment after its end. Two conversations do not fill four slots even then.
    with ThreadPoolExecutor(2) as pool:
        reused = list(pool.map(converse, QUESTIONS))
    assert [each for each in reused if not each[0] < each[1] < each[2]] == []


def test_both_replicas_answer_alike(fleet):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: fleet.ask(CHAT, extra_body={"cache_salt": f"{i}"})[0], range(16)))
    assert set(answers) == {ANSWER}


def test_a_cancelled_stream_frees_its_slot(fleet):
    body = {"model": "bundled", "prompt": "Once upon a time", "ignore_eos": True, "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=SECONDS) as stream:
        next(stream.iter_lines())
        assert fleet.metric("num_requests_running") == 1
    until(lambda: fleet.metric("num_requests_running") == 0, SECONDS)


def test_more_requests_than_places_are_refused_with_429(fleet):
    body = {"model": "bundled", "prompt": "Once upon a time", "ignore_eos": True, "max_tokens": 100}
    with ThreadPoolExecutor(24) as pool:
        send = partial(httpx.post, f"{fleet.url}/v1/completions", timeout=SECONDS)
        answers = list(pool.map(lambda _: send(json=body), range(24)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert [answer.status_code for answer in answers if answer not in refused] == [200] * (24 - len(refused))
    assert 0 < len(refused) <= 12  # The replicas have twelve places.


def test_serve_run_uses_the_builder(fleet, tmp_path):
    from ray import serve

    path, port = tmp_path / "fleet.yaml", free_port()
    path.write_text(json.dumps({"models": [MODEL | {"cpus": 0, "name": "other"}], "port": port}))
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking", "--address", fleet.cluster.address]
    command += ["--name", "second", "--route-prefix", "/second", "tridecode.fleet:build", f"config={path}"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": PATH}, capture_output=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    url, body = f"http://127.0.0.1:{port}/v1/completions", {"model": "other", "prompt": "Hello", "max_tokens": 1}
    assert httpx.post(url, json=body, timeout=SECONDS).status_code == 200
    serve.delete("second")


def test_a_rolling_update_fails_no_request(fleet, expected, tmp_path):
    path, before = tmp_path / "fleet.yaml", set(processes())
    path.write_text(json.dumps({"models": [MODEL | {"replicas": 2}], "port": fleet.port, "gateways": 2}))
    command = [sys.executable, "-m", "tridecode", "fleet", path, "--update"]  # It finds the cluster on this machine.
    with fleet.load() as outcomes:
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": PATH}, capture_output=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        until(lambda: not before & set(processes()), SECONDS)
        fleet.ready()
    assert [(question, text) for question, text in outcomes if text != expected[question]] == []


def test_a_killed_replica_loses_no_request_without_an_answer(fleet, expected):
    fleet.ready()
    with fleet.load() as outcomes:
        killed = processes()[0]
        os.kill(killed, signal.SIGKILL)
        until(lambda: killed not in processes(), SECONDS)
        fleet.ready()
    wrong = [text for question, text in outcomes if text != expected[question]]
    # Only streams that had begun end with an error.
    assert len(wrong) <= 2 and all("the replica failed" in text for text in wrong)


def test_a_lost_node_loses_no_request_without_an_answer(fleet, expected):
    fleet.ready()
    with fleet.load() as outcomes:
        lost = next(node for node in fleet.cluster.list_all_nodes() if node is not fleet.cluster.head_node)
        fleet.cluster.remove_node(lost, allow_graceful=False)
        until(lambda: fleet.replicas() == 1, SECONDS)
        fleet.cluster.add_node(**NODE)
        fleet.ready()
    wrong = [text for question, text in outcomes if text != expected[question]]
    assert len(wrong) <= 2 and all("the replica failed" in text for text in wrong)
