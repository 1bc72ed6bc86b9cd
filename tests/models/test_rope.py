"""Rotary embeddings of extended contexts: frequencies, contexts and logits agree with transformers."""

import pytest
import torch
from checkpoints import FAMILIES, write_tiny
from util import relative_rms

from tridecode import Engine, SamplingParams
from tridecode.blocks.rope import inverse_frequencies, rope_tables
from tridecode.checkpoint.config import parse_config
from tridecode.errors import CheckpointError

transformers = pytest.importorskip("transformers")
ORIGINAL = 64  # Context of the tiny checkpoints before it was extended; shorter than the texts.
SIZES = dict(
    hidden_size=512, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    head_dim=128, vocab_size=400,
)  # fmt: skip
CASES = {
    # name: (family, max_position_embeddings, rope_parameters, max_position)
    "linear": ("Llama", 4096, {"rope_type": "linear", "factor": 4.0}, 16384),
    "dynamic": ("Llama", 4096, {"rope_type": "dynamic", "factor": 2.5}, 10240),
    "yarn of Qwen3's model card": (
        "Qwen3", 40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072,
    ),
    "yarn with the long context": (
        "Qwen2", 131072, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072,
    ),
    "yarn without the original context": ("Mistral", 8192, {"rope_type": "yarn", "factor": 3.0}, 24576),
    "yarn with all settings": (
        "Llama", 16384,
        {"rope_type": "yarn", "factor": 6.0, "original_max_position_embeddings": 2048, "beta_fast": 20.0,
         "beta_slow": 2.0, "attention_factor": 0.8, "truncate": False}, 16384,
    ),
    "yarn with scales": (
        "Llama", 163840,
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
         "mscale_all_dim": 0.707}, 163840,
    ),
    "yarn with its factor null": (
        "Llama", 16384, {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096}, 16384,
    ),
    "yarn of a part of the columns": (
        "Qwen3_5Text", 262144, {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.25,
        "original_max_position_embeddings": 262144, "mrope_section": [11, 11, 10]}, 1048576,
    ),
    "llama3": (
        "Llama", 131072,
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192}, 131072,
    ),
}  # fmt: skip


def configs(case: str) -> tuple:
    """Return the configuration of transformers and config.json."""
    family, positions, rope, _ = CASES[case]
    values = SIZES | {"max_position_embeddings": positions, "rope_parameters": rope | {"rope_theta": 1e6}}
    architecture = "Qwen3_5ForCausalLM" if family == "Qwen3_5Text" else f"{family}ForCausalLM"
    reference = getattr(transformers, f"{family}Config")(**values)
    kinds = {"layer_types": ["full_attention"]} if family == "Qwen3_5Text" else {}
    return reference, values | kinds | {"architectures": [architecture]}


def reference_frequencies(reference, length=None) -> tuple[torch.Tensor, float]:
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[reference.rope_parameters["rope_type"]]
    return compute(reference, "cpu", length)


@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_context(case):
    reference, values = configs(case)
    spec = parse_config(values)
    rope, positions = spec.layers[0].mixer.rope, CASES[case][3]
    expected, scale = reference_frequencies(reference, positions)
    torch.testing.assert_close(inverse_frequencies(rope, 128, positions), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(scale, rel=1e-12)
    assert spec.max_position == positions
    cos, sin = rope_tables(rope, 128, 3, "cpu")
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, scale**2))


def test_older_keys_mean_the_same():
    _, values = configs("yarn of Qwen3's model card")
    rope = values.pop("rope_parameters")
    older = {name: value for name, value in rope.items() if name not in ("rope_type", "rope_theta")} | {"type": "yarn"}
    expected = parse_config(values | {"rope_parameters": rope})
    assert parse_config(values | {"rope_scaling": older, "rope_theta": 1e6}) == expected
    original = older.pop("original_max_position_embeddings")
    outside = {"original_max_position_embeddings": original}
    assert parse_config(values | {"rope_scaling": older, "rope_theta": 1e6} | outside) == expected


