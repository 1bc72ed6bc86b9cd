"""Model names: directories, and Hugging Face ids with a hub on the loopback interface, each in a separate process.

The tests check the requested files, the cache, the offline mode and the message of each failure. They do not download
published checkpoints.
"""

import errno
import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import pytest
from checkpoints import write_tiny, write_tokenizer

from tridecode.checkpoint.hub import BUNDLED, resolve_model
from tridecode.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).parents[2]
RESOLVE = """
import sys
from tridecode.errors import CheckpointError
from tridecode.checkpoint.hub import resolve_model
for name in sys.argv[1:]:
    try:
        print("path", resolve_model(name.removeprefix("small:"), weights=not name.startswith("small:")))
    except CheckpointError as error:
        print("error", error)
"""

FACTS = """
import logging, sys
logging.disable()
from tridecode import Engine
engine = Engine.load(sys.argv[1], device="cpu")
print(engine.config.tie_word_embeddings, engine.config.dtype, engine.name)
"""

LOAD = """
import sys
from tridecode import Engine
from tridecode.errors import TridecodeError
try:
    print("loaded", Engine.load(sys.argv[1], device="cpu", max_seq_len=int(sys.argv[2])).capacity)
except TridecodeError as error:
    print("error", error)
"""


class Hub(http.server.ThreadingHTTPServer):
    """A hub that answers requests for a repository's commit, its list of files and the files."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.revisions: dict[str, set[str]] = {}  # repo: revisions that exist besides main and the commit
        self.requested: list[str] = []  # revisions in queries about a repository
        # repo: (status, error code) of the answer to each request for a file.
        self.status: dict[str, tuple[int, str]] = {}
        # repo: the answer to all requests, as a network with a login page gives it.
        self.answers: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo, rest = "/".join(parts[2:4] if api else parts[:2]), parts[4:] if api else parts[2:]
        files = self.server.repos.get(repo)
        if repo in self.server.answers:
            self.answer(200, {"Content-Type": "text/html"}, self.server.answers[repo])
        elif files is None:
            self.answer(401, {"X-Error-Code": "RepoNotFound"}, b"Repository not found")
        elif api and rest[:1] == ["revision"] and not self.exists(repo, "/".join(rest[1:])):
            self.answer(404, {"X-Error-Code": "RevisionNotFound"}, b"Invalid rev id")
        elif api and rest[:1] == ["tree"]:
            entries = [{"type": "file", "path": n, "size": len(d), "oid": self.oid(d)} for n, d in files.items()]
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(entries).encode())
        elif api:
            siblings = [{"rfilename": name} for name in files]
            info = {"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "private": False, "siblings": siblings}
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(info | {"tags": []}).encode())
        elif repo in self.server.status:
            status, code = self.server.status[repo]
            self.answer(status, {"X-Error-Code": code}, b"no")
        elif (name := "/".join(rest[2:])) in files:
            if self.command == "GET":
                self.server.fetched.append(name)
            self.answer(200, {"ETag": f'"{self.oid(files[name])}"', "X-Repo-Commit": COMMIT}, files[name])
        else:
            self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b"no such file")

    def exists(self, repo: str, revision: str) -> bool:
        self.server.requested.append(revision)
        return revision in {"main", COMMIT} | self.server.revisions.get(repo, set())

    @staticmethod
    def oid(data: bytes) -> str:
        return hashlib.sha1(data).hexdigest()

    def answer(self, status: int, headers: dict, body: bytes):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    """A sharded repository, with additional files that published repositories have and loading does not need."""
    path = write_tiny(tmp_path_factory.mktemp("published"), "llama", shards=3)
    found = {file.name: file.read_bytes() for file in path.iterdir()}
    unneeded = (
        "README.md",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "pytorch_model.bin",
        "model-00009-of-00009.safetensors",
        "original/model.safetensors",
        "onnx/config.json",
    )
    return found | {name: b"unneeded" for name in unneeded}


def needed(files: dict[str, bytes]) -> set[str]:
    shards = set(json.loads(files["model.safetensors.index.json"])["weight_map"].values())
    small = {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"}
    return small | shards | {"tokenizer_config.json"}


def resolve(
    model: str, home: Path, endpoint: str, *more: str, offline: bool = False, code: str = RESOLVE, **environment: str
) -> str:
    """Return the output of resolve_model in a new process: a line "path ..." or "error ..." for each model.

    A model name with the prefix "small:" is resolved without weights.
    """
    # Prefixes of the variables that the test removes; some of them set proxies.
    ours = ("HF_", "HUGGING", "http_", "https_", "all_", "HTTP_", "HTTPS_", "ALL_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env = inherited | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *inherited.get("PYTHONPATH", "").split(os.pathsep)])
    env |= {"HF_HUB_OFFLINE": "1" if offline else "0"} | environment
    command = [sys.executable, "-c", code, model, *more]
    run = subprocess.run(command, env=env, cwd=home.parent, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "Traceback" not in run.stderr and "Warning" not in run.stderr, run.stderr
    assert run.stdout.count("\n") == (1 if code in (LOAD, FACTS) else 1 + len(more)), run.stdout
    return run.stdout.strip()


def outcomes(repos: list[str], home: Path, endpoint: str, offline: bool = False) -> dict[str, str]:
    """Map repositories to what one process prints for each of them."""
    return dict(zip(repos, resolve(repos[0], home, endpoint, *repos[1:], offline=offline).splitlines()))


def test_download_then_offline_then_no_network(hub, files, tmp_path):
    hub.repos["owner/tiny-model"] = files
    home = tmp_path / "home"
    found = resolve("owner/tiny-model", home, hub.url)
    path = home / "hub" / "models--owner--tiny-model" / "snapshots" / COMMIT
    assert found == f"path {path}"
    assert sorted(hub.fetched) == sorted(needed(files)), "the fetched files are not exactly the needed ones"
    assert {str(file.relative_to(path)) for file in path.rglob("*")} == needed(files)
    assert all((path / name).read_bytes() == files[name] for name in needed(files))

    hub.fetched.clear()
    assert resolve("owner/tiny-model", home, hub.url) == found
    assert resolve("owner/tiny-model", home, hub.url, offline=True) == found
    assert hub.fetched == [], "a cached file was fetched again"
    assert resolve("owner/tiny-model", home, "http://127.0.0.1:9") == found


def test_revision_and_address(hub, files, tmp_path):
    hub.repos["owner/tiny"], hub.revisions["owner/tiny"] = files, {"v1.0", "refs/pr/3"}
    home, page = tmp_path / "home", "https://huggingface.co/owner/tiny"
    path = home / "hub" / "models--owner--tiny" / "snapshots" / COMMIT
    names = {
        "owner/tiny@v1.0": "v1.0",
        "owner/tiny@refs/pr/3": "refs/pr/3",
        f"owner/tiny@{COMMIT}": None,
        f"{page}/tree/v1.0": "v1.0",
        page: "main",
        f"{hub.url}/owner/tiny": "main",
        str(path.parents[1]): None,
    }
    assert set(outcomes([*names], home, hub.url).values()) == {f"path {path}"}
    assert hub.requested == [revision for revision in names.values() if revision]
    assert resolve("owner/tiny@v1.0", home, hub.url, offline=True) == f"path {path}"
    outcome = resolve("owner/tiny@v2", home, hub.url)
    assert outcome.startswith("error owner/tiny@v2: the repository has no branch, tag or commit v2; see ")
    assert "offline mode is on" in resolve("owner/tiny@v3", home, hub.url, offline=True)


def test_hand_made_cache(files, tmp_path):
    repo = tmp_path / "home" / "hub" / "models--owner--name"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for name in needed(files):
        (snapshot / name).write_bytes(files[name])
    assert resolve("owner/name", tmp_path / "home", "http://127.0.0.1:9", offline=True) == f"path {snapshot}"
    (shard,) = snapshot.glob("model-00001-of-*")
    shard.unlink()
    outcome = resolve("owner/name", tmp_path / "home", "http://127.0.0.1:9", offline=True)
    assert outcome.startswith("error owner/name: ") and "HF_HUB_OFFLINE=0" in outcome


def test_one_file_without_index(hub, files, tmp_path):
    single = {"model.safetensors": b"weights", "config.json": files["config.json"]}
    hub.repos["owner/single"] = single | {"tokenizer.json": files["tokenizer.json"], "pytorch_model.bin": b"no"}
    assert resolve("owner/single", tmp_path / "home", hub.url).startswith("path ")
    assert sorted(hub.fetched) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_weights_are_not_downloaded_unless_requested(hub, files, tmp_path):
    hub.repos["owner/small"] = files
    assert resolve("small:owner/small", tmp_path / "home", hub.url).startswith("path ")
    assert set(hub.fetched) == {name for name in needed(files) if not name.endswith(".safetensors")}


def test_weights_are_downloaded_only_for_a_plan_that_fits(hub, files, tmp_path):
    hub.repos["owner/small"] = files
    outcome = resolve("owner/small", tmp_path / "home", hub.url, "1000000", code=LOAD)
    assert outcome.startswith("error max_seq_len must be an integer from 1 to the model's limit of ")
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]
    assert resolve("owner/small", tmp_path / "home", hub.url, "64", code=LOAD) == "loaded 64"
    assert set(hub.fetched) == needed(files)


def test_plan_follows_the_downloaded_weights(hub, tmp_path):
    """Only the files show that the LM head is not tied, and the dtype that config.json lacks."""
    from safetensors.torch import load_file, save_file

    path = write_tiny(tmp_path / "published", "qwen3-tied")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    del config["dtype"]
    (path / "config.json").write_text(json.dumps(config))
    hub.repos["owner/untied"] = {file.name: file.read_bytes() for file in path.iterdir()}
    assert resolve("owner/untied", tmp_path / "home", hub.url, code=FACTS) == "False float32 owner/untied"


GGUFS = ("m-Q4_0.gguf", "m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "a-F16.gguf")
GGUFS += ("BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf", "mmproj-m-F16.gguf", "b-F16.gguf")
GGUFS += ("m[1]-Q5_K_M.gguf",)


def test_gguf_files(hub, tmp_path):
    hub.repos["owner/m-gguf"] = {name: b"GGUF" + name.encode() for name in GGUFS}
    home = tmp_path / "home"
    path = home / "hub" / "models--owner--m-gguf" / "snapshots" / COMMIT
    expected = {
        "Q4_0": "m-Q4_0.gguf",
        "q4_0": "m-Q4_0.gguf",
        "m-Q4_K_M.gguf": "m-Q4_K_M.gguf",
        "Q5_K_M": "m[1]-Q5_K_M.gguf",
        "Q8_0": "m-Q8_0-00001-of-00002.gguf",
        "BF16": "BF16/m-BF16-00001-of-00002.gguf",
        "BF16/m-BF16-00002-of-00002.gguf": "BF16/m-BF16-00001-of-00002.gguf",
    }
    paths = {f"owner/m-gguf:{tag}": f"path {path / name}" for tag, name in expected.items()}
    for repo, name in zip(paths, expected.values()):
        hub.fetched.clear()
        assert resolve(repo, home, hub.url) == paths[repo]
        assert {Path(each).name[:5] for each in hub.fetched} <= {Path(name).name[:5]}
    hub.fetched.clear()
    absent, several, offline = "owner/m-gguf:Q4", "owner/m-gguf:F16", "owner/m-gguf:Q6_K"
    refused = outcomes([absent, several], home, hub.url)
    assert "has no such GGUF file; see " in refused[absent] and "a-F16.gguf, b-F16.gguf" in refused[several]
    assert hub.fetched == [], "files of an ambiguous name were downloaded"
    found = outcomes([*paths, offline], home, hub.url, offline=True)
    assert "lacks it; run once with HF_HUB_OFFLINE=0" in found.pop(offline)
    assert found == paths
    assert resolve("owner/m-gguf:Q8_0", home, "http://127.0.0.1:9") == paths["owner/m-gguf:Q8_0"]


def test_directory_with_a_gguf_file(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    (tmp_path / "mmproj-m.gguf").write_bytes(b"GGUF")
    assert resolve_model(tmp_path) == resolve_model(str(file)) == file
    (tmp_path / "n.gguf").write_bytes(b"GGUF")
    assert resolve_model(tmp_path) == tmp_path  # Its message names the files.
    blob = tmp_path / "sha256-0123"  # A blob of ollama has no extension.
    blob.write_bytes(b"GGUF")
    assert resolve_model(blob) == blob


ADAPTER = b'{"base_model_name_or_path": "owner/base"}'
REFUSED = {
    # name: (changes to the files, None for a missing file; words that the message contains)
    "unsupported architecture": (
        {"config.json": b'{"architectures": ["GemmaForCausalLM"]}'},
        ["config.json: architectures must be", "GemmaForCausalLM"],
    ),
    "no config": ({"config.json": None}, ["the repository has no config.json"]),
    "no tokenizer": ({"tokenizer.json": None}, ["the repository has no tokenizer.json"]),
    "no safetensors": (
        {"model.safetensors.index.json": None},
        ["the repository has no model.safetensors", "save_pretrained"],
    ),
    "adapter": (
        {"config.json": None, "adapter_config.json": ADAPTER},
        ["no config.json", "LoRA adapter of 'owner/base'"],
    ),
    "adapter with a config": (
        {"model.safetensors.index.json": None, "adapter_config.json": ADAPTER},
        ["no model.safetensors", "LoRA adapter of 'owner/base'", "not a whole model"],
    ),
    "Model-GGUF": ({"config.json": None}, ["no config.json", "give one of its GGUF files, like owner/"]),
    "pointer": (
        {"config.json": b"version https://git-lfs.github.com/spec/v1\n"},
        ["config.json: is a git-lfs pointer"],
    ),
    "shard outside": (
        {"model.safetensors.index.json": b'{"weight_map": {"model.norm.weight": "../../x.safetensors"}}'},
        ["model.norm.weight", "'../../x.safetensors'"],
    ),
}


def test_refused_before_the_weights(hub, files, tmp_path):
    for case, (changes, _) in REFUSED.items():
        kept = {name: data for name, data in (files | changes).items() if data is not None}
        hub.repos[f"owner/{case.replace(' ', '-')}"] = kept
    for (_, words), outcome in zip(REFUSED.values(), outcomes([*hub.repos], tmp_path / "home", hub.url).values()):
        assert outcome.startswith("error ") and all(word in outcome for word in words), outcome
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]


FAILURES = {
    # id: (status and error code of the answers, words that the message contains)
    "owner/nothing": (None, ["neither a directory", "check the spelling", "hf auth login"]),
    "owner/gated": ((403, "GatedRepo"), ["accept its terms at", "/owner/gated", "HF_TOKEN"]),
    "owner/forbidden": ((403, ""), ["status 403", "hf auth login"]),
    "owner/failing": ((501, ""), ["status 501", "try again later"]),
}


def test_failures(hub, files, tmp_path):
    hub.repos |= dict.fromkeys(["owner/gated", "owner/forbidden", "owner/failing"], files)
    hub.status |= {repo: status for repo, (status, _) in FAILURES.items() if status}
    for repo, outcome in outcomes([*FAILURES], tmp_path / "home", hub.url).items():
        assert outcome.startswith(f"error {repo}: ") and all(word in outcome for word in FAILURES[repo][1]), outcome


@pytest.mark.parametrize(
    "offline, words",
    [
        (False, ["no network", "cannot be reached", "local directory"]),
        (True, ["offline mode is on", "in the cache", "HF_HUB_OFFLINE=0"]),
    ],
)
def test_hub_without_a_network(offline, words, tmp_path):
    outcome = resolve("owner/name", tmp_path / "home", "http://127.0.0.1:9", offline=offline)
    assert outcome.startswith("error owner/name: ") and all(word in outcome for word in words), outcome


def test_invalid_hub_answers_are_refused(hub, tmp_path):
    answers = b"<html>Log in</html>", b"[]", b"{}", b'{"id": "owner/name", "sha": 5}', b""
    hub.answers = {f"owner/name-{i}": answer for i, answer in enumerate(answers)}
    for repo, outcome in outcomes([*hub.answers], tmp_path / "home", hub.url).items():
        assert outcome.startswith(f"error {repo}: {hub.url} does not answer as a hub does (") and len(outcome) < 500
        assert outcome.endswith("whether this network wants you to log in first, or give a local directory")


def test_silent_hub_times_out(files, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # The server accepts connections and never answers.
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        outcome = resolve("owner/name", tmp_path / "home", url, HF_HUB_ETAG_TIMEOUT="1")
        assert time.monotonic() - began < 30
    assert outcome.startswith(f"error owner/name: {url} did not answer in time, and the model is not in the cache; try")
    assert "HF_HUB_ETAG_TIMEOUT" in outcome


def test_request_timeouts_are_restored_after_a_download(monkeypatch):
    """The session belongs to the whole process; its other requests may take longer."""
    import huggingface_hub

    session = huggingface_hub.get_session()
    before, inside = session.event_hooks, []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: inside.append(session.event_hooks))
    with pytest.raises(CheckpointError):
        resolve_model("owner/name")
    assert len(inside[0]["request"]) == len(before["request"]) + 1 and session.event_hooks == before


def test_full_disk(monkeypatch):
    def snapshot_download(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=r"^owner/name: the download failed \(No space left on device\); check "):
        resolve_model("owner/name")


def test_directory_is_returned_unchanged(tmp_path):
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


def test_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_model("~/model") == tmp_path / "model"


NO_NAMES = ["nothing", "./nothing", "/nothing/here", "a/b/c", "../x", "a/..", "owner/na me", "-x/y"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_neither_directory_nor_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory, and not a Hugging Face id") as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", " "])
def test_empty_name(name):
    with pytest.raises(CheckpointError, match="name is empty; give a directory"):
        resolve_model(name)


def test_bundled_is_a_model_name(tmp_path, monkeypatch):
    """A directory of that name has precedence."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundled").write_text("a file is no model")
    assert resolve_model(None) == resolve_model("bundled") == BUNDLED
    (tmp_path / "bundled").unlink()
    (tmp_path / "bundled").mkdir()
    assert resolve_model("bundled") == Path("bundled") and resolve_model(None) == BUNDLED


def test_file_instead_of_directory(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="is a file; give the directory"):
        resolve_model(tmp_path / "tokenizer.json")
