"""Models in GGUF files: what llama.cpp's converter changed is undone, for each family."""

import json
from dataclasses import replace

import pytest
import torch
from checkpoints import write_tiny
from gguf_files import write_gguf
from util import relative_rms

from tridecode import Engine, SamplingParams
from tridecode.checkpoint.gguf.schemes import with_file_type
from tridecode.checkpoint.load import load_config, load_weights, random_weights
from tridecode.errors import CheckpointError, ParameterError
from tridecode.models.presets import GGUF_TYPES, PRESETS

PROMPT = [3, 40, 5, 77, 120, 9, 300, 12, 250, 31]
INTERVAL = dict(layer_types=["linear_attention", "full_attention"] * 2)
FAMILIES = {
    "qwen3": {},
    "qwen3-tied": {},
    "llama": {},
    "qwen2": {},
    "mistral-full": {},
    "qwen3.5": INTERVAL,
    "qwen3-moe": {},
    "qwen2-moe": {},
    "qwen3.5-moe": {},
    "qwen3-next": dict(layer_types=["linear_attention", "linear_attention", "full_attention"]),
    "qwen3.5-g3": dict(layer_types=["linear_attention", "linear_attention", "full_attention"]),
}
WIDE = dict(hidden_size=320, intermediate_size=512)  # Blocks of 32 numbers divide the rows.


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """A checkpoint, and a GGUF file of it."""
    folder = tmp_path_factory.mktemp(request.param)
    source = write_tiny(folder / "hf", request.param, **FAMILIES[request.param])
    return source, write_gguf(source, folder / "model.gguf", mtp="3.5" in request.param)


def test_scores_of_the_checkpoint(pair):
    source, file = pair
    with Engine.load(source, device="cpu") as one, Engine.load(file, device="cpu") as other:
        assert other.config.family.removeprefix("llama") in (one.config.family, "")
        torch.testing.assert_close(other.score(PROMPT), one.score(PROMPT), rtol=1e-5, atol=1e-5)
        assert other.config.dtype == "float32" and other.config.max_position == one.config.max_position


def test_prompt_and_tokens_of_the_checkpoint(pair):
    source, file = pair
    chat = [{"role": "user", "content": "Hello, 42 foxes! <|im_end|> é"}]
    with Engine.load(source, device="cpu") as one, Engine.load(file, device="cpu") as other:
        assert other.tokenizer.encode_chat(chat) == one.tokenizer.encode_chat(chat)
        assert other.tokenizer.special_ids == one.tokenizer.special_ids
        assert other.config.stop_ids == (2, 0) and other.tokenizer.eos_id == one.tokenizer.eos_id
        answers = [
            engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12)).token_ids for engine in (one, other)
        ]
        assert answers[0] == answers[1]


def test_convert_restores_the_checkpoint(pair, run, tmp_path):
    source, file = pair
    out = tmp_path / "out"
    assert run("convert", file, out, "--quiet")[0] == 0
    from safetensors.torch import load_file

    tensors = {name: x for each in sorted(out.glob("*.safetensors")) for name, x in load_file(each).items()}
    expected = {name: x for each in sorted(source.glob("*.safetensors")) for name, x in load_file(each).items()}
    assert tensors.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(tensors[name], x, rtol=0, atol=2e-7 if "norm" in name or "A_log" in name else 0)
    one, other = load_config(source), load_config(out)
    assert other.layers == one.layers or other.family != one.family
    chat = [{"role": "user", "content": "Hello"}]
    with Engine.load(source, device="cpu") as one, Engine.load(out, device="cpu") as other:
        assert other.tokenizer.encode_chat(chat) == one.tokenizer.encode_chat(chat)
        torch.testing.assert_close(other.score(PROMPT), one.score(PROMPT), rtol=1e-4, atol=1e-4)


def test_transformers_reads_the_converted_checkpoint(pair, run, tmp_path):
    transformers = pytest.importorskip("transformers")
    _, file = pair
    out = tmp_path / "out"
    assert run("convert", file, out, "--quiet")[0] == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    with Engine.load(file, device="cpu") as engine:
        torch.testing.assert_close(engine.score(PROMPT), expected, rtol=1e-4, atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("Hello, fox")["input_ids"]) == "Hello, fox"


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen3.5"])
def test_quantized_matrices(type_name, family, tmp_path):
    """The weights on the device are those that the gguf package computes, with the same rows undone."""
    gguf = pytest.importorskip("gguf")
    source = write_tiny(tmp_path / "hf", family, **WIDE, **(INTERVAL if "3.5" in family else {}))
    file = write_gguf(source, tmp_path / "model.gguf", type_name)
    reader = gguf.GGUFReader(file)
    values = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    spec = load_config(file)
    weights = load_weights(file, spec, "cpu", torch.float32)
    assert torch.equal(weights.embed, torch.from_numpy(values["token_embd.weight"].copy()))
    down = torch.from_numpy(values["blk.1.ffn_down.weight"].copy())
    assert torch.equal(weights.layers[1].linears["down"].weight, down)
    if family == "llama":
        q = torch.from_numpy(values["blk.1.attn_q.weight"].copy())
        q = q.view(5, 32, 2, -1).transpose(1, 2).reshape(q.shape)
        assert torch.equal(weights.layers[1].linears["qkv"].weight[: len(q)], q)
    assert spec.dtype == {"F16": "float16"}.get(type_name, "bfloat16")


