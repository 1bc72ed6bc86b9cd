"""Run the examples of the documents, and write their outputs into the pages: python docs/record_pages.py [PAGE...].

A comment above a code block marks an example: `<!-- recorded: cpu -->`. There are two kinds of blocks:

- `console`: A line that begins with `$ ` is a command of bash. Lines below it that begin with `> ` continue the
  command. The other lines are its output, stdout and stderr together. A server runs until the end of the page.
- `python`: All examples of a page run as one script. The next block, of kind `text`, contains the output.

Examples marked `gpu` run only on a machine with a GPU, which does not run the others. Their mark then names the GPU and
the date. An output is not replaced if it differs only in times and other values that change with every run.

The examples of a page share a new folder, with links to the files of the checkout and an empty home directory. Each
block begins without a configuration file. Servers listen on a free port in place of 8000. A model whose name is a
preset, such as Qwen/Qwen3-4B, is a checkpoint without contents there: its tensors are a hole in the file. `info` needs
no more. Writing it requires transformers.
"""

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^(?:<!-- recorded: ([^>]*) -->\n)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\$ (.*\n(?:>(?: .*)?\n)*)", re.MULTILINE)
SERVER = re.compile(r"(python cli\.py|tridecode) serve\b")
PORT = re.compile(r"(127\.0\.0\.1:|--port )8000\b")
MODEL = re.compile(r"--model (\S+)")
CHANGING = re.compile(
    r"first (?:token )?(?=\d)|(?<=\d)(?: of | / |/)(?=\d)|"  # Words that a statistics line of over 80 columns shortens.
    r"[0-9a-f]{12,}|\d+(?:\.\d+)+(?:e-\d+)?|[\d,]+(?= (?:tok/s|[GM]iB))|\d{8}-\d{6}-[0-9a-f]{4}"
    r'|(?:[A-Z][a-z]+ +\d+ )?\d\d:\d\d(?::\d\d)?|(?<="created":)\d+|(?<=seed )\d+|(?<="seed": )\d+'
)


def shape(output: str) -> str:
    """Return an output without the values that change with every run."""
    return CHANGING.sub("#", output)


