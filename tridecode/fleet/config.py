"""The configuration of a fleet: a YAML file or its values, checked by key. This module needs no Ray."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..arguments import Choice, Constraint, Flag, Integer, Number, Text, shown
from ..checkpoint.names import model_name
from ..errors import ParameterError, TridecodeError, as_json, brief
from ..options import OPTIONS, EngineOptions

TEXT = Text("a text", r"(?s).*\S.*")
SECONDS = Number(0, 1e6)
COUNT = Integer(1, 10_000)


@dataclass(frozen=True)
class Autoscaling:
    """Limits of a model's number of replicas, and the requests a replica for which the number is chosen."""

    min: int
    max: int
    target: float


@dataclass(frozen=True)
class Model:
    """One model of the fleet.

    Attributes:
        name: its name for clients.
        model: a directory, a Hugging Face id, or None for the bundled model.
        replicas: number of replicas, without `autoscaling`.
        gpus: GPUs of a replica, at most 1.
        cpus: CPUs that a replica reserves.
        keys: API keys for this model. Without any, the keys of the fleet.
        options: options of the engine, as keywords of Engine.load.
        timeout: seconds that a request may take; None removes the limit.
        log_prompts: whether the replica's log contains prompts.
        pass_seconds: seconds without a pass, while requests are active, after which a replica is replaced.
    """

    name: str
    model: str | None = None
    replicas: int = 1
    autoscaling: Autoscaling | None = None
    gpus: float = 1.0
    cpus: float = 1.0
    keys: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = 600.0
    log_prompts: bool = False
    pass_seconds: float = 60.0

    @property
    def slots(self) -> int:
        """Number of requests that a replica runs at the same time."""
        return self.options["slots"]

    @property
    def max_requests(self) -> int:
        """Number of requests that a replica accepts, running and waiting."""
        return self.slots + self.options["max_queue"]

    @property
    def least(self) -> int:
        """The number of replicas with which the model starts."""
        return self.autoscaling.min if self.autoscaling else self.replicas


@dataclass(frozen=True)
class Routing:
    """How requests are distributed; see prefix.Policy."""

    policy: str = "prefix"
    spread: float = 1.25
    entries: int = 1 << 20


@dataclass(frozen=True)
class Config:
    """The configuration of a fleet.

    Attributes:
        models: the models; the first one is the default of the page.
        address: address of the Ray cluster; None starts Ray on this machine, or uses RAY_ADDRESS.
        host: address on which the gateways listen.
        port: port of the gateways; None if only Ray's proxies lead to them.
        gateways: number of gateway processes, which share the port.
        keys: API keys for all models.
        routing: how requests are distributed.
        grace: seconds that running requests may take to end when a replica or a gateway stops.
        join_ms: with more than JOIN_STREAMS streams, milliseconds for which a gateway collects the tokens of a stream.
        ssl_certfile, ssl_keyfile: certificate and key on the machines of the gateways.
    """

    models: tuple[Model, ...]
    address: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    gateways: int = 1
    keys: tuple[str, ...] = ()
    routing: Routing = Routing()
    grace: float = 30.0
    max_connections: int = 1000
    timeout_keep_alive: int = 75
    join_ms: float = 0.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    cors: tuple[str, ...] = ()
    allow_host: tuple[str, ...] = ()


_ROUTING: dict[str, Constraint] = {
    "policy": Choice(("prefix", "load")),
    "spread": Number(1, 1000),
    "entries": Integer(2, 1 << 30),
}
_AUTOSCALING: dict[str, Constraint] = {"min": Integer(1, 10_000), "max": COUNT, "target": Number(0.1, 1e5)}
_MODEL: dict[str, Constraint | None] = {
    "name": TEXT,
    "model": TEXT,
    "replicas": COUNT,
    "autoscaling": None,
    "gpus": Number(0, 1),
    "cpus": Number(0, 1024),
    "api_key_file": TEXT,
    "options": None,
    "timeout": SECONDS,
    "log_prompts": Flag(),
    "pass_seconds": Number(1, 1e6),
}
_TOP: dict[str, Constraint | None] = {
    "models": None,
    "address": TEXT,
    "host": TEXT,
    "port": Integer(0, 65535),
    "gateways": Integer(1, 64),
    "api_key_file": TEXT,
    "routing": None,
    "grace": SECONDS,
    "max_connections": Integer(1, 1_000_000),
    "timeout_keep_alive": Integer(0, 1_000_000),
    "join_ms": Number(0, 10),
    "ssl_certfile": TEXT,
    "ssl_keyfile": TEXT,
    "cors": None,
    "allow_host": None,
}