def test_llama3_factors_must_be_known(tmp_path):
    source = write_tiny(tmp_path / "hf", "llama", num_hidden_layers=1)
    file = write_gguf(source, tmp_path / "m.gguf", tensors={"rope_freqs.weight": torch.linspace(1, 3, 32)})
    with pytest.raises(CheckpointError, match="rope_freqs.weight holds other factors"):
        load_config(file)


def test_yarn_and_linear_scaling(tmp_path):
    source = write_tiny(tmp_path / "hf", "qwen3", num_hidden_layers=1)

    def yarn(writer):
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)
        writer.add_rope_scaling_yarn_beta_fast(20.0)
        writer.add_rope_scaling_yarn_attn_factor(0.5)
        writer.add_float32("qwen3.rope.scaling.rope_theta", 3.0)

    spec = load_config(write_gguf(source, tmp_path / "m.gguf", change=yarn))
    rope = spec.layers[0].mixer.rope
    assert (rope.kind, rope.factor, rope.original_max_position, rope.high_freq_factor) == ("yarn", 4.0, 128, 20.0)
    (note,) = spec.notes
    assert rope.theta != 3 and "m.gguf: rope_parameters: 'yarn_attn_factor' 0.5: without effect" in note


@pytest.mark.parametrize("key", ["scaling.factor", "scale_linear"])
def test_scaling_without_a_type_is_named(key, tmp_path):
    source = write_tiny(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    change = lambda writer: writer.add_float32(f"qwen3.rope.{key}", 4.0)  # noqa: E731
    spec = load_config(write_gguf(source, tmp_path / "m.gguf", change=change))
    (note,) = spec.notes
    assert spec.layers[0].mixer.rope.kind == "default" and f"'{key.rpartition('.')[2]}' 4.0: without effect" in note


def test_sampling_defaults(tmp_path):
    source = write_tiny(tmp_path / "hf", "qwen3", num_hidden_layers=1)

    def sampling(writer):
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", 20)

    spec = load_config(write_gguf(source, tmp_path / "m.gguf", change=sampling))
    assert dict(spec.generation_defaults) == {"temperature": 0.6, "top_k": 20} and not spec.notes


def test_quantize_needs_a_directory(pair, run, tmp_path):
    code, _, err = run("quantize", pair[1], tmp_path / "out", "--quiet")
    assert code == 1 and "tridecode convert" in err


def test_config_matches_the_checkpoint(pair):
    source, file = pair
    one, other = load_config(source), load_config(file)
    assert {*one.stop_ids} == {*other.stop_ids} and one.vocab_size == other.vocab_size
    assert json.loads((source / "config.json").read_text())["rms_norm_eps"] == other.eps


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "qwen3.5"])
def test_packed_weights(type_name, family, tmp_path):
    """As a GPU loads them: packed tensors have the values of the weights that a CPU expands, also a tied LM head."""
    source = write_tiny(tmp_path / "hf", family, **WIDE, **(INTERVAL if "3.5" in family else {}))
    file = write_gguf(source, tmp_path / "model.gguf", type_name)
    spec = load_config(file)
    packed, expanded = (load_weights(file, spec, "cpu", torch.float32, packs=packs) for packs in (True, False))
    assert torch.equal(packed.embed, expanded.embed) and packed.lm_head.packed is not None
    for one, other in zip(packed.linears(), expanded.linears()):
        assert one.packed is not None and other.packed is None
        assert torch.equal(one.matrix(), other.weight)
    assert (packed.lm_head.nbytes < 0.35 * expanded.lm_head.nbytes) and expanded.tied == (family == "qwen3-tied")


def test_other_types_are_expanded_with_a_note(tmp_path):
    source = write_tiny(tmp_path / "hf", "llama", **WIDE)
    file = write_gguf(source, tmp_path / "model.gguf", "MXFP4")
    spec = load_config(file)
    assert spec.checkpoint_quantization is None
    assert any("of the types MXFP4 are expanded to 16 bits: 0.00 instead of 0.00 GiB" in note for note in spec.notes)
    weights = load_weights(file, spec, "cpu", torch.bfloat16, packs=True)
    assert {linear.number_type for linear in weights.linears()} == {"dense"}