def test_window_of_the_extended_context():
    """A window that covers max_position_embeddings does not cover the extended context."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    values = SIZES | {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 4096, "sliding_window": 4096}
    assert parse_config(values).layers[0].mixer.window == 0
    assert parse_config(values | {"rope_parameters": rope}).layers[0].mixer.window == 4096


REFUSED = {
    "no factor": ({"rope_type": "yarn"}, "factor"),
    "linear without a factor": ({"rope_type": "linear"}, "factor"),
    "betas exchanged": ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 32.0}, "beta_fast"),
    "equal frequencies": ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}, "rope_theta"),
    "original context": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "8k"},
        "original_max_position_embeddings",
    ),
    "attention factor": ({"rope_type": "yarn", "factor": 2.0, "attention_factor": "x"}, "attention_factor"),
    "truncate": ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate"),
    "longrope": ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "rope_type"),
    "proportional": ({"rope_type": "proportional"}, "rope_type"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_settings_are_refused_by_name(case):
    rope, key = REFUSED[case]
    values = SIZES | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}
    with pytest.raises(CheckpointError, match=rf"rope_parameters\.{key} must be"):
        parse_config(values | {"rope_parameters": {"rope_theta": 1e6} | rope})


UNUSED = {
    # name: (rope_parameters, the words of the note that name the keys without effect)
    "keys of other programs": (
        {"rope_type": "yarn", "factor": 2.0, "attn_factor": 2, "finetuned": True}, "'attn_factor' 2, 'finetuned' true",
    ),
    "key of another kind": (
        {"rope_type": "linear", "factor": 2.0, "beta_slow": None, "beta_fast": 32}, "'beta_fast' 32",
    ),
    "original context": (
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
        "'original_max_position_embeddings' 64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSED)
def test_keys_without_effect_are_named(case):
    """The keys do not change the frequencies of transformers either."""
    rope, named = UNUSED[case]
    values = SIZES | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}
    (note,) = parse_config(values | {"rope_scaling": rope}).notes
    assert note.startswith(f"config.json: rope_scaling: {named}: without effect")
    known = {name: value for name, value in rope.items() if f"'{name}'" not in named}
    expected = parse_config(values | {"rope_scaling": known})
    assert not expected.notes and parse_config(values | {"rope_scaling": rope}).layers == expected.layers
    (one, scale), (other, other_scale) = (
        reference_frequencies(transformers.LlamaConfig(**values, rope_parameters={"rope_theta": 1e4} | each))
        for each in (rope, known)
    )
    assert torch.equal(one, other) and scale == other_scale


@pytest.mark.parametrize("case", CASES)
def test_keys_with_an_effect_are_not_named(case):
    assert not parse_config(configs(case)[1]).notes


def test_chunked_attention_is_named():
    hybrid = configs("yarn of a part of the columns")[1] | {"dual_chunk_attention_config": {"chunk_size": 64}}
    hybrid["rope_parameters"] = hybrid["rope_parameters"] | {"attn_factor": 2}
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": hybrid}
    first, second = parse_config(nested).notes
    assert first.startswith("config.json: text_config.rope_parameters: 'attn_factor' 2: without effect")
    assert second.startswith("config.json: text_config.dual_chunk_attention_config: without effect")


@pytest.mark.parametrize("share", [0.01, 0.04, 0.07])
def test_odd_number_of_rotated_columns_is_refused(share):
    values = configs("yarn of a part of the columns")[1]
    rope = {"rope_type": "default", "partial_rotary_factor": share}
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor must be a share of head_dim \(80\)"):
        parse_config(values | {"head_dim": 80, "rope_parameters": rope})


# ---- logits beyond the original context

KINDS = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}
KEPT = ("rope_theta", "partial_rotary_factor")


def write_extended(path, family: str, kind: str):
    """Write a checkpoint whose context ORIGINAL is extended."""
    own = {name: value for name, value in FAMILIES[family]["rope_parameters"].items() if name in KEPT}
    return write_tiny(path, family, rope_parameters=own | KINDS[kind], max_position_embeddings=ORIGINAL)


def text(length: int) -> list[int]:
    return torch.randint(0, 380, (length,), generator=torch.Generator().manual_seed(4)).tolist()


def reference_logits(path, ids: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def assert_same_logits(path, ids: list[int], **options) -> None:
    with Engine.load(path, device="cpu", **options) as engine:
        error = relative_rms(engine.score(ids), reference_logits(path, ids))
    assert error <= 1e-4, f"relative RMS error {error:.2e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "mistral", "qwen3.5", "qwen3.5-g3"])
def test_logits_beyond_the_original_context(family, kind, tmp_path):
    path = write_extended(tmp_path, family, kind)
    assert_same_logits(path, text(3 * ORIGINAL), max_seq_len=3 * ORIGINAL)


def test_dynamic_within_the_original_context(tmp_path):
    path = write_extended(tmp_path, "qwen3", "dynamic")
    assert_same_logits(path, text(ORIGINAL // 2), max_seq_len=ORIGINAL)


def test_decode_passes_beyond_the_original_context(tmp_path):
    """Each greedy token is the best one by transformers' logits."""
    path = write_extended(tmp_path, "qwen3", "yarn")
    prompt, params = text(ORIGINAL - 8), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with Engine.load(path, device="cpu") as engine:
        assert engine.config.max_position == 4 * ORIGINAL
        ids = prompt + list(engine.generate(prompt, params).token_ids)
    logits = reference_logits(path, ids)[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(ids[len(prompt) :])[:, None])[:, 0]
    assert (logits.max(-1).values - chosen).max() < 1e-4


@pytest.mark.parametrize("capacity, noted", [(ORIGINAL, False), (2 * ORIGINAL, True)])
def test_note_that_dynamic_is_fixed(capacity, noted, tmp_path):
    path = write_extended(tmp_path, "llama", "dynamic")
    with Engine.load(path, device="cpu", max_seq_len=capacity) as engine:
        assert any("rope type dynamic" in note for note in engine.notes) == noted