def read_config(path: str) -> Config:
    """Read a YAML file. Raises ParameterError and TridecodeError."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise missing("yaml") from None
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TridecodeError(f"{path}: {error.strerror}; give a YAML file with models") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ParameterError(f"{path}: not YAML ({brief(error)}); correct it") from None
    try:
        return parse(values)
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}", error.argument, error.code) from None


def missing(package: str) -> TridecodeError:
    """Return the error for an absent package of the extra."""
    return TridecodeError(f"fleet needs the package {package}; install it: pip install 'tridecode[fleet]'")


def parse(values: Any) -> Config:
    """Check the values of a configuration.

    Raises:
        ParameterError: a key or a value is wrong. The message begins with the key, and `argument` is the key.
        TridecodeError: a file with keys cannot be read.
    """
    top = _fields(values, "", _TOP)
    models = top.pop("models", None)
    if not isinstance(models, list) or not models:
        raise _wrong("models", f"expected a list of one or more models, got {as_json(models)}", "type")
    top["models"] = tuple(_model(each, f"models[{i}]") for i, each in enumerate(models))
    names = [model.name for model in top["models"]]
    for i, name in enumerate(names):
        if name in names[:i]:
            first = names.index(name)
            raise _wrong(
                f"models[{i}].name", f"{name} is the name of models[{first}], too; give another one", "conflict"
            )
    top["keys"] = _keys(top.pop("api_key_file", None), "api_key_file")
    if any(model.keys for model in top["models"]) and not all(model.keys or top["keys"] for model in top["models"]):
        open_model = next(i for i, model in enumerate(top["models"]) if not model.keys)
        raise _wrong(
            f"models[{open_model}].api_key_file",
            "other models have keys, this one has none; set it, or api_key_file for all models",
            "conflict",
        )
    if "routing" in top:
        top["routing"] = Routing(**_fields(top["routing"], "routing", _ROUTING))
    for name in ("cors", "allow_host"):
        if name in top:
            top[name] = _texts(top[name], name)
    if top.get("ssl_keyfile") and not top.get("ssl_certfile"):
        raise _wrong("ssl_keyfile", "needs ssl_certfile", "conflict")
    if top.get("ssl_certfile") and top.get("port", 0) is None:
        raise _wrong("ssl_certfile", "needs port", "conflict")
    return Config(**top)


def _model(value: Any, place: str) -> Model:
    given = _fields(value, place, _MODEL)
    source = given.pop("model", "bundled")
    options = given.pop("options", {})
    if not isinstance(options, dict):
        raise _wrong(f"{place}.options", f"expected keys with values, got {as_json(options)}", "type")
    for name in options:
        if name not in OPTIONS or "serve" not in OPTIONS[name].commands:
            known = [each for each, option in OPTIONS.items() if "serve" in option.commands]
            raise _unknown(name, known, f"{place}.options")
    serve = {name: option.defaults["serve"] for name, option in OPTIONS.items() if "serve" in option.defaults}
    options = serve | {name: _option(name, each) for name, each in options.items() if each is not None}
    try:
        checked = EngineOptions(**options)
    except ParameterError as error:
        raise _wrong(f"{place}.options.{error.argument or ''}".rstrip("."), str(error), error.code) from None
    given["options"] = options
    if "autoscaling" in given:
        if "replicas" in given:
            raise _wrong(
                f"{place}.replicas", "autoscaling sets the number of replicas; leave one of them out", "conflict"
            )
        limits = _fields(given["autoscaling"], f"{place}.autoscaling", _AUTOSCALING)
        for name in ("min", "max"):
            if name not in limits:
                raise _wrong(f"{place}.autoscaling.{name}", "is required", "type")
        if limits["min"] > limits["max"]:
            raise _wrong(f"{place}.autoscaling.min", f"must be at most max, {limits['max']}", "range")
        given["autoscaling"] = Autoscaling(limits["min"], limits["max"], limits.get("target", checked.slots / 2))
    given["keys"] = _keys(given.pop("api_key_file", None), f"{place}.api_key_file")
    given.setdefault("gpus", 0.0 if checked.device == "cpu" else 1.0)
    if "timeout" in given:
        given["timeout"] = given["timeout"] or None
    is_directory = Path(source).is_dir()
    given.setdefault("name", Path(source).resolve().name if is_directory else model_name(source))
    local = str(Path(source).resolve()) if is_directory else source  # Replicas have other working directories.
    return Model(model=local, **given)


def _option(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return OPTIONS[name].constraint.read(value)
    return tuple(value) if isinstance(value, list) else value


def _fields(value: Any, place: str, known: Mapping[str, Constraint | None]) -> dict[str, Any]:
    """Return the checked values of a mapping; a null counts as absent. Values without a constraint are not checked."""
    if not isinstance(value, dict):
        raise _wrong(place, f"expected keys with values, like {next(iter(known))}: ..., got {as_json(value)}", "type")
    checked = {}
    for name, each in value.items():
        if name not in known:
            raise _unknown(name, known, place)
        if each is None:
            continue
        constraint = known[name]
        checked[name] = constraint.check(f"{place}.{name}".lstrip("."), each) if constraint else each
    return checked


def _texts(value: Any, place: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) for each in values):
        raise _wrong(place, f"expected a text or a list of texts, got {as_json(value)}", "type")
    return tuple(values)


def _keys(path: str | None, place: str) -> tuple[str, ...]:
    """Return the API keys in a file, one a line."""
    if path is None:
        return ()
    try:
        keys = tuple(line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise TridecodeError(f"{place}: {path}: {why}; give a file with one key a line") from None
    if not keys or not all(key.isascii() and key.isprintable() for key in keys):
        raise _wrong(place, f"{path}: expected one key of printable ASCII characters a line", "type")
    return keys


def _unknown(name: object, known: Any, place: str) -> ParameterError:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    fix = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
    where = f"{place}: " if place else ""
    return ParameterError(f"{where}there is no key {shown(name)}; {fix}", f"{place}.{name}".lstrip("."), "choice")


def _wrong(place: str, problem: str, code: str | None) -> ParameterError:
    return ParameterError(f"{place}: {problem}" if place else problem, place or None, code)
