"""Resolves the value of --model to a directory with the files of one checkpoint."""

import re
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from ..arguments import nearest, shown
from ..errors import CheckpointError, ParameterError, brief
from ..models.files import open_regular, read_file
from ..models.reader import read_json
from .config import read_config
from .contents import UNSUPPORTED, adapter
from .names import BUNDLED, GGUF, Repository, not_a_name, repository

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "adapter_config.json",
)
_LONGEST_NAME = 255  # Maximum bytes of a file name on common file systems.


def resolve_model(model: str | Path | None, weights: bool = True) -> Path:
    """Return the directory of `model`.

    A local directory is returned as it is; for a repository in the Hugging Face cache, the directory of its snapshot.
    None and the name "bundled" mean the model in the package. Any other value is a Hugging Face id ("owner/name" or
    "owner/name@revision") or the address of its page, which is downloaded.

    Only needed files are downloaded, the small ones first. Therefore no weights of an unsupported model are downloaded.
    If `weights` is false, no weights are downloaded. huggingface_hub implements cache, token, offline mode and
    progress bars. Raises CheckpointError.
    """
    if model is None:
        return BUNDLED
    if not isinstance(model, (str, Path)):
        raise ParameterError(f"model must be a directory or a Hugging Face id, got {shown(model)}")
    if not str(model).strip():
        raise CheckpointError("the model's name is empty; give a directory or a Hugging Face id (like Qwen/Qwen3-4B)")
    try:
        path = Path(model).expanduser()
    except RuntimeError:
        raise CheckpointError(f"{model}: there is no such user; give a directory or a Hugging Face id") from None
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as error:  # For example, the name is too long.
        raise ParameterError(f"model {shown(str(model))}: {error.strerror}; give a directory or an id") from None
    if is_directory:
        return _snapshot_of(path)
    if model == BUNDLED.name:
        return BUNDLED
    if (why := not_a_name(str(model))) == GGUF or why and not exists:
        raise CheckpointError(f"{model}: {why}{'' if '/' in str(model) else suggestion(str(model))}")
    if exists:
        open_regular(path).close()  # This refuses a file of another kind by its name.
        where = f"{path.parent}, " if (path.parent / "config.json").exists() else ""
        raise CheckpointError(f"{model}: is a file; give {where}the directory that holds config.json and {SINGLE}")
    if (repo := repository(model)) is None:
        raise CheckpointError(
            f"{model}: no such directory, and not a Hugging Face id (like Qwen/Qwen3-4B); "
            f"check the spelling{suggestion(str(model))}"
        )
    small = _download(repo)
    if weights:
        fetch_weights(model, small)
    return small


def _snapshot_of(path: Path) -> Path:
    """Return the directory of a checkpoint: `path`, or the snapshot in it if it is a repository in the cache.

    Raises CheckpointError if there are several snapshots, and none belongs to the main branch.
    """
    snapshots, main = [file.parent for file in path.glob("snapshots/*/config.json")], path / "refs" / "main"
    if (path / "config.json").exists() or not snapshots:
        return path
    commit = read_file(main, 100).decode("ascii", "replace").strip() if main.exists() else None
    if (chosen := [each for each in snapshots if each.name == commit] or snapshots)[1:]:
        raise CheckpointError(f"{path}: holds {len(snapshots)} snapshots; give one of them, like {min(snapshots)}")
    return chosen[0]


def fetch_weights(model: str | Path | None, path: Path) -> None:
    """Download the weights of a Hugging Face id to `path`, which has its small files. Do nothing for a local directory.

    Raises CheckpointError.
    """
    if (repo := repository(model)) is None:
        return
    names = weight_files(path)
    if not weights_present(path):
        # Use the same commit as for the small files, because the repository may change between the two calls.
        _snapshot(repo, names, path.name)
    for name in names:
        _require(repo, path, name)


def weight_files(path: Path) -> list[str]:
    """Return the names of the files of weights that the checkpoint in directory `path` has. Raises CheckpointError."""
    if (path / SINGLE).is_file() or not (path / INDEX).is_file():
        return [SINGLE]
    return sorted(set(shard_map(path / INDEX).values()))


def weights_present(path: Path) -> bool:
    """Return whether the directory `path` has all files of weights. Raises CheckpointError."""
    return all((path / name).is_file() for name in weight_files(path))


def cached_models() -> list[str]:
    """Return the ids of the models whose weights are in the Hugging Face cache."""
    from huggingface_hub import constants

    ids = set()
    for file in Path(constants.HF_HUB_CACHE).glob("models--*--*/snapshots/*/*.safetensors"):
        if (file.parent / "config.json").exists():
            ids.add("/".join(file.parents[2].name.split("--", 2)[1:]))
    return sorted(ids)


def suggestion(name: str, known: Iterable[str] | None = None) -> str:
    """Return "; did you mean ...?" with the model that `name` may mean, or "" if none is similar.

    A model with the same part behind the slash is preferred. `known` has the ids, by default those of the cache.
    """
    ids = [each for each in (cached_models() if known is None else known) if each != name]
    word = re.sub(r":[\w.-]*$", "", name)
    short, last = {each.split("/")[-1]: each for each in ids}, word.split("/")[-1]
    similar = nearest(last, short)
    near = nearest(word, ids) if "/" in word and (similar or "").lower() != last.lower() else None
    near = near or (short[similar] if similar else None)
    return f"; did you mean {near}?" if near else ""


