"""Run clients of other projects against a server with the bundled model on the CPU, and print a table.

Usage, in a checkout: python tests/clients/run.py DIRECTORY

The first run needs the network, and installs the clients into the directory. node, npm and java must be installed.
docs/serving.md explains the cases. The clients of OpenAI and Anthropic are tests (tests/server/test_clients.py).
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CASES = {  # case: pattern of a right answer
    "plain": r" 42\b", "stream": r" 42\b|Paris|London", "system": "Otto", "turns": "Ada", "call": "Paris|London",
    "schema": "Paris|London", "error": "does not exist", "cancel": "^cancelled$", "logprobs": "^ranked$",
}  # fmt: skip
PYTHON = [
    "litellm",
    "langchain-openai",
    "langchain-anthropic",
    "pydantic-ai-slim[openai,anthropic]",
    "anthropic<2",  # pydantic-ai 2.38 does not work with anthropic 2.14.
    "instructor",
    "llm",
]
LM_EVAL = ["lm-eval[api]", "transformers"]
NPM = ["ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic", "openai", "@anthropic-ai/sdk", "zod"]


def install(directory: Path) -> None:
    """Install the clients that are not in the directory."""
    for name, packages in {"py": PYTHON, "lm": LM_EVAL}.items():
        if not (directory / name).exists():
            subprocess.run([sys.executable, "-m", "venv", directory / name], check=True)
            subprocess.run([directory / name / "bin/pip", "install", "-q", *packages], check=True)
    if not (directory / "js").exists():
        (directory / "js").mkdir()
        subprocess.run(["npm", "install", "--prefix", directory / "js", *NPM], check=True)


def wait(url: str) -> None:
    """Wait until the server is ready."""
    for _ in range(300):
        try:
            return urllib.request.urlopen(f"{url}/health").close()
        except OSError:
            time.sleep(0.2)
    raise TimeoutError("the server did not start; run `python cli.py serve --device cpu`")


def main(directory: Path) -> int:
    directory.mkdir(exist_ok=True)
    install(directory)
    scripts = {  # script: (command, working directory)
        "python_clients.py": ([directory / "py/bin/python"], directory),
        "js_clients.mjs": (["node"], directory / "js"),
        "JavaClient.java": (["java"], directory),
        "lm_eval_client.py": ([directory / "lm/bin/python"], ROOT),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, rows = f"http://127.0.0.1:{port}", {}
    serve = [sys.executable, ROOT / "cli.py", "serve", "--device", "cpu", "--port", str(port)]
    with subprocess.Popen(serve, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)}) as server:
        try:
            wait(url)
            for script, (command, place) in scripts.items():
                done = subprocess.run([*command, HERE / script, url], cwd=place, stdout=subprocess.PIPE, text=True)
                for client, version, case, got in map(json.loads, done.stdout.splitlines()):
                    result = "yes" if re.search(CASES[case], got) else f"no: {got[:200]}"
                    rows.setdefault((client, version), {})[case] = result
                if done.returncode:
                    rows[script, "-"] = {"plain": f"no: exit code {done.returncode}"}
        finally:
            server.terminate()
    print("| client | version |", " | ".join(CASES), "|\n| --- | --- |", " --- |" * len(CASES))
    for (client, version), row in rows.items():
        print(f"| {client} | {version} |", " | ".join(row.get(case, "") for case in CASES), "|")
    return int(any(result != "yes" for row in rows.values() for result in row.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
