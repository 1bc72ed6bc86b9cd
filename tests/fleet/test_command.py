"""The errors of `tridecode fleet`: one line each."""

import sys
from types import SimpleNamespace

import pytest

from tridecode.cli.fleet import check_resources
from tridecode.errors import TridecodeError
from tridecode.fleet.config import Config, build

CPU = {"model": "bundled", "gpus": 0}


def one_line(result) -> str:
    code, out, err = result
    assert code in (1, 2) and out == "" and err.startswith("tridecode: error: ") and err.count("\n") == 1
    return err


def test_without_the_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'tridecode[fleet]'" in one_line(run("fleet", "--gpus", "0"))


def test_an_unreachable_cluster(run):
    pytest.importorskip("ray")
    assert "ray start --head" in one_line(run("fleet", "--gpus", "0", "--address", "127.0.0.1:1"))


def test_an_update_without_a_cluster_starts_none(run, monkeypatch):
    ray = pytest.importorskip("ray")
    addresses = []

    def init(address, **options):
        addresses.append(address)
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "no Ray cluster runs on this machine" in one_line(run("fleet", "--gpus", "0", "--update"))
    assert addresses == ["auto"]


def test_a_wrong_file(run, tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "fleet.yaml"
    path.write_text("models: [{model: bundled, replica: 2}]")
    assert f"{path}: models[0]: there is no key 'replica'; did you mean replicas?" in one_line(run("fleet", path))


def test_keys_of_engine_options_are_named_as_in_the_file(run, tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text("models: [{options: {kv_dtyp: fp8}}]")
    assert "did you mean kv_dtype?" in one_line(run("fleet", path))


def test_a_wrong_number_of_replicas(run):
    assert "replicas" in one_line(run("fleet", "--replicas", "0"))


def test_options_of_a_model_exclude_a_file(run, tmp_path):
    code, _, err = run("fleet", tmp_path / "fleet.yaml", "--replicas", "2")
    assert code == 2 and "--replicas cannot be used with a file" in err


@pytest.mark.parametrize(
    "models, there, message",
    [
        ([{"model": "bundled"}], {"CPU": 8}, "need 1 GPUs, the cluster has 0; set gpus to 0"),
        ([{"model": "bundled", "replicas": 3}], {"CPU": 8, "GPU": 2}, "need 3 GPUs, the cluster has 2; start fewer"),
        ([CPU, CPU | {"name": "b", "replicas": 8}], {"CPU": 8}, "need 9 CPUs, the cluster has 8; start fewer"),
    ],
)
def test_too_few_resources(models, there, message):
    with pytest.raises(TridecodeError, match=message):
        check_resources(SimpleNamespace(cluster_resources=lambda: there), build(Config, {"models": models}))
