"""`tridecode models`: list, download and remove the models of the Hugging Face cache."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from ..checkpoint.hub import BUNDLED, cached_gguf, cached_models, gguf_files, resolve_model, suggestion
from ..checkpoint.names import repository
from ..errors import CheckpointError
from ..models.gguf import part_names
from ..models.reader import read_json
from .chat.sessions import fitted
from .terminal import Output

EXPERTS = ("num_experts", "num_local_experts")  # Keys of config.json with the number of experts.
LONGEST = 60  # Columns for names. A longer name shifts the rest of its line.


@dataclass(frozen=True)
class Cached:
    """A repository in the cache, or the bundled model.

    Attributes:
        name: The value of --model that selects it.
        bytes: Its size on the disk.
        kind: Its model_type and its weights, or the reason why this program cannot run it.
        usable: Whether --model accepts it.
    """

    name: str
    bytes: int
    kind: str
    usable: bool
    path: str


def run(args, output: Output) -> int:
    """Run `tridecode models`. Return the exit code."""
    if args.action in ("download", "pull"):
        for name in args.names:
            output.note(f"{name} is in {resolve_model(name)}")
    elif args.action in ("remove", "rm", "delete"):
        remove(args.names, output)
    else:
        show(args, output)
    return 0


def show(args, output: Output) -> None:
    """Print the models as names, JSON lines or a table."""
    models = [bundled(), *cached(), *local()]
    if args.names:
        lines = [each.name for each in models if each.usable]
    elif args.json:
        lines = [json.dumps(asdict(each)) for each in models]
    else:
        longest = min(max(len(each.name) for each in models), LONGEST)
        width = output.console.width if output.tty else None
        lines = [line for each in models for line in rows(each, longest, width)]
    output.text("".join(f"{line}\n" for line in lines))
    if not (args.names or args.json):
        output.note(f"--model NAME selects one; the cache is {cache_directory()}")


def rows(model: Cached, longest: int, width: int | None) -> list[str]:
    """Return the line of a model, or two lines if the window is too narrow for one.

    Args:
        longest: Columns for names.
        width: Columns of the window; None if there is no window.
    """
    size = decimal(model.bytes)
    line = f"{model.name:<{longest}}  {size:>9}  {model.kind}"
    if width is None or len(line) <= width:
        return [line]
    return [fitted(model.name, width), fitted(f"  {size}  {model.kind}", width)]


def bundled() -> Cached:
    """Return the model in the package."""
    size = sum(file.stat().st_size for file in BUNDLED.iterdir() if file.is_file())
    return Cached(BUNDLED.name, size, f"{described(BUNDLED)}, part of the program", True, str(BUNDLED))


def cached() -> list[Cached]:
    """Return the repositories of the cache by name."""
    usable, listed, info = cached_models(), [], scan()
    for repo in info.repos if info else ():
        if not repo.revisions:
            continue
        path = newest(repo)
        if files := cached_gguf(path.parents[1]) if repo.repo_type == "model" else {}:
            listed += [gguf(name, file) for name, file in files.items()]
            if repo.repo_id not in usable:
                continue
        kind = described(path) if repo.repo_type == "model" else f"{repo.repo_type}, not a model"
        works = repo.repo_type == "model" and repo.repo_id in usable
        if repo.repo_type == "model" and not works:
            kind += ", no complete weights that this program reads"
        listed.append(Cached(repo.repo_id, repo.size_on_disk, kind, works, str(path)))
    return sorted(listed, key=lambda each: each.name.lower())


def local() -> list[Cached]:
    """Return the GGUF files in the working directory."""
    return [gguf(file.name, file) for file in gguf_files(Path())]


def gguf(name: str, file: Path) -> Cached:
    """Return a GGUF file, or a split one by its first part."""
    size = sum(part.stat().st_size for part in part_names(file) if part.exists())
    return Cached(name, size, "GGUF", True, str(file))


def described(path: Path) -> str:
    """Return the kind of the model in a directory, such as "qwen3, bfloat16"."""
    try:
        config = read_json(path / "config.json")
    except (CheckpointError, OSError):
        return "no config.json"
    quantization = config.get("quantization_config")
    text = config.get("text_config")
    dtypes = [each.get(name) for each in (config, text) if isinstance(each, dict) for name in ("dtype", "torch_dtype")]
    weights = quantization.get("quant_method") if isinstance(quantization, dict) else next(filter(None, dtypes), None)
    counts = [each.get(name) for each in (config, text) if isinstance(each, dict) for name in EXPERTS]
    experts = next((f"{count} experts" for count in counts if isinstance(count, int) and count > 0), None)
    return ", ".join(str(word)[:40] for word in (config.get("model_type"), experts, weights) if word) or "unknown kind"


def remove(names: list[str], output: Output) -> None:
    """Remove models from the cache, or none of them if one does not exist. Raises CheckpointError."""
    info, names = scan(), [cached_name(name) for name in names]
    known = {repo.repo_id for repo in info.repos} if info else set()
    for name in names:
        if name == BUNDLED.name:
            raise CheckpointError("bundled is a part of the program and cannot be removed")
        if name not in known:
            fix = suggestion(name, sorted(known)) or "; tridecode models lists the cache"
            raise CheckpointError(f"{name}: there is no such model in {cache_directory()}{fix}")
    hashes = [each.commit_hash for repo in info.repos if repo.repo_id in names for each in repo.revisions]
    strategy = info.delete_revisions(*hashes)
    strategy.execute()
    output.note(f"removed {', '.join(dict.fromkeys(names))}, {decimal(strategy.expected_freed_size)}")


def cached_name(name: str) -> str:
    """Return the id of the repository that a value of --model names. A name with a revision is returned unchanged.

    Raises CheckpointError for a GGUF file, because only whole repositories are removed.
    """
    repo = repository(name)
    if repo and repo.gguf:
        raise CheckpointError(f"{name}: only whole repositories are removed: tridecode models remove {repo.id}")
    return repo.id if repo and not repo.revision else name


def scan() -> Any:
    """Return huggingface_hub's description of the cache; None if there is no cache."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def newest(repo: Any) -> Path:
    """Return the directory of a repository's revision that changed last."""
    return max(repo.revisions, key=lambda revision: revision.last_modified).snapshot_path


def cache_directory() -> str:
    """Return the directory of the Hugging Face cache."""
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE
