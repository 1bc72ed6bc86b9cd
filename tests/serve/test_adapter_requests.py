"""Requests with adapters: texts, prefix reuse, drafts, preemption, and the adapters that the device holds."""

import random
import threading
import time
import weakref

import pytest
import torch
from checkpoints import write_tiny
from gguf_files import write_gguf
from lora import merge, modules_of, random_matrices, write_lora

from tridecode import Engine, SamplingParams
from tridecode.checkpoint.load import load_config
from tridecode.errors import CheckpointError, ParameterError
from tridecode.state.adapters import AdapterPool, Residents, adapter_bytes

PROMPTS = [[(7 * i + 11 * seed) % 300 + 5 for i in range(20 + 9 * seed)] for seed in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
COUNT = 12


class Tuned:
    """A tiny checkpoint, adapters for it, and the greedy answers of the checkpoints that they are merged into."""

    def __init__(self, path, family: str, count: int):
        self.path, self.base = path, write_tiny(path / "base", family)
        modules = modules_of(self.base)
        self.matrices = [random_matrices(modules, 4 + 8 * (i % 3), seed=i, scale=0.4) for i in range(count)]
        ranks = [4 + 8 * (i % 3) for i in range(count)]
        self.adapters = [
            write_lora(path / f"a{i}", each, rank=rank) for i, (each, rank) in enumerate(zip(self.matrices, ranks))
        ]
        self._texts: dict[int | None, list[tuple[int, ...]]] = {}

    def load(self, **options) -> Engine:
        return Engine.load(self.base, **{"device": "cpu", "max_seq_len": 256, "slots": 4, "speculate": "off"} | options)

    def texts(self, number: int | None) -> list[tuple[int, ...]]:
        """Return the answers to PROMPTS with adapter `number` merged into the weights, or of the base model."""
        if number not in self._texts:
            checkpoint = self.base
            if number is not None:
                checkpoint = merge(self.base, self.path / f"merged{number}", self.matrices[number])
            with Engine.load(checkpoint, device="cpu", max_seq_len=256, speculate="off") as engine:
                self._texts[number] = [engine.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
        return self._texts[number]

    def sources(self, *numbers: int) -> dict:
        return {f"a{number}": self.adapters[number] for number in numbers}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    return Tuned(tmp_path_factory.mktemp("tuned"), "qwen3", COUNT)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return Tuned(tmp_path_factory.mktemp("hybrid"), "qwen3.5", 3)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A model with experts. Adapters change its attention, and the MLP of its second layer."""
    return Tuned(tmp_path_factory.mktemp("mixture"), "qwen3-moe", 3)


def room_for(model: Tuned, count: int) -> dict:
    """Return options for a device with room for `count` adapters of every rank."""
    size = adapter_bytes(load_config(model.base), torch.float32, 32)
    return {"adapter_memory": (count + 0.5) * size / 2**30, "max_rank": 32}


def mixed(engine: Engine, texts, numbers, params=GREEDY) -> None:
    """Run the prompts with several adapters at once, and compare each answer with the merged checkpoint's."""
    jobs = [(number, place) for number in numbers for place in range(len(PROMPTS))]
    requests = [
        engine.submit(PROMPTS[place], params, adapter=None if number is None else f"a{number}")
        for number, place in jobs
    ]
    for (number, place), request in zip(jobs, requests):
        assert request.result().token_ids == texts(number)[place], (number, place)
    engine.scheduler.assert_consistent()


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """A model with experts and recurrent layers, whose projections have the rows of each head together."""
    return Tuned(tmp_path_factory.mktemp("grouped"), "qwen3-next", 3)


@pytest.mark.parametrize("name", ["tuned", "hybrid", "mixture", "grouped"])
def test_texts_of_a_mixed_batch_equal_the_texts_of_merged_weights(name, request):
    model = request.getfixturevalue(name)
    with model.load(adapters=model.sources(0, 1, 2)) as engine:
        mixed(engine, model.texts, [None, 0, 1, 2])
        assert {stat.kind for stat in engine.graph_stats()} >= {"greedy+adapters", "prompt+adapters"}


def test_gguf_files_have_the_adapters_of_their_checkpoints(tmp_path):
    """A GGUF file of a Llama model has rows of q and k in another order, which the loader restores."""
    model = Tuned(tmp_path, "llama", 1)
    file = write_gguf(model.base, tmp_path / "model.gguf")
    with Engine.load(file, device="cpu", max_seq_len=256, speculate="off", adapters=model.sources(0)) as engine:
        mixed(engine, model.texts, [None, 0])


def test_recurrent_layers_of_gguf_files_refuse_adapters(hybrid, tmp_path):
    """The V heads of a GGUF file keep the order of the file."""
    file = write_gguf(hybrid.base, tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="Hugging Face checkpoint"):
        Engine.load(file, device="cpu", max_seq_len=256, adapters=hybrid.sources(0))


def test_passes_without_adapters_have_their_own_form(tuned):
    with tuned.load(adapters=tuned.sources(0)) as engine:
        assert engine.generate(PROMPTS[0], GREEDY).token_ids == tuned.texts(None)[0]
        assert {stat.kind for stat in engine.graph_stats()} == {"greedy", "prompt"}


def test_parameters_name_an_adapter(tuned):
    with tuned.load(adapters=tuned.sources(1), slots=1) as engine:
        params = engine.default_params(temperature=0.0, max_tokens=12, ignore_eos=True, adapter="a1")
        assert engine.generate(PROMPTS[2], params).token_ids == tuned.texts(1)[2]
        assert [result.token_ids for result in engine.generate_many(PROMPTS[:2], params)] == tuned.texts(1)[:2]
        assert engine.submit(PROMPTS[2], params, adapter="a1").result().token_ids == tuned.texts(1)[2]


def test_prefixes_are_shared_within_an_adapter_only(tuned, tmp_path):
    with tuned.load(adapters=tuned.sources(0, 1), max_rank=32) as engine:
        prompt = PROMPTS[3] + PROMPTS[2] + PROMPTS[3]

        def reused(adapter):
            return engine.submit(prompt, GREEDY, adapter=adapter).result().usage.reused_tokens

        assert [reused(name) for name in ("a0", "a1", None)] == [0, 0, 0]
        assert all(reused(name) > 0 for name in ("a0", "a1", None))
        engine.unload_adapter("a0")
        engine.load_adapter("a0", tuned.adapters[2])  # The name is the same, but not the adapter.
        assert reused("a0") == 0 and reused("a1") > 0


def test_drafts_are_verified_with_the_adapter(tuned):
    repeating = PROMPTS[0] * 3
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with tuned.load(adapters=tuned.sources(0, 1)) as engine:
        plain = [engine.submit(repeating, params, adapter=name).result() for name in (None, "a0", "a1")]
    with tuned.load(adapters=tuned.sources(0, 1), speculate="ngram") as engine:
        requests = [engine.submit(repeating, params, adapter=name) for name in (None, "a0", "a1")]
        drafted = [request.result() for request in requests]
        assert any(" x" in stat.kind and "adapters" in stat.kind for stat in engine.graph_stats())
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert sum(result.usage.drafted for result in drafted) > 0


def test_preempted_requests_keep_their_adapters(tuned):
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with tuned.load(adapters=tuned.sources(0, 1, 2)) as engine:
        names = (None, "a0", "a1", "a2")
        alone = [engine.submit(PROMPTS[1], params, adapter=name).result().token_ids for name in names]
    with tuned.load(adapters=tuned.sources(0, 1, 2), kv_tokens=320) as engine:
        requests = [engine.submit(PROMPTS[1], params, adapter=name) for name in names]
        assert [request.result().token_ids for request in requests] == alone
        assert engine.scheduler.preemptions > 0
        engine.scheduler.assert_consistent()


@pytest.mark.parametrize(
    "options",
    [dict(batch_invariant=True), dict(kv_offload=0.01, kv_tokens=896), dict(prefix_sharing=False), dict(slots=1)],
    ids=["batch_invariant", "kv_offload", "no_prefix_sharing", "one_slot"],
)
def test_other_modes_of_the_engine(tuned, options):
    with tuned.load(adapters=tuned.sources(0, 1), **options) as engine:
        mixed(engine, tuned.texts, [None, 0, 1])


def test_response_formats_and_scores(tuned):
    with tuned.load(adapters=tuned.sources(0)) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=20, regex="[ab]{3}c", adapter="a0")
        text = engine.generate("Hello", params).text
        assert len(text) == 4 and set(text[:3]) <= {"a", "b"} and text[3] == "c"
        base, own = (engine.submit_score(PROMPTS[0], 1, name).result() for name in (None, "a0"))
        assert base.token_ids[:-1] == own.token_ids[:-1] and base.logprobs[3] != own.logprobs[3]


# ---- adapters on the device


def test_adapters_replace_each_other_on_the_device(tuned):
    with tuned.load(adapters=tuned.sources(0, 1, 2), **room_for(tuned, 2)) as engine:
        residents = engine.scheduler.slots.adapters
        assert len(residents.pool) == 2
        for number in (0, 1, 2, 1, 0, 2):
            answer = engine.submit(PROMPTS[0], GREEDY, adapter=f"a{number}").result().token_ids
            assert answer == tuned.texts(number)[0], number
        # The loads are a0 and a1, a2 in place of a0, a0 in place of a2, and a2 in place of a1.
        assert residents.loads == 5 and sorted(residents.names()) == ["a0", "a2"]
        mixed(engine, tuned.texts, [2, None, 0, 1])


def test_a_request_passes_one_whose_adapter_is_loading(tuned, monkeypatch):
    begin, load = threading.Event(), Residents._load
    with tuned.load(adapters=tuned.sources(0), **room_for(tuned, 2)) as engine:
        engine.submit(PROMPTS[0], GREEDY, adapter="a0").result()
        monkeypatch.setattr(Residents, "_load", lambda *args: begin.wait(60) and load(*args))
        engine.load_adapter("a1", tuned.adapters[1])
        late, other = (engine.submit(PROMPTS[1], GREEDY, adapter=name) for name in ("a1", "a0"))
        assert other.result().token_ids == tuned.texts(0)[1] and late.finish_reason is None
        begin.set()
        assert late.result().token_ids == tuned.texts(1)[1]


def test_no_adapter_leaves_the_device_while_a_request_uses_it(tuned):
    with tuned.load(adapters=tuned.sources(0, 1), **room_for(tuned, 1)) as engine:
        first, second = (engine.submit(PROMPTS[2], GREEDY, adapter=name) for name in ("a0", "a1"))
        third = engine.submit(PROMPTS[2], GREEDY)
        while first.finish_reason is None:
            engine.step()
            assert second.completion_tokens == 0 or first.finish_reason
        assert [each.result().token_ids for each in (first, second, third)] == [
            tuned.texts(number)[2] for number in (0, 1, None)
        ]


def test_requests_without_an_adapter_pass_those_that_wait_for_a_place(tuned):
    """Requests with adapters keep their order. Requests of the base model do not delay them."""
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with tuned.load(adapters=tuned.sources(0, 1), slots=2, **room_for(tuned, 1)) as engine:
        first = engine.submit(PROMPTS[0], long, adapter="a0")
        while not first.chunks:
            engine.step()
        others = [engine.submit(PROMPTS[2], GREEDY, adapter=name) for name in ("a1", "a0", "a1")]
        base = [engine.submit(PROMPTS[2], GREEDY) for _ in range(20)]
        assert base[0].result().token_ids == tuned.texts(None)[2] and first.finish_reason is None
        assert [each.result().token_ids for each in others] == [tuned.texts(number)[2] for number in (1, 0, 1)]
        assert first.first < others[0].first < others[1].first < others[2].first
        assert not all(each.finish_reason for each in base), "requests of the base model delay the others"


def test_a_failed_copy_fails_only_its_request(tuned, monkeypatch):
    with tuned.load(adapters=tuned.sources(0), **room_for(tuned, 2)) as engine:
        engine.submit(PROMPTS[0], GREEDY, adapter="a0").result()

        def fail(self, number, adapter, before):
            raise RuntimeError("the copy failed")

        with monkeypatch.context() as patched:
            patched.setattr(Residents, "_load", fail)
            engine.load_adapter("a1", tuned.adapters[1])
            failing, other = (engine.submit(PROMPTS[0], GREEDY, adapter=name) for name in ("a1", "a0"))
            assert other.result().token_ids == tuned.texts(0)[0]
            with pytest.raises(RuntimeError, match="the copy failed"):
                failing.result()
        assert engine.submit(PROMPTS[0], GREEDY, adapter="a1").result().token_ids == tuned.texts(1)[0]
        engine.scheduler.assert_consistent()


def test_an_adapter_whose_copy_failed_is_not_listed(tuned, monkeypatch):
    def fail(self, number, adapter, before):
        raise RuntimeError("the copy failed")

    with tuned.load(adapters=tuned.sources(0), **room_for(tuned, 2)) as engine:
        engine.submit(PROMPTS[0], GREEDY, adapter="a0").result()
        monkeypatch.setattr(Residents, "_load", fail)
        residents, adapter = engine.scheduler.slots.adapters, engine.load_adapter("a1", tuned.adapters[1])
        assert residents.acquire(adapter, ()) is None
        residents.wait(60)
        assert residents.names() == ["a0"] and residents.load().on_device == 1
        with pytest.raises(RuntimeError, match="the copy failed"):
            residents.acquire(adapter, ())


def test_close_stops_a_copy(tuned, monkeypatch):
    """The copy in progress ends before its next matrix, and those after it before their first one."""
    copies, copied, closing = AdapterPool.copies, [], threading.Event()

    def slow(pool, number, adapter):
        for copy in copies(pool, number, adapter):
            copied.append(adapter.name)
            yield copy
            assert closing.wait(60)

    engine = tuned.load(**room_for(tuned, 2))
    residents, close = engine.scheduler.slots.adapters, Residents.close
    monkeypatch.setattr(AdapterPool, "copies", slow)
    monkeypatch.setattr(Residents, "close", lambda self: (threading.Timer(0.1, closing.set).start(), close(self)))
    adapters = [engine.load_adapter(f"a{number}", tuned.adapters[number]) for number in (0, 1)]
    while not copied:
        time.sleep(0.001)
    engine.close()
    assert all(copied.count(adapter.name) <= 2 < len(adapter.linears) for adapter in adapters)
    pool = weakref.ref(residents.pool)
    del residents, adapters
    assert pool() is None, "a cancelled copy refers to the adapters on the device"


def test_unloaded_adapters_serve_the_requests_that_have_them(tuned):
    with tuned.load(adapters=tuned.sources(0, 1)) as engine:
        request = engine.submit(PROMPTS[0], GREEDY, adapter="a0")
        engine.unload_adapter("a0")
        assert [*engine.adapters] == ["a1"]
        with pytest.raises(ParameterError) as error:
            engine.submit(PROMPTS[0], GREEDY, adapter="a0")
        assert error.value.argument == "adapter" and "a1" in str(error.value)
        assert request.result().token_ids == tuned.texts(0)[0]


def test_unloaded_adapters_leave_the_device(tuned):
    with tuned.load(adapters=tuned.sources(0, 1), **room_for(tuned, 2)) as engine:
        residents = engine.scheduler.slots.adapters
        request = engine.submit(PROMPTS[0], GREEDY, adapter="a0")
        while not request.chunks:
            engine.step()
        engine.unload_adapter("a0")
        assert residents.names() == ["a0", "a1"], "an adapter leaves the device while a request uses it"
        engine.unload_adapter("a1")
        assert residents.names() == ["a0"]
        engine.load_adapter("a2", tuned.adapters[2])
        assert engine.submit(PROMPTS[0], GREEDY, adapter="a2").result().token_ids == tuned.texts(2)[0]
        assert request.result().token_ids == tuned.texts(0)[0]
        engine.scheduler.assert_consistent()


def test_wrong_names_and_options(tuned, tmp_path):
    with tuned.load() as engine:
        with pytest.raises(ParameterError, match="adapter_memory"):
            engine.load_adapter("a0", tuned.adapters[0])
        with pytest.raises(ParameterError, match="none is loaded"):
            engine.submit(PROMPTS[0], GREEDY, adapter="a0")
        with pytest.raises(ParameterError):
            engine.unload_adapter("a0")
    with tuned.load(adapters=tuned.sources(0)) as engine:
        with pytest.raises(ParameterError, match="loaded already"):
            engine.load_adapter("a0", tuned.adapters[1])
        for name in ("", "a b", "-a", 5, "a" * 101):
            with pytest.raises(ParameterError):
                engine.load_adapter(name, tuned.adapters[1])
        with pytest.raises(CheckpointError, match="max_rank"):
            engine.load_adapter("a1", tuned.adapters[2])  # rank 20
        assert [*engine.adapters] == ["a0"]
    for options in (
        dict(max_rank=8), dict(adapters=tuned.sources(2), max_rank=16), dict(adapter_memory=1e-4),
        dict(adapters={"": "x"}), dict(adapters=["a0"]), dict(adapters={"a": 5}), dict(adapters=[("a", "x")] * 2),
    ):  # fmt: skip
        with pytest.raises(ParameterError):
            tuned.load(**options)
    with pytest.raises(CheckpointError):
        tuned.load(adapters={"a0": tmp_path})


def test_random_operations_leave_nothing_over(tuned):
    """There are 12 adapters, and room for 4. Every answer is a prefix of the merged checkpoint's."""
    dice = random.Random(3)
    with tuned.load(**room_for(tuned, 4), kv_tokens=512) as engine:
        contents: dict[str, int] = {}  # Name of a loaded adapter -> its number.
        running, ended = [], 0

        def check(finished):
            number, place, request = finished
            expected = tuned.texts(number)[place]
            tokens = tuple(chunk.token_id for chunk in request.chunks if chunk.token_id is not None)
            assert tokens == expected[: len(tokens)], (number, place)
            assert request.cancelled or len(tokens) == request.params.max_tokens

        for _ in range(1000):
            action = dice.random()
            if action < 0.12:
                name, number = f"n{dice.randrange(COUNT)}", dice.randrange(COUNT)
                if name in contents:
                    with pytest.raises(ParameterError):
                        engine.load_adapter(name, tuned.adapters[number])
                else:
                    engine.load_adapter(name, tuned.adapters[number])
                    contents[name] = number
            elif action < 0.2 and contents:
                name = dice.choice([*contents])
                engine.unload_adapter(name)
                del contents[name]
            elif action < 0.45 and len(running) < 12:
                name = dice.choice([None, *contents])
                place, count = dice.randrange(len(PROMPTS)), dice.randrange(1, 13)
                params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, adapter=name)
                running.append((contents.get(name), place, engine.submit(PROMPTS[place], params)))
            elif action < 0.5 and running:
                dice.choice(running)[2].cancel()
            else:
                engine.step()
            for finished in [each for each in running if each[2].finish_reason]:
                running.remove(finished)
                check(finished)
                ended += 1
            if dice.random() < 0.05:
                engine.scheduler.assert_consistent()
        while engine.step():
            pass
        for finished in running:
            check(finished)
        engine.scheduler.assert_consistent()
        slots = engine.scheduler.slots
        assert ended > 150 and slots.adapters.loads > 20 and not any(slot.busy for slot in slots)
        for name in [*contents]:
            engine.unload_adapter(name)
        assert not engine.adapters and engine.generate(PROMPTS[0], GREEDY).token_ids == tuned.texts(None)[0]


