"""Resolves the value of --model to a directory with the files of one checkpoint, or to a GGUF file."""

import re
from collections.abc import Iterable
from contextlib import contextmanager
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path, PurePosixPath

from ..arguments import nearest, shown
from ..errors import CheckpointError, ParameterError, brief
from ..models.files import open_regular, read_file
from ..models.gguf import is_gguf, part_names
from ..models.reader import read_json
from .config import read_config
from .contents import NOT_A_MODEL, adapter
from .names import BUNDLED, Repository, not_a_name, quantization, repository

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
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_LONGEST_NAME = 255  # Maximum bytes of a file name on common file systems.


def resolve_model(model: str | Path | None, weights: bool = True) -> Path:
    """Return the directory of `model`, or its GGUF file.

    A local GGUF file or directory is returned as it is; for a repository in the Hugging Face cache, the directory of
    its snapshot; for a directory whose only model is a GGUF file, that file. None and the name "bundled" mean the model
    in the package. Any other value is a Hugging Face id ("owner/name" or "owner/name@revision", with ":Q4_K_M" or the
    name of a file for GGUF) or the address of its page, which is downloaded.

    Only needed files are downloaded, the small ones first. Therefore no weights of an unsupported model are downloaded.
    If `weights` is false, no weights are downloaded, except GGUF files, which contain the rest. huggingface_hub
    implements cache, token, offline mode and progress bars. Raises CheckpointError.
    """
    if model is None:
        return BUNDLED
    if not isinstance(model, (str, Path)):
        raise ParameterError(f"model must be a directory or a Hugging Face id, got {shown(model)}")
    if not str(model).strip():
        raise CheckpointError("the model's name is empty; give a directory or a Hugging Face id (like Qwen/Qwen3-4B)")
    path, is_directory, exists = _look_up("model", model)
    if is_directory:
        snapshot = _snapshot_of(path)
        files = gguf_files(snapshot) if not (snapshot / "config.json").exists() else []
        return files[0] if len(files) == 1 else snapshot
    if model == BUNDLED.name:
        return BUNDLED
    if not exists and (why := not_a_name(str(model))):
        raise CheckpointError(f"{model}: {why}{'' if '/' in str(model) else suggestion(str(model))}")
    if exists and is_gguf(path):
        return part_names(path)[0]
    if exists:
        open_regular(path).close()  # This refuses a file of another kind by its name.
        where = f"{path.parent}, " if (path.parent / "config.json").exists() else ""
        raise CheckpointError(f"{model}: is a file; give {where}the directory that holds config.json and {SINGLE}")
    if (repo := repository(model)) is None:
        raise CheckpointError(
            f"{model}: no such directory, and not a Hugging Face id (like Qwen/Qwen3-4B); "
            f"check the spelling{suggestion(str(model))}"
        )
    if repo.gguf:
        return _download_gguf(repo, repo.gguf)
    small = _download(repo)
    if weights:
        fetch_weights(model, small)
    return small


def resolve_adapter(path: str | Path) -> Path:
    """Return the directory of a LoRA adapter. A Hugging Face id is downloaded. "bundled" is in the package.

    Raises:
        CheckpointError: there is no such adapter.
    """
    if not isinstance(path, (str, Path)) or not str(path).strip():
        raise ParameterError(
            f"an adapter must be a directory or a Hugging Face id, got {shown(path)}", "adapters", "type"
        )
    if str(path) == BUNDLED.name:
        return BUNDLED / "json-adapter"
    directory, is_directory, exists = _look_up("adapter", path)
    if is_directory:
        return directory
    if exists:
        raise CheckpointError(f"{path}: is a file; give the directory that holds {ADAPTER_FILES[0]}")
    if (repo := repository(path)) is None or repo.gguf:
        raise CheckpointError(
            f"{path}: no such directory, and not a Hugging Face id; check the spelling of the adapter"
        )
    folder = _snapshot(repo, list(ADAPTER_FILES), repo.revision)
    if missing := next((name for name in ADAPTER_FILES if not (folder / name).is_file()), None):
        raise CheckpointError(f"{repo}: has no {missing}; give an adapter that peft has saved")
    return folder


