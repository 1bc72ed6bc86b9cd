"""Adapters of a server: models, endpoints that load and unload them, and metrics."""

import json
import os
import threading

import httpx
import openai
import pytest
from lora import modules_of, random_matrices, write_lora
from servers import Running

from tridecode import Engine, SamplingParams
from tridecode.checkpoint.hub import BUNDLED

CHAT = [{"role": "user", "content": "Name three rivers."}]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory of adapters for the bundled model."""
    root = tmp_path_factory.mktemp("adapters")
    modules = modules_of(BUNDLED)
    for i in range(3):
        write_lora(root / f"a{i}", random_matrices(modules, seed=i, scale=0.5))
    write_lora(root / "broken", random_matrices(modules), use_dora=True)
    (root.parent / "outside").mkdir(exist_ok=True)
    write_lora(root.parent / "outside" / "secret", random_matrices(modules))
    os.symlink(root.parent / "outside", root / "link")
    return root


@pytest.fixture(scope="module")
def served(root):
    adapters = {"first": root / "a0", "second": root / "a1"}
    with Engine.load(device="cpu", slots=4, adapters=adapters, adapter_memory=0.2) as engine:
        with Running(engine, adapter_root=str(root)) as running:
            yield running


def post(served, path, **body):
    return httpx.post(f"{served.url}{path}", json=body, timeout=60)


def expected(served, adapter):
    params = SamplingParams(temperature=0, max_tokens=12, adapter=adapter)
    return served.engine.generate(CHAT, params).text


def test_models_are_the_base_and_its_adapters(served):
    cards = {card.id: card.model_extra["parent"] for card in served.client().models.list().data}
    assert {name: cards[name] for name in ("bundled", "first", "second")} == {
        "bundled": None, "first": "bundled", "second": "bundled",
    }  # fmt: skip
    card = served.client().models.retrieve("second")
    assert card.id == "second" and card.model_extra["root"] == "second"
    with pytest.raises(openai.NotFoundError):
        served.client().models.retrieve("third")


@pytest.mark.parametrize("model", ["bundled", "first", "second"])
def test_the_model_of_a_request_names_its_adapter(served, model):
    got = served.client().chat.completions.create(model=model, messages=CHAT, temperature=0, max_tokens=12)
    assert got.model == model
    assert got.choices[0].message.content == expected(served, None if model == "bundled" else model)
    assert expected(served, None) != expected(served, "first") != expected(served, "second")


def test_all_apis_select_adapters(served):
    def answer(path, **body):
        return post(served, path, model="first", temperature=0, **body).json()

    plain = answer("/v1/completions", prompt="Once", max_tokens=3, echo=True, logprobs=1)
    base = post(served, "/v1/completions", model="bundled", temperature=0, prompt="Once", max_tokens=3, echo=True,
                logprobs=1).json()  # fmt: skip
    assert plain["model"] == "first"
    first, other = (each["choices"][0]["logprobs"]["token_logprobs"] for each in (plain, base))
    assert first[1] != other[1], "the log-probabilities of the prompt come from the adapter too"
    assert answer("/v1/messages", messages=CHAT, max_tokens=4)["model"] == "first"
    assert answer("/v1/responses", input="Hello", max_output_tokens=4)["model"] == "first"


def test_unknown_models_name_the_adapters(served):
    with pytest.raises(openai.NotFoundError) as error:
        served.client().chat.completions.create(model="third", messages=CHAT)
    assert "bundled" in error.value.message and "first" in error.value.message and error.value.code == "model_not_found"


def test_clients_load_and_unload_adapters(served):
    loaded = post(served, "/v1/load_lora_adapter", lora_name="third", lora_path="a2")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'third' added successfully.")
    got = served.client().chat.completions.create(model="third", messages=CHAT, temperature=0, max_tokens=12)
    assert got.choices[0].message.content == expected(served, "third")
    again = post(served, "/v1/load_lora_adapter", lora_name="third", lora_path="a2")
    assert again.status_code == 400 and "loaded already" in again.json()["error"]["message"]
    gone = post(served, "/v1/unload_lora_adapter", lora_name="third", lora_int_id=5)
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'third' removed successfully.")
    assert post(served, "/v1/unload_lora_adapter", lora_name="third").status_code == 404
    assert "third" not in served.engine.adapters


PATHS = {
    "parent": "../outside/secret", "root": ".", "link": "link/secret", "missing": "nowhere", "empty": "",
    "nul": "a0\0", "long": "a" * 5000, "file": "a0/adapter_config.json",
}  # fmt: skip


@pytest.mark.parametrize("kind", [*PATHS, "absolute", "broken"])
def test_only_directories_below_the_root_are_loaded(served, root, kind):
    path = PATHS.get(kind, str(root.parent / "outside" / "secret") if kind == "absolute" else "broken")
    response = post(served, "/v1/load_lora_adapter", lora_name="bad", lora_path=path)
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and "\n" not in message and str(root) not in message, message
    assert response.json()["error"]["param"] == "lora_path" and "bad" not in served.engine.adapters
    assert kind != "broken" or "DoRA" in message


@pytest.mark.parametrize(
    "body", [{}, {"lora_name": "x"}, {"lora_name": 5, "lora_path": "a2"}, {"lora_name": "a b", "lora_path": "a2"},
             {"lora_name": "bundled", "lora_path": "a2"}, {"lora_name": "x", "lora_path": "a2", "load_inplace": True},
             {"lora_name": "x", "lora_path": "a2", "unknown": 1}],
)  # fmt: skip
def test_wrong_requests_to_load(served, body):
    response = post(served, "/v1/load_lora_adapter", **body)
    assert response.status_code == 400 and response.json()["error"]["message"], body
    assert {*served.engine.adapters} == {"first", "second"}


def test_an_absolute_path_below_the_root(served, root):
    assert post(served, "/v1/load_lora_adapter", lora_name="full", lora_path=str(root / "a2")).status_code == 200
    assert post(served, "/v1/unload_lora_adapter", lora_name="full").status_code == 200


def test_streams_continue_while_adapters_are_loaded(served):
    """Loads and unloads of one adapter do not change the answers of others."""
    wanted, stop = expected(served, "first"), threading.Event()

    def change():
        while not stop.is_set():
            post(served, "/v1/load_lora_adapter", lora_name="other", lora_path="a2")
            post(served, "/v1/unload_lora_adapter", lora_name="other")

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(5):
            got = served.client().chat.completions.create(model="first", messages=CHAT, temperature=0, max_tokens=12)
            assert got.choices[0].message.content == wanted
    finally:
        stop.set()
        thread.join()


def test_metrics_count_adapters(served):
    served.client().chat.completions.create(model="second", messages=CHAT, temperature=0, max_tokens=3)
    text = httpx.get(f"{served.url}/metrics").text
    samples = {line.split(" ")[0]: float(line.split(" ")[1]) for line in text.splitlines() if line[0] != "#"}
    name = '{adapter="second",model_name="bundled"}'
    assert samples[f"tridecode:adapter_requests_total{name}"] >= 1
    assert samples[f"tridecode:adapter_generation_tokens_total{name}"] >= 3
    assert samples['tridecode:adapters{model_name="bundled"}'] == 2
    assert samples['tridecode:adapters_on_device{model_name="bundled"}'] >= 2
    assert samples['tridecode:adapter_loads_total{model_name="bundled"}'] >= 2


def test_without_a_root_there_are_no_endpoints(root):
    with Engine.load(device="cpu", slots=2, adapters={"first": root / "a0"}) as engine, Running(engine) as running:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            response = post(running, path, lora_name="x", lora_path="a1")
            assert response.status_code == 404 and "does not exist" in response.json()["error"]["message"]
        assert "lora" not in json.dumps(httpx.get(f"{running.url}/v1").json())


def test_a_key_protects_the_endpoints(root):
    with Engine.load(device="cpu", slots=2, adapter_memory=0.2) as engine:
        with Running(engine, adapter_root=str(root), api_keys=("secret",)) as running:
            body = {"lora_name": "x", "lora_path": "a1"}
            url = f"{running.url}/v1/load_lora_adapter"
            assert httpx.post(url, json=body).status_code == 401 and not engine.adapters
            headers = {"Authorization": "Bearer secret"}
            assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200 and engine.adapters
