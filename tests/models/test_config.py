"""config.json of each family, as transformers 4 and 5 write it, and refused values."""

import pytest

from tridecode.blocks.attention import Attention
from tridecode.blocks.mlp import MLP
from tridecode.blocks.rope import RopeConfig
from tridecode.blocks.spec import Layer, ModelSpec
from tridecode.checkpoint.config import parse_config
from tridecode.errors import CheckpointError
from tridecode.models.reader import read_json
from tridecode.models.registry import FAMILIES

LLAMA3_SCALING = dict(
    factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3"
)
COMMON = dict(hidden_act="silu", num_attention_heads=32, tie_word_embeddings=True, torch_dtype="bfloat16")
LLAMA = COMMON | dict(
    architectures=["LlamaForCausalLM"], attention_bias=False, bos_token_id=128000, eos_token_id=128001, head_dim=64,
    hidden_size=2048, intermediate_size=8192, max_position_embeddings=131072, mlp_bias=False, num_hidden_layers=16,
    num_key_value_heads=8, rms_norm_eps=1e-5, rope_scaling=LLAMA3_SCALING, rope_theta=500000.0, vocab_size=128256,
)  # fmt: skip
QWEN3 = COMMON | dict(
    architectures=["Qwen3ForCausalLM"], attention_bias=False, bos_token_id=151643, eos_token_id=151645, head_dim=128,
    hidden_size=2560, intermediate_size=9728, max_position_embeddings=40960, max_window_layers=36, num_hidden_layers=36,
    num_key_value_heads=8, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000, sliding_window=None,
    use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
QWEN2 = COMMON | dict(
    architectures=["Qwen2ForCausalLM"], bos_token_id=151643, eos_token_id=151645, hidden_size=896,
    intermediate_size=4864, max_position_embeddings=32768, max_window_layers=21, num_attention_heads=14,
    num_hidden_layers=24, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768,
    use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
MISTRAL = COMMON | dict(
    architectures=["MistralForCausalLM"], bos_token_id=1, eos_token_id=2, hidden_size=4096, intermediate_size=14336,
    max_position_embeddings=32768, num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=10000.0,
    sliding_window=4096, tie_word_embeddings=False, vocab_size=32000,
)  # fmt: skip
PUBLISHED = {"qwen3": QWEN3, "llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2}


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_llama_config_of_transformers_4():
    spec = parse_config(LLAMA)
    rope = RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    attention = Attention(hidden=2048, eps=1e-5, heads=32, kv_heads=8, head_dim=64, rope=rope)
    assert spec == ModelSpec(
        family="llama",
        hidden_size=2048,
        vocab_size=128256,
        max_position=131072,
        layers=(Layer(attention, MLP(hidden=2048, eps=1e-5, intermediate=8192)),) * 16,
        eps=1e-5,
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_id=128000,
        stop_ids=(128001,),
    )
    assert (attention.group, attention.q_size, attention.kv_size) == (4, 2048, 512)
    assert (attention.qk_norm, attention.bias, attention.window, attention.scale) == (False, False, 0, None)


def test_transformers_5_keys_mean_the_same():
    renamed = without(LLAMA, "rope_scaling", "rope_theta", "torch_dtype")
    renamed |= {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 500000.0}, "dtype": "bfloat16"}
    assert parse_config(renamed) == parse_config(LLAMA)


def test_old_name_of_rope_type():
    scaling = without(LLAMA3_SCALING, "rope_type") | {"type": "llama3"}
    assert parse_config(LLAMA | {"rope_scaling": scaling}) == parse_config(LLAMA)


# Columns: qk_norm, bias, query heads that share a K/V head, head size.
FORMS = {
    "qwen3": (True, False, 4, 128), "llama": (False, False, 4, 64), "mistral": (False, False, 4, 128),
    "qwen2": (False, True, 7, 64),
}  # fmt: skip


@pytest.mark.parametrize("family", FORMS)
def test_attention_of_a_family(family):
    mixers = [layer.mixer for layer in parse_config(PUBLISHED[family]).layers]
    assert {(mixer.qk_norm, mixer.bias, mixer.group, mixer.head_dim) for mixer in mixers} == {FORMS[family]}


def test_absent_values_have_defaults():
    for values in (without(LLAMA, "head_dim"), LLAMA | {"head_dim": None}):
        assert parse_config(values | {"hidden_size": 3072}).layers[0].mixer.head_dim == 96, (
            "head_dim is not hidden_size divided by the number of heads"
        )
    assert parse_config(without(LLAMA, "num_key_value_heads")).layers[0].mixer.group == 1
    assert parse_config(without(MISTRAL, "rope_theta")).layers[0].mixer.rope == RopeConfig(theta=10000.0)


@pytest.mark.parametrize("name", ["float16", "float32", "torch.bfloat16"])
def test_dtype(name):
    assert parse_config(LLAMA | {"torch_dtype": name}).dtype == name.removeprefix("torch.")


THREE = {"num_hidden_layers": 3}
SLIDES = THREE | {"sliding_window": 16, "use_sliding_window": True}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = {
    # name: (file, changes, windows of the layers)
    "mistral slides everywhere": (MISTRAL, THREE, [4096] * 3),
    "mistral whose file says nothing of a window": (without(MISTRAL, "sliding_window"), THREE, [4096] * 3),
    "mistral without a window": (MISTRAL, THREE | {"sliding_window": None}, [0] * 3),
    "a window as long as the context": (MISTRAL, THREE | {"sliding_window": 32768}, [0] * 3),
    "qwen2 that does not use its window": (QWEN2, THREE | {"sliding_window": 16}, [0] * 3),
    "qwen2 slides in its upper layers": (QWEN2, SLIDES | {"max_window_layers": 1}, [0, 16, 16]),
    "qwen3 with max_window_layers above all": (QWEN3, SLIDES, [0, 0, 0]),
    "qwen3 with layer_types": (QWEN3, SLIDES | {"layer_types": MIXED}, [16, 0, 16]),
    "llama with plain layer_types": (LLAMA, {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, [0, 0]),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows(case):
    values, changes, windows = WINDOWS[case]
    spec = parse_config(values | changes)
    assert [layer.mixer.window for layer in spec.layers] == windows
    assert spec.num_layers == changes["num_hidden_layers"]


STOPS = {
    "config alone": (128001, None, (128001,)),
    "a list": ([128001, 128008], None, (128001, 128008)),
    "union, each once": (128001, [128001, 128008, 128009], (128001, 128008, 128009)),
    "generation_config alone": (None, 128009, (128009,)),
    "none": (None, None, ()),
}


@pytest.mark.parametrize("case", STOPS)
def test_stop_ids(case):
    ours, reference, expected = STOPS[case]
    assert parse_config(LLAMA | {"eos_token_id": ours}, {"eos_token_id": reference}).stop_ids == expected


DEFAULTS = {
    "sampling": (
        {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.1},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.1},
    ),
    "limits and stops": (
        {
            "max_new_tokens": 9,
            "stop_strings": "END",
            "suppress_tokens": [7, 128256, -1],
            "bad_words_ids": [[5], [2]],
            "eos_token_id": 2,
        },
        {"max_tokens": 9, "stop": ("END",), "logit_bias": ((5, -1e30), (7, -1e30))},
    ),
    "greedy": ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
    "nothing said": ({"max_length": 4096, "top_p": None}, {}),
}


@pytest.mark.parametrize("case", DEFAULTS)
def test_generation_defaults(case):
    values, expected = DEFAULTS[case]
    assert dict(parse_config(LLAMA, values).generation_defaults) == expected


REFUSED = {
    # name: (file, changes, words that the message contains)
    "unknown architecture": (LLAMA, {"architectures": ["GemmaForCausalLM"]}, ["architectures", "Gemma", *FAMILIES]),
    "no architecture": (LLAMA, {"architectures": None}, ["architectures", "got null"]),
    "unknown model_type": (LLAMA, {"architectures": None, "model_type": "gemma3"}, ["model_type", "gemma3", "qwen3"]),
    "classifier with model_type": (
        LLAMA,
        {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
        ["architectures", "Classification"],
    ),
    "architecture of another type": (LLAMA, {"architectures": [["LlamaForCausalLM"]]}, ["architectures"]),
    "classifier": (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, ["architectures", "Classification"]),
    "quantized": (LLAMA, {"quantization_config": {"quant_method": "hqq"}}, ["quantization_config.quant_method", "hqq"]),
    "activation": (LLAMA, {"hidden_act": "gelu"}, ["hidden_act", "silu", "gelu"]),
    "attention bias": (LLAMA, {"attention_bias": True}, ["attention_bias", "o_proj"]),
    "mlp bias": (LLAMA, {"mlp_bias": True}, ["mlp_bias"]),
    "longrope": (QWEN3, {"rope_scaling": {"rope_type": "longrope"}}, ["rope_scaling.rope_type", "longrope"]),
    "rope, old name": (LLAMA, {"rope_scaling": {"type": "su", "factor": 4.0}}, ["rope_scaling", '"su"', "yarn"]),
    "rope of transformers 5": (QWEN3, {"rope_parameters": {"rope_type": "axial"}}, ["rope_parameters", "axial"]),
    "partial rotary": (LLAMA, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    "llama3 without its factor": (LLAMA, {"rope_scaling": without(LLAMA3_SCALING, "factor")}, ["rope_scaling.factor"]),
    "llama3 with equal factors": (
        LLAMA,
        {"rope_scaling": LLAMA3_SCALING | {"high_freq_factor": 1.0}},
        ["rope_scaling.high_freq_factor"],
    ),
    "factor huge": (
        LLAMA,
        {"rope_scaling": LLAMA3_SCALING | {"factor": 1e299}},
        ["rope_scaling.factor", "from 1 to 100000", "got 1e+299"],
    ),
    "low_freq_factor tiny": (
        LLAMA,
        {"rope_scaling": LLAMA3_SCALING | {"low_freq_factor": 1e-300}},
        ["rope_scaling.low_freq_factor", "from 0.0001 to 10000", "got 1e-300"],
    ),
    "high_freq_factor not a number": (
        LLAMA,
        {"rope_scaling": LLAMA3_SCALING | {"high_freq_factor": float("nan")}},
        ["rope_scaling.high_freq_factor", "from 0.0001 to 10000", "NaN"],
    ),
    "rope no object": (LLAMA, {"rope_scaling": "llama3"}, ["rope_scaling", "object"]),
    "rope type null": (QWEN3, {"rope_parameters": {"rope_type": None}}, ["rope_parameters.rope_type", "got null"]),
    "rope type null, old name": (LLAMA, {"rope_scaling": {"type": None}}, ["rope_scaling.rope_type", "got null"]),
    "rope of each kind of layer": (
        QWEN3,
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
        ["rope_parameters", "'full_attention'", "between layers"],
    ),
    "two ropes": (
        LLAMA,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        ["rope_parameters and rope_scaling", "remove rope_scaling"],
    ),
    "theta null": (LLAMA, {"rope_theta": None}, ["rope_theta", "got null"]),
    "theta null in rope_parameters": (QWEN3, {"rope_parameters": {"rope_theta": None}}, ["rope_parameters.rope_theta"]),
    "theta zero": (LLAMA, {"rope_theta": 0}, ["rope_theta", "from 1 to 1e+30", "got 0"]),
    "theta negative": (LLAMA, {"rope_theta": -1e4}, ["rope_theta", "from 1 to 1e+30", "got -10000.0"]),
    "theta tiny": (LLAMA, {"rope_theta": 1e-30}, ["rope_theta", "from 1 to 1e+30", "got 1e-30"]),
    "theta beyond fp32": (LLAMA, {"rope_theta": 1e39}, ["rope_theta", "from 1 to 1e+30", "got 1e+39"]),
    "theta as large as floats go": (
        QWEN3,
        {"rope_parameters": {"rope_theta": 1e308}},
        ["rope_parameters.rope_theta", "from 1 to 1e+30", "got 1e+308"],
    ),
    "theta infinite": (LLAMA, {"rope_theta": float("inf")}, ["rope_theta", "Infinity"]),
    "theta not a number": (LLAMA, {"rope_theta": float("nan")}, ["rope_theta", "NaN"]),
    "theta huge": (LLAMA, {"rope_theta": 10**400}, ["rope_theta"]),
    "hidden size missing": (LLAMA, {"hidden_size": None}, ["hidden_size", "integer", "got null"]),
    "hidden size negative": (LLAMA, {"hidden_size": -1}, ["hidden_size", "got -1"]),
    "hidden size a string": (LLAMA, {"hidden_size": "2048"}, ["hidden_size", '"2048"']),
    "hidden size a boolean": (LLAMA, {"hidden_size": True}, ["hidden_size", "got true"]),
    "hidden size a fraction": (LLAMA, {"hidden_size": 2048.0}, ["hidden_size", "2048.0"]),
    "layers without end": (LLAMA, {"num_hidden_layers": 10**9}, ["num_hidden_layers"]),
    "heads that do not divide": (LLAMA, {"num_key_value_heads": 5}, ["num_key_value_heads", "32", "got 5"]),
    "too many heads share one": (LLAMA, {"num_key_value_heads": 1}, ["num_key_value_heads", "16th", "got 1"]),
    "head_dim not given, not whole": (LLAMA, {"head_dim": None, "hidden_size": 2049}, ["head_dim", "2049", "32"]),
    "head_dim too large": (LLAMA, {"head_dim": 320}, ["head_dim", "256", "320"]),
    "head_dim odd": (LLAMA, {"head_dim": 72}, ["head_dim", "multiple of 16", "72"]),
    "eps zero": (LLAMA, {"rms_norm_eps": 0.0}, ["rms_norm_eps", "from 1e-30 to 1", "got 0.0"]),
    "eps that is zero in fp32": (LLAMA, {"rms_norm_eps": 1e-300}, ["rms_norm_eps", "from 1e-30 to 1", "got 1e-300"]),
    "tied is no boolean": (LLAMA, {"tie_word_embeddings": 1}, ["tie_word_embeddings", "true or false"]),
    "eos outside the vocabulary": (LLAMA, {"eos_token_id": 128256}, ["eos_token_id", "128256"]),
    "eos a list of strings": (LLAMA, {"eos_token_id": ["</s>"]}, ["eos_token_id", "</s>"]),
    "too many eos": (LLAMA, {"eos_token_id": list(range(17))}, ["eos_token_id", "17", "16"]),
    "dtype": (LLAMA, {"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8", "bfloat16"]),
    "dtype of another type": (LLAMA, {"dtype": 16}, ["dtype", "16"]),
    "window zero": (MISTRAL, {"sliding_window": 0}, ["sliding_window", "got 0"]),
    "layer_types too short": (QWEN3, {"layer_types": ["full_attention"]}, ["layer_types", "36"]),
    "layer_types unknown": (QWEN3, {"layer_types": ["linear_attention"] * 36}, ["layer_types", "linear_attention"]),
    "sliding layers without a window": (QWEN3, {"layer_types": ["sliding_attention"] * 36}, ["sliding_window"]),
    "llama that slides": (LLAMA, {"layer_types": ["sliding_attention"] * 16}, ["layer_types", "full_attention"]),
    "mistral of two kinds": (
        MISTRAL,
        {"layer_types": ["full_attention", "sliding_attention"] * 16},
        ["layer_types", "sliding_attention"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_config_is_refused(case):
    values, changes, words = REFUSED[case]
    parse_config(values)
    with pytest.raises(CheckpointError) as caught:
        parse_config(values | changes, source="somewhere/config.json")
    message = str(caught.value)
    assert message.startswith("somewhere/config.json: ") and "\n" not in message and len(message) < 400
    for word in words:
        assert word in message


IGNORED_GENERATION = {
    "temperature": {"temperature": -0.5},
    "top_p": {"top_p": 0},
    "top_k": {"top_k": 20.5},
    "repetition_penalty": {"repetition_penalty": 0.0},
    "repetition_penalty that sampling refuses": {"repetition_penalty": 1e-9},
    "min_p": {"min_p": "0.1"},
    "do_sample": {"do_sample": "yes"},
    "eos_token_id": {"eos_token_id": -1},
    "eos_token_id of another type": {"eos_token_id": "</s>"},
    "max_new_tokens": {"max_new_tokens": 0},
    "stop_strings": {"stop_strings": [5]},
    "suppress_tokens": {"suppress_tokens": "5"},
}


def test_valid_stop_ids_are_used_if_another_is_invalid():
    spec = parse_config(LLAMA, {"eos_token_id": [7, 10**9, 8]})
    (note,) = spec.notes
    assert spec.stop_ids == (128001, 7, 8) and "only [7, 8] are used" in note


@pytest.mark.parametrize("case", IGNORED_GENERATION)
def test_invalid_generation_config_is_ignored_with_a_note(case):
    """A wrong default is harmless, because a caller may set the parameter."""
    (key,) = IGNORED_GENERATION[case]
    spec = parse_config(LLAMA, IGNORED_GENERATION[case] | {"max_p": 1}, source="somewhere/config.json")
    (note,) = spec.notes
    assert note.startswith(f"somewhere/generation_config.json: {key}") and note.endswith("ignored, correct it there")
    assert "must be" in note and "\n" not in note
    assert spec.generation_defaults == () and spec.stop_ids == (128001,)


UNSUPPORTED_GENERATION = {
    # name: (keys of generation_config.json, the keys that the note names)
    "keys that change answers": (
        {"no_repeat_ngram_size": 3, "min_new_tokens": 5, "forced_eos_token_id": 2, "max_length": 20},
        ["no_repeat_ngram_size 3", "min_new_tokens 5", "forced_eos_token_id 2", "max_length 20"],
    ),
    "words of several tokens": ({"bad_words_ids": [[1, 2], [3]]}, ["bad_words_ids [[1, 2], [3]]"]),
    "neutral values": (
        {"no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": 1.0, "sequence_bias": {}, "max_length": 131072,
         "bad_words_ids": [[3]], "min_length": None, "use_cache": True, "transformers_version": "4.50.0"},
        [],
    ),
    "a length that another key replaces": ({"max_length": 20, "max_new_tokens": 5}, []),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSUPPORTED_GENERATION)
def test_generation_keys_without_effect_are_named(case):
    values, named = UNSUPPORTED_GENERATION[case]
    notes = parse_config(LLAMA, values, source="somewhere/config.json").notes
    assert len(notes) == bool(named)
    for word in named:
        assert word in notes[0] and notes[0].startswith("somewhere/generation_config.json: ")


def test_config_has_generation_defaults_if_there_is_no_generation_config():
    old = LLAMA | {"temperature": 0.3, "no_repeat_ngram_size": 3}
    spec = parse_config(old)
    assert dict(spec.generation_defaults) == {"temperature": 0.3}
    assert "config.json: no_repeat_ngram_size 3" in spec.notes[0]
    assert parse_config(old, {}).generation_defaults == () == parse_config(old, {}).notes


MODEL_TYPES = {"qwen3": QWEN3, "llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2}


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_model_type_without_architecture(kind):
    values = MODEL_TYPES[kind] | {"model_type": kind}
    base = [values["architectures"][0].replace("ForCausalLM", "Model")]
    for names in (None, [], base):
        assert parse_config(values | {"architectures": names}) == parse_config(values)
    assert parse_config(without(values, "architectures")) == parse_config(values)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied", "llama", "qwen2", "mistral", "mistral-full"])
def test_agrees_with_transformers(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    from checkpoints import STOP_IDS, write_tiny

    path = write_tiny(tmp_path, family, num_hidden_layers=3)
    spec = parse_config(read_json(path / "config.json"), read_json(path / "generation_config.json"))
    reference = transformers.AutoConfig.from_pretrained(path)
    window = getattr(reference, "sliding_window", None)
    assert spec.hidden_size == reference.hidden_size and spec.vocab_size == reference.vocab_size
    assert {layer.mixer.rope for layer in spec.layers} == {spec.layers[0].mixer.rope}
    rope = spec.layers[0].mixer.rope
    assert rope.theta == reference.rope_parameters["rope_theta"]
    assert rope.kind == reference.rope_parameters["rope_type"]
    assert {spec.eps, *(block.eps for block in spec.blocks())} == {reference.rms_norm_eps}
    assert spec.tie_word_embeddings == reference.tie_word_embeddings
    assert [layer.mixer.window for layer in spec.layers] == [window or 0] * 3
    assert set(spec.stop_ids) == set(STOP_IDS)
    assert spec.dtype == "float32"


ODD_NUMBERS = [-1, 0, 1, 3, 10**30, 0.5, float("nan"), float("-inf")]
ODD_VALUES = [*ODD_NUMBERS, None, True, "", "default", [], [1], ["x"], {}, {"a": 1}]
ABSENT = dict.fromkeys(["rope_parameters", "layer_types", "quantization_config", "dtype"])


@pytest.mark.parametrize("family", PUBLISHED)
def test_odd_values_raise_one_line_errors(family):
    """Any value of a key leads to a specification or to a CheckpointError that names the file."""
    values = PUBLISHED[family] | ABSENT
    refused = 0
    for key in values:
        for value in ODD_VALUES:
            try:
                assert isinstance(parse_config(values | {key: value}, {key: value}), ModelSpec)
            except CheckpointError as error:
                assert "config.json: " in str(error) and "\n" not in str(error)
                refused += 1
    assert refused > 200
