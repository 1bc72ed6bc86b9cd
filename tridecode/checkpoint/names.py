"""Names of models: "bundled", ids on the Hugging Face hub, with or without a revision, and addresses of its pages."""

import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from ..errors import CheckpointError

BUNDLED = Path(__file__).parents[1] / "bundled"  # Directory of the model in the package, which is called "bundled".
GGUF = "GGUF files are not supported yet; give the safetensors checkpoint that the file was made from"
HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(\w[\w./-]*))?", re.ASCII)
_CACHED = re.compile(r"models--([^/]+?)--([^/]+)")  # Name of a repository's directory in the cache.
_REVISIONED = ("tree", "blob", "resolve", "raw", "commit", "commits")  # Pages whose address contains a revision.


class Repository(NamedTuple):
    """A model on the Hugging Face hub, at a branch, tag or commit. None is the main branch."""

    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id


def repository(model: str | Path | None) -> Repository | None:
    """Return the repository that the value of --model names. None: a local directory or another text.

    Raises CheckpointError for an address that is not that of a model.
    """
    if model is None or isinstance(model, Path) or Path(model).expanduser().is_dir():
        return None
    if (path := _path_on_hub(model)) is not None:
        return _parse_path(model, path)
    if cached := _CACHED.fullmatch(model):
        model = "/".join(cached.groups())
    return _parse_id(model)


def model_name(model: str | Path | None) -> str:
    """Return the name to show for a value of --model."""
    return BUNDLED.name if model is None else str(repository(model) or model)


def not_a_name(model: str) -> str:
    """Return why a text that names a model in other programs does not name one here, with a fix; "" for other texts."""
    if model.lower().endswith(".gguf"):
        return GGUF
    if tagged := re.fullmatch(r"([\w./-]+):[\w.-]+", model):
        example = tagged[1] if _parse_id(tagged[1]) else "Qwen/Qwen3-4B"
        return f"names of models have no tags here; give a Hugging Face id, like {example}"
    return ""


def _parse_id(text: str) -> Repository | None:
    """Return the repository with the id "owner/name" or "owner/name@revision", None for another text."""
    match = _ID.fullmatch(text)
    return Repository(*match.groups()) if match and ".." not in text else None


def _path_on_hub(address: str) -> str | None:
    """Return the path in an address of the website, None for other texts."""
    scheme, host, path = _split(address)
    own = host.lower() in {*HOSTS, _split(os.environ.get("HF_ENDPOINT", ""))[1]} - {""}
    if scheme == "hf":
        return f"{host}/{path}"
    if own and scheme in ("", "http", "https"):
        return path
    if not scheme:
        return None
    raise CheckpointError(f"{address}: not an address on https://huggingface.co; give an id (like Qwen/Qwen3-4B)")


def _split(address: str) -> tuple[str, str, str]:
    """Return scheme, host and path of an address. The scheme is "" if there is none."""
    address = re.split("[?#]", address)[0]
    scheme, _, rest = address.partition("://") if "://" in address else ("", "", address)
    host, _, path = rest.partition("/")
    return scheme, host, path


def _parse_path(address: str, path: str) -> Repository:
    """Return the repository that an address names by its path, such as owner/name/tree/main. Raises CheckpointError."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    owner, name, page, revision = (parts + 4 * [""])[:4]
    inside = parts[4:]
    if inside and inside[-1].endswith(".gguf"):
        raise CheckpointError(f"{address}: {GGUF}")
    repo = _parse_id(f"{owner}/{name}")
    if repo is None or owner in ("datasets", "spaces", "collections", "docs", "models"):
        raise CheckpointError(f"{address}: not the address of a model; give an id (like Qwen/Qwen3-4B)")
    if page == "tree" and inside:
        raise CheckpointError(
            f"{address}: a directory in a repository; give {repo} if the model is not in it, else download it "
            f"with `hf download {repo} --include '{'/'.join(inside)}/*'` and give its directory"
        )
    if page not in _REVISIONED or revision in ("", "main"):
        return repo
    if (pinned := _parse_id(f"{repo}@{revision}")) is None:
        raise CheckpointError(f"{address}: the revision {revision!r} is not a valid one; give {repo}@REVISION")
    return pinned