def test_quantize_of_a_quantized_file(tmp_path):
    source = write_tiny(tmp_path / "hf", "llama", **WIDE)
    file = write_gguf(source, tmp_path / "model.gguf", "Q8_0")
    with pytest.raises(ParameterError, match="quantized already"):
        Engine.load(file, device="cpu", quantize="int4")


def test_types_of_a_file():
    """The tensors of Qwen3-8B in Q4_K_M take 4.68 GiB, as llama-bench reports; the embedding is Q4_K."""
    spec = with_file_type(PRESETS["qwen3-8b"], "q4_k_m")
    scheme = spec.checkpoint_quantization.scheme
    nbytes = spec.vocab_size * spec.hidden_size * 144 / 256
    for prefix, linear in spec_linears(spec):
        for part in linear.parts:
            found = scheme(prefix + part.module)
            nbytes += part.rows * linear.k // found.columns * found.nbytes
    assert round(nbytes / 2**30, 2) == 4.68


def spec_linears(spec):
    layers = [(spec.layer_prefix(i), linear) for i, layer in enumerate(spec.layers) for linear in layer.linears()]
    return [*layers, ("", spec.lm_head)]


def test_types_of_recurrent_layers_are_refused():
    with pytest.raises(ParameterError) as found:
        with_file_type(PRESETS["qwen3.5-9b"], "q4_k_m")
    assert found.value.argument == "gguf"


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_random_weights(name):
    spec = replace(PRESETS["qwen3-0.6b"], vocab_size=512)
    weights = random_weights(
        with_file_type(replace(spec, layers=spec.layers[:4]), name), "cpu", torch.bfloat16, packs=True
    )
    assert weights.lm_head.number_type == ("int6" if name == "q4_k_m" else "int8")
    for layer in weights.layers:
        for linear_name, linear in layer.linears.items():
            residual = 8 if linear_name in ("o_proj", "down") else 1
            assert abs(linear.matrix().std() * (residual * linear.in_features) ** 0.5 - 1) < 0.02


def test_gate_and_up_of_an_expert_may_be_one_matrix(tmp_path):
    source = write_tiny(tmp_path / "hf", "qwen3-moe")
    file = write_gguf(source, tmp_path / "model.gguf", fused=True)
    with Engine.load(source, device="cpu") as one, Engine.load(file, device="cpu") as other:
        torch.testing.assert_close(other.score(PROMPT), one.score(PROMPT), rtol=1e-5, atol=1e-5)


def test_types_of_the_shared_expert_leave_the_experts_packed(tmp_path):
    """Published files give the shared expert more bits than the experts."""
    sizes = dict(moe_intermediate_size=64, shared_expert_intermediate_size=64)
    source = write_tiny(tmp_path / "hf", "qwen3.5-moe", **FAMILIES["qwen3.5-moe"], **sizes)
    file = write_gguf(source, tmp_path / "model.gguf", "Q4_0", shared_type="Q8_0")
    linears = load_weights(file, load_config(file), "cpu", torch.float32, packs=True).layers[1].linears
    names = ("experts_gate_up", "experts_down", "shared_gate_up", "shared_down")
    assert [linears[name].packed and linears[name].packed.bits for name in names] == [4, 4, 8, 8]
    stored = load_weights(source, load_config(source), "cpu", torch.float32).layers[1].linears
    experts, shared = stored["experts_down"].weight[: 6 * 192], stored["experts_down"].weight[6 * 192 :]
    assert relative_rms(linears["experts_down"].matrix(), experts) < 0.15
    assert relative_rms(linears["shared_down"].matrix(), shared) < 0.01


def test_qkvz_of_a_recurrent_layer_may_be_one_tensor(tmp_path):
    """Files of llama.cpp from before 2026 have it."""
    source = write_tiny(tmp_path / "hf", "qwen3-next", **FAMILIES["qwen3-next"])
    file = write_gguf(source, tmp_path / "model.gguf", split=False)
    with Engine.load(source, device="cpu") as one, Engine.load(file, device="cpu") as other:
        torch.testing.assert_close(other.score(PROMPT), one.score(PROMPT), rtol=1e-5, atol=1e-5)


def test_tensor_of_too_many_experts_is_one_line(tmp_path):
    source = write_tiny(tmp_path / "hf", "qwen3-moe")
    many = {"blk.0.ffn_up_exps.weight": torch.zeros(2000, 1, 192)}
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up_exps\.weight.*cannot have the shape \[2000, 1, 192\]"):
        load_config(write_gguf(source, tmp_path / "model.gguf", tensors=many))