def _look_up(kind: str, name: str | Path) -> tuple[Path, bool, bool]:
    """Return a path with the home directory in place of ~, whether it is a directory, and whether it exists."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise CheckpointError(f"{name}: there is no such user; give a directory or a Hugging Face id") from None
    try:
        return path, path.is_dir(), path.exists()
    except OSError as error:  # For example, the name is too long.
        raise ParameterError(f"{kind} {shown(str(name))}: {error.strerror}; give a directory or an id") from None


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
    if (repo := repository(model)) is None or repo.gguf:
        return
    names = weight_files(path)
    if not weights_present(path):
        # Use the same commit as for the small files, because the repository may change between the two calls.
        _snapshot(repo, names, path.name)
    for name in names:
        _require(repo, path, name)


def gguf_files(path: Path) -> list[Path]:
    """Return the GGUF files in a directory, of split models the first, without the files of vision models."""
    files = (file for file in sorted(path.glob("*.gguf")) if "mmproj" not in file.name.lower())
    return [file for file in files if part_names(file)[0] == file]


def weight_files(path: Path) -> list[str]:
    """Return the names of the files of weights that the checkpoint in directory `path` has. Raises CheckpointError."""
    if (path / SINGLE).is_file() or not (path / INDEX).is_file():
        return [SINGLE]
    return sorted(set(shard_map(path / INDEX).values()))


def weights_present(path: Path) -> bool:
    """Return whether the directory `path` has all files of weights. Raises CheckpointError."""
    return all((path / name).is_file() for name in weight_files(path))


def cached_models() -> list[str]:
    """Return the names of the models whose weights are in the Hugging Face cache."""
    from huggingface_hub import constants

    ids = {name for folder in Path(constants.HF_HUB_CACHE).glob("models--*--*") for name in cached_gguf(folder)}
    for file in Path(constants.HF_HUB_CACHE).glob("models--*--*/snapshots/*/*.safetensors"):
        if (file.parent / "config.json").exists():
            ids.add("/".join(file.parents[2].name.split("--", 2)[1:]))
    return sorted(ids)


def cached_gguf(folder: Path) -> dict[str, Path]:
    """Return the GGUF files in a repository's directory of the cache by the names of their models."""
    named: dict[str, Path] = {}
    for file in sorted(folder.glob("snapshots/**/*.gguf")):
        snapshot = folder / "snapshots" / file.relative_to(folder / "snapshots").parts[0]
        if part_names(file)[0] == file and "mmproj" not in file.name.lower():
            tag = quantization(file.name)
            repo = "/".join(folder.name.split("--", 2)[1:])
            name = f"{repo}:{tag}" if tag and f"{repo}:{tag}" not in named else f"{repo}:{file.relative_to(snapshot)}"
            named[name] = file
    return named


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


def _download_gguf(repo: Repository, name: str) -> Path:
    """Download a GGUF file of a repository; return its path, of a split model that of the first part.

    Args:
        name: the name of the file, or the quantization in its name.
    """
    from huggingface_hub import constants

    if name.endswith(".gguf"):
        patterns = [escape(str(part)) for part in part_names(Path(name))]
    else:
        cases = (name, name.upper(), name.lower())
        starts = [start + case for case in dict.fromkeys(cases) for start in ("*[-_.]", "")]
        patterns = [start + end for start in starts for end in (".gguf", "-0*-of-0*.gguf")]
    names = _names(repo)
    if names is not None:  # Choose before the download: files of other models may be large.
        page = f"{constants.ENDPOINT}/{repo.id}/tree/main"
        absent = f"the repository has no such GGUF file; see {page} for its files"
        patterns = [escape(str(part)) for part in part_names(_chosen(repo, name, patterns, names, absent))]
    folder = _snapshot(repo, patterns, repo.revision)
    cached = [file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")]
    absent = f"the cached copy {folder} lacks it; run once with HF_HUB_OFFLINE=0"
    return folder / _chosen(repo, name, patterns, cached, absent)


def _names(repo: Repository) -> list[str] | None:
    """Return the names of a repository's files. If this fails, return None: the download reports the reason."""
    import huggingface_hub
    from huggingface_hub import constants

    try:
        with _bounded_requests(huggingface_hub, constants.HF_HUB_ETAG_TIMEOUT):
            siblings = huggingface_hub.HfApi().model_info(repo.id, revision=repo.revision).siblings
    except Exception:
        return None
    return [sibling.rfilename for sibling in siblings or []]


def _chosen(repo: Repository, name: str, patterns: list[str], names: list[str], absent: str) -> Path:
    """Return the GGUF file that a name means, of a split model its first part.

    Args:
        name: see `_download_gguf`.
        patterns: patterns of its files.
        names: names of all files.
        absent: the message if there is no such file.

    Raises:
        CheckpointError: no file, or more than one, matches.
    """
    matches = {each for each in names if any(fnmatchcase(each, pattern) for pattern in patterns)}
    if name.endswith(".gguf"):
        matches &= {name}
    files = sorted({part_names(Path(each))[0] for each in matches if "mmproj" not in PurePosixPath(each).name.lower()})
    if not files:
        raise CheckpointError(f"{repo}: {absent}")
    if len(files) > 1:
        listed = ", ".join(map(str, files))
        raise CheckpointError(f"{repo}: the repository has several of them; give one: {repo.id}:FILE, of {listed}")
    return files[0]


def _require(repo: Repository, path: Path, name: str) -> None:
    """Raise CheckpointError if the file is missing."""
    if (path / name).is_file():
        return
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(f"{repo}: the cached copy {path} lacks {name}; run once with HF_HUB_OFFLINE=0")
    fix = "choose one that does, or save it again with transformers' save_pretrained and give that directory"
    if "gguf" in repo.id.lower():
        fix = f"give one of its GGUF files, like {repo.id}:Q4_K_M"
    elif lora := adapter(path):
        fix = f"it holds {lora}, {NOT_A_MODEL}"
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
