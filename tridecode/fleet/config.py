"""The configuration of a fleet: a YAML file or its values, checked by key. This module needs no Ray."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..arguments import (
    Choice,
    Constraint,
    Flag,
    Integer,
    Number,
    Several,
    Text,
    check_fields,
    documented,
    nearest,
    option,
    options_of,
    shown,
)
from ..checkpoint.names import model_name
from ..errors import ParameterError, TridecodeError, brief, conflict
from ..options import OPTIONS, EngineOptions

TEXT = Text("a text", r"(?s).*\S.*")
TEXTS = Several(TEXT, "a text or a list of texts", min_items=0)
SECONDS = Number(0, 1e6)
COUNT = Integer(1, 10_000)
C = TypeVar("C")


@dataclass(frozen=True)
class Keys(Constraint):
    """A mapping from keys to values, which are the fields of a dataclass. With `several`, a list of such mappings."""

    cls: type
    several: bool = False

    def check(self, name: str, value: Any) -> Any:
        """Return an object of the dataclass, or a tuple of them. Raises ParameterError, which names the key."""
        if not self.several:
            return build(self.cls, value, name)
        if not isinstance(value, list | tuple) or not value:
            raise ParameterError(f"{name} must be a list of at least one entry, got {shown(value)}", name, "type")
        return tuple(build(self.cls, each, f"{name}[{number}]") for number, each in enumerate(value))


class ApiKeys(Constraint):
    """The path of a file with API keys, one a line. The value is a tuple of the keys."""

    def check(self, name: str, value: Any) -> tuple[str, ...]:
        """Return the keys. Raises ParameterError."""
        if isinstance(value, tuple):
            return value
        try:
            lines = Path(TEXT.check(name, value)).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not UTF-8"
            raise ParameterError(f"{name}: {value}: {why}; expected a file with a key on each line", name) from None
        keys = tuple(line.strip() for line in lines if line.strip())
        if not keys or not all(key.isascii() and key.isprintable() for key in keys):
            message = f"{name}: {value}: expected a key of printable ASCII characters on each line"
            raise ParameterError(message, name, "type")
        return keys


class EngineKeys(Constraint):
    """Options of the engine, with the defaults of `serve`."""

    def check(self, name: str, value: Any) -> dict[str, Any]:
        """Return all options that are set. Raises ParameterError, which names the key."""
        options = {name: each.defaults["serve"] for name, each in OPTIONS.items() if "serve" in each.defaults}
        known = [name for name, each in OPTIONS.items() if "serve" in each.commands]
        options |= _known({} if value == () else value, known, name)
        try:
            EngineOptions(**options)
        except ParameterError as error:
            raise _inside(name, error) from None
        return options


class Checked:
    """A dataclass whose fields are checked on construction. Raises ParameterError."""

    def __post_init__(self) -> None:
        check_fields(self)


@documented
@dataclass(frozen=True)
class Autoscaling(Checked):
    """How Ray Serve chooses a model's number of replicas."""

    min: int = option(1, COUNT, "minimum number of replicas")
    max: int = option(1, COUNT, "maximum number of replicas")
    target: float | None = option(
        None, Number(0.1, 1e5), "average number of requests of a replica", default_text="half of the slots"
    )
    up_seconds: float = option(30.0, SECONDS, "seconds for which more replicas are needed before they are started")
    down_seconds: float = option(600.0, SECONDS, "seconds for which replicas are not needed before they are stopped")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min > self.max:
            raise ParameterError(f"min must be at most max, {self.max}, got {self.min}", "min", "range")