def shard_map(index: Path) -> dict[str, str]:
    """Return the weight_map of an index file: tensor name -> shard file name.

    Raises CheckpointError for a shard outside the directory of the index, whose name contains a directory or "..".
    """
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index}: weight_map must name a file for each tensor; download the file again")
    for tensor, name in names.items():
        plain = isinstance(name, str) and PurePosixPath(name).name == name and not re.search(r"[\\:\0]", name)
        if not plain or not name.endswith(".safetensors") or len(name.encode("utf-8", "replace")) > _LONGEST_NAME:
            raise CheckpointError(
                f"{index}: weight_map of {shown(tensor)} must name a .safetensors file next to the index, got "
                f"{shown(name)}; do not use this checkpoint unless you trust its source"
            )
    return names


def _download(repo: Repository) -> Path:
    """Download and check the small files of a repository; return their directory."""
    small = _snapshot(repo, list(SMALL_FILES), repo.revision)
    _require(repo, small, "config.json")
    read_config(small)
    _require(repo, small, "tokenizer.json")
    return small


def _require(repo: Repository, path: Path, name: str) -> None:
    """Raise CheckpointError if the file is missing."""
    if (path / name).is_file():
        return
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(f"{repo}: the cached copy {path} lacks {name}; run once with HF_HUB_OFFLINE=0")
    fix = "choose one that does, or save it again with transformers' save_pretrained and give that directory"
    if "gguf" in repo.id.lower():
        fix = GGUF
    elif lora := adapter(path):
        fix = f"it holds {lora}, {UNSUPPORTED}"
    raise CheckpointError(f"{repo}: the repository has no {name}; {fix}")


def _snapshot(repo: Repository, patterns: list[str], revision: str | None) -> Path:
    """Call huggingface_hub's snapshot_download.

    Each failure raises a CheckpointError with a one-line message and advice.
    """
    import huggingface_hub  # A local directory does not need this import.
    from huggingface_hub import constants, errors

    try:
        with _bounded_requests(huggingface_hub, constants.HF_HUB_ETAG_TIMEOUT):
            return Path(huggingface_hub.snapshot_download(repo.id, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError:
        reason = "the repository is gated"
        fix = f"accept its terms at {constants.ENDPOINT}/{repo.id}, then log in with `hf auth login` or set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "neither a directory here nor a repository on the Hugging Face hub that you may read"
        fix = f"check the spelling; for a private repository log in with `hf auth login`{suggestion(repo.id)}"
    except errors.RevisionNotFoundError:
        reason = f"the repository has no branch, tag or commit {revision}"
        fix = f"see {constants.ENDPOINT}/{repo.id}/branches/all for those that it has"
    except errors.HFValidationError:
        reason, fix = "not a valid Hugging Face id", "give owner/name, like Qwen/Qwen3-4B, or an existing directory"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        status = getattr(getattr(error.__cause__, "response", None), "status_code", None)
        if constants.HF_HUB_OFFLINE:
            reason = "offline mode is on (HF_HUB_OFFLINE) and the model is not, or not wholly, in the cache"
            fix = f"run once with HF_HUB_OFFLINE=0, or give a local directory; the cache is {constants.HF_HUB_CACHE}"
        elif status is not None:
            reason, fix = _refusal(constants.ENDPOINT, status)
        elif "Timeout" in type(error.__cause__).__name__:
            reason = f"{constants.ENDPOINT} did not answer in time, and the model is not in the cache"
            fix = "try again later, raise HF_HUB_ETAG_TIMEOUT (seconds), or give a local directory"
        else:
            reason = f"no network: {constants.ENDPOINT} cannot be reached, and the model is not in the cache"
            fix = "check the connection, or give a local directory"
        fix += suggestion(repo.id)
    except errors.HfHubHTTPError as error:
        reason, fix = _refusal(constants.ENDPOINT, getattr(error.response, "status_code", None))
    except OSError as error:
        reason = f"the download failed ({_words(error)})"
        fix = f"check the connection and the free space of {constants.HF_HUB_CACHE}, and run again: it resumes"
    except Exception as error:  # The HTTP client's errors differ between versions of huggingface_hub.
        if type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3", "hf_xet")):
            reason, fix = f"the download failed ({_words(error)})", "check the connection and run again: it resumes"
        else:  # huggingface_hub raises these errors if it cannot read an answer.
            cause = f"{type(error).__name__}: {brief(error)}"
            reason = f"{constants.ENDPOINT} does not answer as a hub does ({cause})"
            fix = "check HF_ENDPOINT and whether this network wants you to log in first, or give a local directory"
    raise CheckpointError(f"{repo}: {reason}; {fix}")


@contextmanager
def _bounded_requests(huggingface_hub, seconds: float):
    """Set a timeout for requests without a timeout, such as huggingface_hub's queries about a repository."""

    def bound(request):
        timeout = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {name: seconds if value is None else value for name, value in timeout.items()}

    if not hasattr(huggingface_hub, "set_client_factory"):  # Versions before 1.0 have no event hooks.
        yield
        return
    session = huggingface_hub.get_session()
    before = session.event_hooks
    session.event_hooks = before | {"request": [*before["request"], bound]}
    try:
        yield
    finally:
        session.event_hooks = before


def _refusal(endpoint: str, status: int | None) -> tuple[str, str]:
    """Return reason and advice for an HTTP status."""
    fix = "log in with `hf auth login` or set HF_TOKEN" if status in (401, 403) else "try again later"
    return f"{endpoint} answered with status {status}, and the model is not wholly in the cache", fix


def _words(error: Exception) -> str:
    """Return a short description of an error."""
    return brief(getattr(error, "strerror", None) or error) or type(error).__name__
