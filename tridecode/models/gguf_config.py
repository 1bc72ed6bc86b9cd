"""GGUF architectures: the keys of config.json that the metadata stand for, and the tensors' names and changes.

llama.cpp's converter renames the tensors of a Hugging Face checkpoint and changes some of them. A Change describes what
it did to one tensor.
Source: `conversion` and `gguf-py/gguf/constants.py` in llama.cpp.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..arguments import shown
from ..errors import CheckpointError
from .experts import MAX_EXPERTS
from .gguf import GGUF
from .reader import ConfigReader

EMBED, OUTPUT, ROPE = "token_embd.weight", "output.weight", "rope_freqs.weight"
MATRIX_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_END = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "</s>",
)
_CONTROL = 3  # A value of token_type.
# Keys of general.sampling -> keys of generation_config.json.
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
# Keys of rope.scaling -> keys of rope_parameters.
_SCALING = {
    "original_context_length": "original_max_position_embeddings", "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}  # fmt: skip
_MODULES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_HYBRID = {
    "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba",
}  # fmt: skip
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
# Tensors that stack a matrix of each expert, and the modules whose rows follow each other in such a matrix.
_STACKED = {
    "ffn_gate_exps": ("gate_proj",), "ffn_up_exps": ("up_proj",), "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}  # fmt: skip
_NAMES = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}  # Whole names, without a suffix.
_V_HEADS = ("in_proj_qkv.", "in_proj_z.", "in_proj_a.", "in_proj_b.", "A_log", "dt_bias", "conv1d.")


@dataclass(frozen=True)
class Order:
    """An order of rows or columns: behind `kept` of them, [first, a, b, size] became [first, b, a, size].

    `first` follows from the number of rows or columns.
    """

    a: int
    b: int
    size: int
    kept: int = 0


@dataclass(frozen=True)
class Change:
    """The changes that the converter made to a tensor.

    Args:
        rows, columns: the order of rows and of columns, or None.
        offset: number that it added.
        negated_exp: it stored -exp(x).
    """

    rows: Order | None = None
    columns: Order | None = None
    offset: float = 0.0
    negated_exp: bool = False


NONE = Change()


@dataclass(frozen=True)
class Architecture:
    """A value of general.architecture.

    Args:
        name: the value of `architectures` in config.json.
        modules: part of a tensor's name -> module of a layer.
        permuted: whether rows of q and k are permuted for a rotary embedding of neighboring columns.
        hybrid: whether the model has layers with a gated delta net, and norms that are stored with 1 added.
        tiled: whether V heads that share a head of q and k are not adjacent.
        experts: whether layers have a mixture of experts.
        normalizes: whether the weights of the chosen experts are divided by their sum.
    """

    name: str
    modules: Mapping[str, str] = field(default_factory=lambda: _MODULES)
    permuted: bool = False
    hybrid: bool = False
    tiled: bool = False
    experts: bool = False
    normalizes: bool = True


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen35": Architecture("Qwen3_5ForCausalLM", {**_MODULES, **_HYBRID}, hybrid=True, tiled=True),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", {**_MODULES, **_EXPERTS}, experts=True, normalizes=False),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", {**_MODULES, **_EXPERTS}, experts=True),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM", {**_MODULES, **_HYBRID, **_EXPERTS}, hybrid=True, tiled=True, experts=True
    ),
    "qwen3next": Architecture("Qwen3NextForCausalLM", {**_MODULES, **_HYBRID, **_EXPERTS}, hybrid=True, experts=True),
}


def architecture(gguf: GGUF) -> Architecture:
    """Return the architecture of a file. Raises CheckpointError."""
    name = gguf.values.get("general.architecture")
    kind = gguf.values.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{gguf.path}: holds {shown(kind)} (general.type), not a model")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{gguf.path}: general.architecture must be one of {', '.join(ARCHITECTURES)}, got {shown(name)}: "
            "other architectures are not supported in GGUF files"
        )
    return ARCHITECTURES[name]


def config_values(gguf: GGUF, as_stored: bool = True) -> dict[str, Any]:
    """Return the config.json of a file.

    Args:
        as_stored: the rows of a gated delta net have the order of the file instead of that of a Hugging Face
            checkpoint. Two keys describe it, which no config.json has.

    Raises:
        CheckpointError: the architecture is not supported, or a key is missing or invalid.
    """
    known, read = architecture(gguf), gguf.reader()
    prefix = gguf.values["general.architecture"]
    if EMBED not in gguf.tensors:
        raise CheckpointError(f"{gguf.path}: tensor {EMBED} is missing; use another copy of the file")
    if not known.experts and read.get(f"{prefix}.expert_count", 0) != 0:
        raise CheckpointError(f"{gguf.path}: holds a mixture of experts, which is not supported in GGUF files")
    heads = read.integer(f"{prefix}.attention.head_count", 1, 4096)
    hidden = read.integer(f"{prefix}.embedding_length", 1, 2**20)
    rotated = read.get(f"{prefix}.rope.dimension_count")
    head_dim = read.integer(
        f"{prefix}.attention.key_length", 1, 2**16, rotated if known.permuted and rotated else max(hidden // heads, 1)
    )
    if read.integer(f"{prefix}.attention.value_length", 1, 2**16, head_dim) != head_dim:
        raise read.fail(f"{prefix}.attention.value_length", f"equal to attention.key_length ({head_dim})")
    layers = read.integer(f"{prefix}.block_count", 1, 4096)
    skipped = read.integer(f"{prefix}.nextn_predict_layers", 0, layers - 1, 0)
    values = {
        "architectures": [known.name],
        "hidden_size": hidden,
        "intermediate_size": read.integer(f"{prefix}.feed_forward_length", 1, 2**20, 1 if known.experts else None),
        "num_hidden_layers": layers - skipped,
        "num_attention_heads": heads,
        "num_key_value_heads": read.integer(f"{prefix}.attention.head_count_kv", 1, 4096, heads),
        "head_dim": head_dim,
        "vocab_size": gguf.tensors[EMBED].shape[0],
        "max_position_embeddings": read.integer(f"{prefix}.context_length", 1, 2**31 - 1),
        "rms_norm_eps": read.number(f"{prefix}.attention.layer_norm_rms_epsilon", 1e-30, 1),
        "tie_word_embeddings": OUTPUT not in gguf.tensors,
        "rope_parameters": _rope(gguf, read, prefix, head_dim, known.hybrid),
        "dtype": _dtype(gguf),
    }
    if known.permuted and read.get(f"{prefix}.attention.sliding_window", 0) != 0:  # The file is of a Mistral model.
        window = read.integer(f"{prefix}.attention.sliding_window", 1, 2**31 - 1)
        values |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    if known.hybrid:
        values |= _delta(read, prefix)
        if as_stored and known.tiled and values["linear_num_value_heads"] != values["linear_num_key_heads"]:
            values["linear_value_heads_tiled"] = True
        if as_stored and not known.tiled and any(name.endswith(".attn_gate.weight") for name in gguf.tensors):
            values["linear_qkvz_split"] = True
    if known.experts:
        values |= _mixture(gguf, read, prefix, known)
    bos = read.get("tokenizer.ggml.bos_token_id")
    return values if bos is None else values | {"bos_token_id": bos}


def generation_values(gguf: GGUF) -> dict[str, Any]:
    """Return the generation_config.json of a file: recommended sampling, and the tokens that end an answer."""
    read, tokens = gguf.reader(), gguf.strings("tokenizer.ggml.tokens")
    ends = [read.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    types = gguf.numbers("tokenizer.ggml.token_type")
    known = {text: i for i, text in enumerate(tokens) if i < len(types) and types[i] == _CONTROL and text in _END}
    values = {name: read.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    stops = list(dict.fromkeys([end for end in ends if end is not None] + list(known.values())))
    return {name: value for name, value in values.items() if value is not None} | {"eos_token_id": stops}


def _dtype(gguf: GGUF) -> str:
    """Return the dtype of the matrices; bfloat16 if any is quantized. Some matrices are stored in F32 in any case."""
    types = {tensor.type.name for tensor in gguf.tensors.values() if len(tensor.shape) == 2}
    types = types - {"F32"} or types
    return MATRIX_TYPES.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"


def _delta(read: ConfigReader, prefix: str) -> dict[str, Any]:
    """Return the keys of the layers with a gated delta net."""
    values = read.integer(f"{prefix}.ssm.time_step_rank", 1, 4096)
    keys = read.integer(f"{prefix}.ssm.group_count", 1, 4096)
    size = read.integer(f"{prefix}.ssm.inner_size", 1, 2**22)
    if size % values:
        raise read.fail(f"{prefix}.ssm.inner_size", f"a multiple of ssm.time_step_rank ({values})")
    return {
        "linear_num_value_heads": values,
        "linear_num_key_heads": keys,
        "linear_key_head_dim": read.integer(f"{prefix}.ssm.state_size", 1, 2**16),
        "linear_value_head_dim": size // values,
        "linear_conv_kernel_dim": read.integer(f"{prefix}.ssm.conv_kernel", 2, 8),
        "full_attention_interval": read.integer(f"{prefix}.full_attention_interval", 1, 2**31 - 1, 4),
    }


def _mixture(gguf: GGUF, read: ConfigReader, prefix: str, known: Architecture) -> dict[str, Any]:
    """Return the keys of the layers with a mixture of experts. The layers without a router have an MLP."""
    inner = read.integer(f"{prefix}.expert_feed_forward_length", 1, 2**20)
    shared = f"{prefix}.expert_shared_feed_forward_length"
    return {
        "num_experts": read.integer(f"{prefix}.expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": read.integer(f"{prefix}.expert_used_count", 1, MAX_EXPERTS),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": read.integer(shared, 1, 2**20, inner),
        "norm_topk_prob": known.normalizes,
        "mlp_only_layers": [
            i
            for i in range(gguf.values[f"{prefix}.block_count"])
            if f"blk.{i}.ffn_gate_inp.weight" not in gguf.tensors and f"blk.{i}.ffn_gate.weight" in gguf.tensors
        ],
    }


def _rope(gguf: GGUF, read: ConfigReader, prefix: str, head_dim: int, partial: bool) -> dict[str, Any]:
    """Return rope_parameters."""
    values: dict[str, Any] = {"rope_theta": read.number(f"{prefix}.rope.freq_base", 1, 1e30, 10000.0)}
    rotated = read.integer(f"{prefix}.rope.dimension_count", 2, 2**16, head_dim)
    if partial:
        values["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise read.fail(f"{prefix}.rope.dimension_count", f"equal to the size of a head ({head_dim})")
    kind = read.choice(f"{prefix}.rope.scaling.type", ("none", "linear", "yarn"), "none")
    if ROPE in gguf.tensors:
        if kind != "none":
            raise read.fail(f"{prefix}.rope.scaling.type", f"'none' in a file with tensor {ROPE}")
        values |= _llama3(gguf, read, prefix, values["rope_theta"], rotated)
    elif kind == "none":
        values["rope_type"] = "default"
    else:
        values |= {"rope_type": kind, "factor": read.number(f"{prefix}.rope.scaling.factor", 1e-5, 1e5)}
    # Unknown keys are returned too, so that a note names them.
    start = f"{prefix}.rope.scal"  # It begins rope.scaling.* and the older key rope.scale_linear.
    stored = {key.rpartition(".")[2]: value for key, value in gguf.values.items() if key.startswith(start)}
    return {
        _SCALING.get(name, name): value
        for name, value in stored.items()
        if name != "type" and isinstance(value, bool | int | float | str)
    } | values


def _llama3(gguf: GGUF, read: ConfigReader, prefix: str, theta: float, columns: int) -> dict[str, Any]:
    """Return the settings of Llama 3's rotary embedding, which a tensor holds as the factor of each wavelength.

    The settings must reproduce the tensor. The first and the second frequency factor are 1 and 4 in all models.
    """
    stored = gguf.floats(ROPE)
    original = read.get(f"{prefix}.rope.scaling.original_context_length", 8192)
    if len(stored) == columns // 2 and (factor := round(max(stored), 4)) >= 1 and isinstance(original, int):
        for context in dict.fromkeys((original, 8192)):
            factors = _llama3_factors(theta, columns, factor, context)
            if all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(stored, factors)):
                return {
                    "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": context,
                }  # fmt: skip
    raise CheckpointError(
        f"{gguf.path}: tensor {ROPE} holds other factors than those of Llama 3, which are not supported"
    )


def _llama3_factors(theta: float, columns: int, factor: float, original: int) -> list[float]:
    """Return the factor of each wavelength."""
    factors = []
    for pair in range(columns // 2):
        rotations = original * theta ** (-2 * pair / columns) / (2 * math.pi)
        kept = min(max((rotations - 1) / (4 - 1), 0), 1)
        factors.append(1 / ((1 - kept) / factor + kept))
    return factors


def names(gguf: GGUF) -> dict[str, str | None]:
    """Return the name of each tensor in a Hugging Face checkpoint. None: the model does not use it.

    A name that is not known stays as it is.
    """
    known, prefix = architecture(gguf), gguf.values["general.architecture"]
    layers = gguf.values[f"{prefix}.block_count"] - gguf.values.get(f"{prefix}.nextn_predict_layers", 0)
    return {name: _name(name, known, layers) for name in gguf.tensors}


def _name(name: str, known: Architecture, layers: int) -> str | None:
    whole = {EMBED: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", OUTPUT: "lm_head.weight"}
    if name in whole:
        return whole[name]
    if name == ROPE:
        return None
    match = re.fullmatch(r"blk\.(\d{1,5})\.(.+)", name, re.ASCII)
    if match is None:
        return name
    if int(match[1]) >= layers and known.hybrid:  # A block that predicts several tokens.
        return None
    inside, suffix = match[2].rpartition(".")[::2]
    if known.hybrid and match[2] in _NAMES:
        return f"model.layers.{match[1]}.{_NAMES[match[2]]}"
    return f"model.layers.{match[1]}.{known.modules[inside]}.{suffix}" if inside in known.modules else name


def stacked_modules(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the prefix of the experts in a checkpoint and the modules that a tensor of all experts contains.

    The modules are () for other tensors.
    """
    match = re.fullmatch(r"blk\.(\d{1,5})\.(ffn_\w+_exps)\.weight", name, re.ASCII)
    modules = _STACKED.get(match[2], ()) if match else ()
    return f"model.layers.{match[1]}.mlp.experts." if match else "", modules


def change(gguf: GGUF, name: str, config: dict[str, Any]) -> Change:
    """Return what the converter did to a tensor, given its name in a Hugging Face checkpoint.

    Args:
        config: the values that `config_values` returned. If V heads are tiled there, their order is not part of the
            change.
    """
    known = architecture(gguf)
    if known.permuted and re.search(r"self_attn\.[qk]_proj\.(weight|bias)$", name):
        return Change(rows=Order(2, config["head_dim"] // 2, 1))
    if not known.hybrid:
        return NONE
    rows = columns = None
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if known.tiled and keys != values and not config.get("linear_value_heads_tiled") and "linear_attn." in name:
        size, kept = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]
        if "out_proj" in name:
            columns = Order(keys, values // keys, size)
        elif "in_proj_qkv." in name or "conv1d." in name:
            rows = Order(keys, values // keys, size, kept)
        elif any(part in name for part in _V_HEADS):
            rows = Order(keys, values // keys, size if "in_proj_z." in name else 1)
    is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return Change(rows, columns, float(is_norm), name.endswith("A_log"))