def test_an_interrupt_during_any_step_loses_nothing(tuned, monkeypatch):
    """The scheduler continues all requests after an error at a random call."""
    with tuned.load(adapters=tuned.sources(0, 1, 2), adapter_memory=0.02) as engine:
        slots, dice = engine.scheduler.slots, random.Random(1)
        set_adapter = slots.set_adapter

        def interrupted(slot, number):
            if dice.random() < 0.5:
                raise KeyboardInterrupt
            set_adapter(slot, number)

        monkeypatch.setattr(slots, "set_adapter", interrupted)
        jobs = [(number, engine.submit(PROMPTS[1], GREEDY, adapter=f"a{number}")) for number in (0, 1, 2)]
        left = True
        while left:
            try:
                left = engine.step()
            except KeyboardInterrupt:
                pass
        for number, request in jobs:
            assert request.result().token_ids == tuned.texts(number)[1]
        engine.scheduler.assert_consistent()


def test_repr_and_bytes(tuned):
    with tuned.load(adapters=tuned.sources(0)) as engine:
        adapter = engine.adapters["a0"]
        assert repr(adapter).startswith("Adapter(name='a0', rank=16") and adapter.nbytes > 0
        pool = engine.model.pool
        assert sum(tensor.nbytes for tensor in pool.tensors().values()) <= engine.plan.pools["adapters"]
        assert isinstance(pool.weights, torch.Tensor) and "adapters=1" in repr(pool)