@documented
@dataclass(frozen=True)
class Model(Checked):
    """One model of a fleet."""

    model: str = option("bundled", TEXT, "directory, Hugging Face id, or bundled")
    name: str = option(None, TEXT, "name for clients", default_text="the id, or the last part of the directory")
    replicas: int | None = option(None, COUNT, "number of replicas", default_text="1")
    autoscaling: Autoscaling | None = option(None, Keys(Autoscaling), "limits between which Ray Serve chooses replicas")
    gpus: float = option(None, Number(0, 1), "GPUs of a replica", default_text="1, with device: cpu 0")
    cpus: float = option(1.0, Number(0, 1024), "CPU cores that Ray reserves for a replica")
    options: Mapping[str, Any] = option((), EngineKeys(), "options of the engine, as for serve")
    api_key_file: tuple[str, ...] = option(
        (), ApiKeys(), "file with the keys for this model, one on each line", default_text="the keys of the fleet"
    )
    timeout: float = option(600.0, SECONDS, "seconds that a request may take; 0 removes the limit")
    log_prompts: bool = option(False, Flag(), "whether the log of a replica contains prompts")
    pass_seconds: float = option(
        60.0, Number(1, 1e6), "seconds without a pass, while requests are active, after which a replica is replaced"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        directory = Path(self.model).resolve() if Path(self.model).is_dir() else None
        derived: dict[str, Any] = {
            "model": str(directory or self.model),  # Replicas have other working directories.
            "name": self.name or (directory.name if directory else model_name(self.model)),
            "gpus": self.gpus if self.gpus is not None else 0.0 if self.options.get("device") == "cpu" else 1.0,
        }
        if adapters := self.options.get("adapters"):
            paths = {name: Path(source) for name, source in adapters.items()}
            own = {name: str(path.resolve()) if path.is_dir() else adapters[name] for name, path in paths.items()}
            derived["options"] = {**self.options, "adapters": own}
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if self.autoscaling and self.replicas:
            raise conflict("replicas", ": autoscaling sets the number of replicas; leave one of them out")

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the model's adapters, which are models for clients."""
        return tuple(self.options.get("adapters") or ())

    @property
    def least(self) -> int:
        """The number of replicas with which the model starts."""
        return self.autoscaling.min if self.autoscaling else self.replicas or 1


@documented
@dataclass(frozen=True)
class Routing(Checked):
    """How requests are distributed; see prefix.Policy."""

    policy: str = option("prefix", Choice(("prefix", "load", "round_robin")), "how a replica is chosen")
    spread: float = option(
        1.25, Number(1, 1000), "the replica with the prefix is used up to this multiple of the average load"
    )
    entries: int = option(1 << 20, Integer(2, 1 << 30), "number of hashes that a gateway remembers")


@documented
@dataclass(frozen=True)
class Config(Checked):
    """The configuration of a fleet."""

    models: tuple[Model, ...] = option((), Keys(Model, several=True), "the models")
    address: str | None = option(
        None, TEXT, "address of the Ray cluster", default_text="RAY_ADDRESS, a cluster on this machine, or a new one"
    )
    host: str = option("127.0.0.1", TEXT, "address on which the gateways listen")
    port: int | None = option(
        None, Integer(0, 65535), "port of the gateways", default_text="8000; for `serve run` only Ray's own proxies"
    )
    gateways: int = option(1, Integer(1, 64), "number of gateway processes, which share the port")
    api_key_file: tuple[str, ...] = option((), ApiKeys(), "file with the keys for all models, one on each line")
    routing: Routing = option(Routing(), Keys(Routing), "how requests are distributed")
    grace: float = option(30.0, SECONDS, "seconds that running requests may take to end when a process stops")
    join_ms: float = option(
        0.0, Number(0, 10), "milliseconds for which a gateway joins the tokens of a stream, with more than 16 streams"
    )
    max_connections: int = option(1000, Integer(1, 1_000_000), "maximum number of connections of a gateway")
    timeout_keep_alive: int = option(75, Integer(0, 1_000_000), "seconds for which an idle connection stays open")
    ssl_certfile: str | None = option(None, TEXT, "certificate, on the machine of the gateways")
    ssl_keyfile: str | None = option(None, TEXT, "key of the certificate")
    cors: tuple[str, ...] = option((), TEXTS, "origins of web pages that may send requests")
    allow_host: tuple[str, ...] = option((), TEXTS, "further host names that requests may have")

    def __post_init__(self) -> None:
        super().__post_init__()
        names: dict[str, int] = {}  # Name for clients -> the number of the model.
        for number, model in enumerate(self.models):
            place = f"models[{number}]"
            for key, name in ("name", model.name), *(("options.adapters", each) for each in model.adapters):
                if (first := names.setdefault(name, number)) != number or (key != "name" and name == model.name):
                    raise _inside(place, conflict(key, f": {name} is the name of models[{first}], too; choose another"))
            if not model.api_key_file and not self.api_key_file and any(each.api_key_file for each in self.models):
                why = " must be set, because other models have keys; set it here or for all models"
                raise _inside(place, conflict("api_key_file", why))
        if self.ssl_keyfile and not self.ssl_certfile:
            raise conflict("ssl_keyfile", " needs ssl_certfile")


def read_config(path: str) -> Config:
    """Read a YAML file. Raises ParameterError and TridecodeError."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise missing("yaml") from None
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TridecodeError(f"{path}: {error.strerror}; expected a YAML file with models") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ParameterError(f"{path}: not YAML ({brief(error)}); correct it") from None
    try:
        return build(Config, {"models": None} | values if isinstance(values, dict) else values)
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}", error.argument, error.code) from None


def missing(package: str) -> TridecodeError:
    """Return the error for an absent package of the extra."""
    return TridecodeError(f"fleet needs the package {package}; install it: pip install 'tridecode[fleet]'")


def build(cls: type[C], value: Any, place: str = "") -> C:
    """Return an object of a dataclass whose fields are the keys of `value`. A null counts as absent.

    Args:
        place: the key of `value` in the file.

    Raises:
        ParameterError: a key or a value is wrong. `argument` is the key in the file.
    """
    if isinstance(value, cls):
        return value
    known = _known(value, [*options_of(cls)], place)
    try:
        return cls(**{name: each for name, each in known.items() if each is not None})
    except ParameterError as error:
        raise _inside(place, error) from None


def _known(value: Any, known: list[str], place: str) -> dict[str, Any]:
    """Return a mapping if it has only known keys. Raises ParameterError."""
    if not isinstance(value, Mapping):
        raise ParameterError(f"{place or 'the file'} must have keys like {known[0]}, got {shown(value)}", place, "type")
    for name in value:
        if name not in known:
            near = nearest(str(name), known)
            fix = f"did you mean {near}?" if near else f"the keys are {', '.join(known)}"
            raise _inside(place, ParameterError(f"there is no key {shown(name)}; {fix}", str(name), "choice"))
    return dict(value)


def _inside(place: str, error: ParameterError) -> ParameterError:
    """Return an error of a value with the key of the value."""
    argument = f"{place}.{error.argument or ''}".strip(".")
    return ParameterError(f"{place}: {error}" if place else str(error), argument, error.code)