class Folder:
    """The folder in which the examples of a page run."""

    def __init__(self, path: Path):
        self.path, self.stack = path, ExitStack()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = str(free.getsockname()[1])  # Replaces 8000, which may be in use.
        for each in ROOT.iterdir():
            if each.name[0] != ".":
                (path / each.name).symlink_to(each)
        bin, home = path / ".bin", path / ".home"
        for name, arguments in (("python", ""), ("tridecode", f"'{ROOT}/cli.py' ")):
            bin.mkdir(exist_ok=True)
            (bin / name).write_text(f"#!/bin/sh\nexec '{sys.executable}' {arguments}\"$@\"\n")
            (bin / name).chmod(0o755)
        home.mkdir()
        hidden = ("TRIDECODE_", "TRITON_INTERPRET", "XDG_", "COLUMNS", "LINES")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        self.environment |= {
            "HOME": str(home),
            "PATH": f"{bin}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        }

    def run(self, *command: str) -> str:
        """Return what a command prints. Raises RuntimeError if it fails."""
        *program, text = command
        done = subprocess.run(
            [*program, self.with_free_port(text)], cwd=self.path, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command[-1]}\nexit code {done.returncode}: {done.stdout}")
        return self.cleaned(done.stdout)

    def serve(self, command: str) -> str:
        """Start a server, and return what it prints until it is ready."""
        log = self.path / ".server.log"
        with log.open("w") as file:
            process = self.stack.enter_context(
                subprocess.Popen(
                    ["bash", "-c", f"exec {self.with_free_port(command)}"],
                    cwd=self.path,
                    env=self.environment | {"TRIDECODE_PORT": self.port},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            )
        self.stack.callback(process.terminate)
        for _ in range(1200):
            if "Ctrl-C stops" in (printed := log.read_text("utf-8")):
                return self.cleaned(printed)
            if process.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"{command}\nthe server did not become ready: {printed}")

    def with_free_port(self, text: str) -> str:
        return PORT.sub(rf"\g<1>{self.port}", text)

    def cleaned(self, printed: str) -> str:
        for here, shown in ((self.environment["HOME"], "~"), (str(self.path), "."), (f":{self.port}", ":8000")):
            printed = printed.replace(here, shown)
        return printed if not printed or printed.endswith("\n") else printed + "\n"

    def console(self, block: str) -> str:
        """Run the commands of a block, and return the block with their outputs."""
        shutil.rmtree(f"{self.environment['HOME']}/.config", ignore_errors=True)
        texts = []
        for typed in COMMAND.findall(block):
            command = re.sub(r"(?m)^> ?", "", typed).rstrip("\n")
            for model in MODEL.findall(command):
                write_headers(self.path / model)
            printed = self.serve(command) if SERVER.match(command) else self.run("bash", "-c", command)
            texts.append(f"$ {typed}{printed}")
        return "".join(texts)

    def python(self, blocks: list[str]) -> list[str]:
        """Run blocks as one script, and return the output of each."""
        script = "".join(f"{block}\nprint(end='\\0', flush=True)\n" for block in blocks)
        return [self.cleaned(each) for each in self.run("python", "-c", script).split("\0")] if blocks else []


@contextmanager
def new_folder():
    """Make a folder for the examples of a page. Its servers end with it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path, (folder := Folder(Path(path))).stack:
        yield folder


def write_headers(folder: Path) -> None:
    """Write a checkpoint without contents, if the name of the folder is a preset."""
    from tridecode.checkpoint.hub import BUNDLED
    from tridecode.models.presets import PRESETS

    if folder.exists() or folder.name.lower() not in PRESETS:
        return
    import torch

    from benchmarks.peers import peer_model

    model = peer_model(PRESETS[folder.name.lower()], "meta", torch.bfloat16)
    folder.mkdir(parents=True)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUNDLED / name, folder)
    tensors, end = {}, 0
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        begin, end = end, end + 2 * tensor.numel()
        tensors[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(tensors).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def gpu_name() -> str:
    """Return the name of the GPU of this machine, or an empty text."""
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0]


def recorded(page: str) -> str:
    """Return the text of a page with new outputs of the examples that this machine can run."""
    gpu = gpu_name()
    blocks = [match for match in BLOCK.finditer(page)]
    here = [match for match in blocks if match[1] and match[1].split(",")[0] == ("gpu" if gpu else "cpu")]
    mark = f"gpu, {gpu}, {date.today()}" if gpu else "cpu"
    changes: list[tuple[re.Match, str]] = []
    with new_folder() as folder:
        for match in here:
            if match[2] == "console":
                changes.append((match, folder.console(match[3])))
        scripts = [match for match in here if match[2] == "python"]
        for match, printed in zip(scripts, folder.python([match[3] for match in scripts])):
            output = blocks[blocks.index(match) + 1]
            if output[2] != "text" or output[1]:
                raise RuntimeError(f"no block of kind text follows this example:\n{match[0]}")
            changes.append((output, printed))
    for match, new in sorted(changes, key=lambda change: -change[0].start()):
        if shape(new) != shape(match[3]):
            head = f"<!-- recorded: {mark} -->\n" if match[1] else ""
            page = page[: match.start()] + f"{head}```{match[2]}\n{new}```" + page[match.end() :]
    return page


def main() -> None:
    pages = [Path(name) for name in sys.argv[1:]] or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    sys.path.insert(0, str(ROOT))
    for path in pages:
        page = path.read_text(encoding="utf-8")
        if (new := recorded(page)) != page:
            path.write_text(new, encoding="utf-8")
        marks = [match[1] for match in BLOCK.finditer(new) if match[1]]
        print(f"{path}: {len(marks)} examples, {'changed' if new != page else 'unchanged'}", flush=True)


if __name__ == "__main__":
    main()
