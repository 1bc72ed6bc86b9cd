"""Names of models: "bundled", ids on the Hugging Face hub, with or without a revision, and addresses of its pages.

An id may end in the name of a GGUF file, or in a quantization: owner/name:Q4_K_M.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from ..errors import CheckpointError

BUNDLED = Path(__file__).parents[1] / "bundled"  # Directory of the model in the package, which is called "bundled".
NOT_A_FILE = "no such file; check the path, or give a file on the Hugging Face hub as owner/name:FILE.gguf"
HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
# The quantization in the name of a GGUF file, such as Q4_K_M, UD-Q6_K_XL or BF16.
_QUANTIZATION = r"(?i:(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|B?F16|FP16|F32|MXFP4\w*|NVFP4))"
_FILE = rf"{_QUANTIZATION}|\w[\w./-]*\.gguf"
_ID = re.compile(rf"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(\w[\w./-]*))?(?::({_FILE}))?", re.ASCII)
_CACHED = re.compile(r"models--([^/]+?)--([^/]+)")  # Name of a repository's directory in the cache.
_REVISIONED = ("tree", "blob", "resolve", "raw", "commit", "commits")  # Pages whose address contains a revision.


class Repository(NamedTuple):
    """A model on the Hugging Face hub.

    Args:
        id: "owner/name".
        revision: a branch, tag or commit. None is the main branch.
        gguf: the name of a GGUF file, or the quantization in its name. None: the model has other files.
    """

    id: str
    revision: str | None = None
    gguf: str | None = None

    def __str__(self) -> str:
        return self.id + (f"@{self.revision}" if self.revision else "") + (f":{self.gguf}" if self.gguf else "")


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
    if _parse_id(model):
        return ""
    if model.lower().endswith(".gguf"):
        return NOT_A_FILE
    if tagged := re.fullmatch(r"([\w./-]+):[\w.-]+", model):
        example = tagged[1] if _parse_id(tagged[1]) else "Qwen/Qwen3-4B"
        return f"names of models have no such tags here; give a Hugging Face id, like {example}"
    return ""


def quantization(file: str) -> str:
    """Return the quantization in the name of a GGUF file; "" if there is none."""
    match = re.search(rf"(?:^|[-_.])({_QUANTIZATION})(?:-\d{{5}}-of-\d{{5}})?\.gguf$", file)
    return match[1] if match else ""


def _parse_id(text: str) -> Repository | None:
    """Return the repository that a text such as "owner/name@revision:Q4_K_M" names, None for another text."""
    match = _ID.fullmatch(text)
    if not match or ".." in text or (match[1].lower().endswith(".gguf") and not match[3]):
        return None
    return Repository(*match.groups())


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
    name, colon, tag = name.partition(":")
    if inside and inside[-1].endswith(".gguf"):
        colon, tag = ":", "/".join(inside)
    repo = _parse_id(f"{owner}/{name}{colon}{tag}")
    if repo is None or owner in ("datasets", "spaces", "collections", "docs", "models"):
        raise CheckpointError(f"{address}: not the address of a model; give an id (like Qwen/Qwen3-4B)")
    if page == "tree" and inside:
        raise CheckpointError(
            f"{address}: a directory in a repository; give {repo} if the model is not in it, else download it "
            f"with `hf download {repo} --include '{'/'.join(inside)}/*'` and give its directory"
        )
    if page not in _REVISIONED or revision in ("", "main"):
        return repo
    if (pinned := _parse_id(f"{repo.id}@{revision}{colon}{tag}")) is None:
        raise CheckpointError(f"{address}: the revision {revision!r} is not a valid one; give {repo}@REVISION")
    return pinned
