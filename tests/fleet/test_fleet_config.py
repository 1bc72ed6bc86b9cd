"""The configuration of a fleet: defaults, and one error for each kind of mistake."""

import pytest

from tridecode.errors import ParameterError, TridecodeError
from tridecode.fleet.config import Config, build, read_config

BUNDLED = {"model": "bundled", "gpus": 0}


def parse(values) -> Config:
    return build(Config, values)


def test_defaults():
    config = parse({"models": [{"model": "Qwen/Qwen3-4B", "options": {"slots": 32, "graph_sizes": [1, 8]}}]})
    model = config.models[0]
    assert (model.name, model.least, model.gpus) == ("Qwen/Qwen3-4B", 1, 1)
    assert model.options == {"slots": 32, "max_queue": 256, "graph_sizes": [1, 8]}
    assert (config.port, config.gateways, config.routing.policy) == (None, 1, "prefix")


def test_a_model_on_cpus_needs_no_gpu():
    assert parse({"models": [{"options": {"device": "cpu"}}]}).models[0].gpus == 0


def test_a_directory_is_named_by_its_last_part(tmp_path):
    (tmp_path / "small").mkdir()
    model = parse({"models": [{"model": str(tmp_path / "small")}]}).models[0]
    assert (model.name, model.model) == ("small", str(tmp_path / "small"))


def test_directories_of_adapters_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    model = parse({"models": [{"options": {"adapters": {"sql": "own", "json": "bundled"}}}]}).models[0]
    assert model.options["adapters"] == {"sql": str(tmp_path / "own"), "json": "bundled"}
    assert model.adapters == ("sql", "json")


def test_autoscaling():
    model = parse({"models": [BUNDLED | {"autoscaling": {"min": 2, "max": 4}}]}).models[0]
    assert (model.least, model.autoscaling.max) == (2, 4)


def test_keys_are_lines_of_a_file(tmp_path):
    (tmp_path / "keys").write_text("one\n\ntwo\n")
    assert parse({"models": [BUNDLED], "api_key_file": str(tmp_path / "keys")}).api_key_file == ("one", "two")


@pytest.mark.parametrize(
    "values, argument",
    [
        (None, ""),
        ({}, "models"),
        ({"models": [3]}, "models[0]"),
        ({"modles": []}, "modles"),
        ({"models": []}, "models"),
        ({"models": [BUNDLED], "port": 70000}, "port"),
        ({"models": [BUNDLED | {"replica": 2}]}, "models[0].replica"),
        ({"models": [BUNDLED | {"replicas": 0}]}, "models[0].replicas"),
        ({"models": [BUNDLED | {"gpus": 2}]}, "models[0].gpus"),
        ({"models": [BUNDLED | {"options": {"slot": 2}}]}, "models[0].options.slot"),
        ({"models": [BUNDLED | {"options": {"slots": 0}}]}, "models[0].options.slots"),
        ({"models": [BUNDLED | {"options": []}]}, "models[0].options"),
        ({"models": [BUNDLED, BUNDLED]}, "models[1].name"),
        ({"models": [BUNDLED | {"options": {"adapters": {"bundled": "x"}}}]}, "models[0].options.adapters"),
        ({"models": [BUNDLED | {"options": {"adapters": ["x"]}}]}, "models[0].options.adapters"),
        (
            {"models": [{"name": name, "options": {"adapters": {"json": "bundled"}}} for name in "ab"]},
            "models[1].options.adapters",
        ),
        ({"models": [BUNDLED | {"replicas": 2, "autoscaling": {"min": 1, "max": 2}}]}, "models[0].replicas"),
        ({"models": [BUNDLED | {"autoscaling": {"min": 3, "max": 2}}]}, "models[0].autoscaling.min"),
        ({"models": [BUNDLED | {"autoscaling": {"minimum": 1}}]}, "models[0].autoscaling.minimum"),
        ({"models": [BUNDLED | {"api_key_file": "/nonexistent"}]}, "models[0].api_key_file"),
        ({"models": [BUNDLED], "routing": {"policy": "random"}}, "routing.policy"),
        ({"models": [BUNDLED], "ssl_keyfile": "key.pem", "port": 1}, "ssl_keyfile"),
        ({"models": [BUNDLED], "cors": [1]}, "cors"),
    ],
)
def test_an_error_names_the_key(values, argument):
    with pytest.raises(ParameterError) as caught:
        parse(values)
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)


def test_keys_of_one_model_need_keys_of_the_others(tmp_path):
    (tmp_path / "keys").write_text("one\n")
    models = [BUNDLED | {"api_key_file": str(tmp_path / "keys")}, BUNDLED | {"name": "other"}]
    with pytest.raises(ParameterError) as caught:
        parse({"models": models})
    assert caught.value.argument == "models[1].api_key_file"


@pytest.mark.parametrize("text", ["models: [", "- 1\n- 2\n", "models:\n  - {model: bundled, color: red}\n"])
def test_errors_of_a_file_begin_with_its_path(tmp_path, text):
    pytest.importorskip("yaml")
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(ParameterError) as caught:
        read_config(str(path))
    assert str(caught.value).startswith(f"{path}: ")


def test_an_absent_file(tmp_path):
    pytest.importorskip("yaml")
    with pytest.raises(TridecodeError):
        read_config(str(tmp_path / "none.yaml"))
