"""GGUF files for tests: a tiny Hugging Face checkpoint as llama.cpp's converter writes it, with the gguf package."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_5_text": "qwen35",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
}  # fmt: skip
HYBRID = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba",
}  # fmt: skip


def tiled(x, config, dim, size):
    """Move V heads from the order of a checkpoint to that of a GGUF file."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    heads = x.unflatten(dim, (keys, values // keys, size))
    return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)


def converted(name, x, config):
    """Return a tensor as llama.cpp's converter writes it."""
    kind = config["model_type"]
    if kind in ("llama", "mistral") and name.split(".")[-2] in ("q_proj", "k_proj"):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return x.view(heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
    if name.endswith("shared_expert_gate.weight"):
        return x.squeeze(0)
    if kind not in HYBRID:
        return x
    if "linear_attn." in name and kind == "qwen3_next":
        return x.squeeze(1) if "conv1d" in name else -x.exp() if "A_log" in name else x
    if "linear_attn." in name:
        size, first = (
            config["linear_value_head_dim"],
            2 * config["linear_num_key_heads"] * config["linear_key_head_dim"],
        )
        if "conv1d" in name:
            x = x.squeeze(1)
        if "conv1d" in name or "in_proj_qkv" in name:
            return torch.cat((x[:first], tiled(x[first:], config, 0, size)))
        if "out_proj" in name:
            return tiled(x, config, 1, size)
        if "in_proj_z" in name:
            return tiled(x, config, 0, size)
        if name.endswith("linear_attn.norm.weight"):
            return x
        return tiled(-x.exp() if "A_log" in name else x, config, 0, 1)
    return x + 1 if name.endswith("norm.weight") else x


def stored_name(name, config):
    """Return the name of a tensor in a GGUF file."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole or name == "lm_head.weight":
        return whole.get(name, "output.weight")
    layer, inside = name.removeprefix("model.layers.").split(".", 1)
    if inside in NAMES:
        return f"blk.{layer}.{NAMES[inside]}"
    module, suffix = inside.rpartition(".")[::2]
    stored = NAMES[module]
    if stored == "ffn_norm" and config["model_type"] in HYBRID:
        stored = "post_attention_norm"
    return f"blk.{layer}.{stored}.{suffix}"


def stacked(weights, fused=False):
    """Return the tensors of a checkpoint in which one tensor stacks those of all experts, as `stored_name` names them.

    fused: gate and up of an expert are one matrix.
    """
    experts, others = {}, {}
    for name, x in weights.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight", name)
        if match:
            experts.setdefault((int(match[1]), match[3]), {})[int(match[2])] = x
        else:
            others[name] = x
    made = {key: torch.stack([x for _, x in sorted(own.items())]) for key, own in experts.items()}
    if fused:
        for layer in {layer for layer, _ in made}:
            made[layer, "gate_up"] = torch.cat((made.pop((layer, "gate")), made.pop((layer, "up"))), 1)
    return others, {f"blk.{layer}.ffn_{which}_exps.weight": x for (layer, which), x in made.items()}


def split_qkvz(written, config):
    """Replace in_proj_qkvz, which has the rows of each K head together, by q, k and v of all heads, and z."""
    keys, values, size = (config[f"linear_{n}"] for n in ("num_key_heads", "num_value_heads", "key_head_dim"))
    own = values // keys * config["linear_value_head_dim"]
    for name in [name for name in written if name.endswith(".ssm_in.weight")]:
        heads = written.pop(name).unflatten(0, (keys, -1)).split((size, size, own, own), 1)
        q, k, v, z = (part.flatten(0, 1) for part in heads)
        written[name.replace("ssm_in", "attn_qkv")] = torch.cat((q, k, v))
        written[name.replace("ssm_in", "attn_gate")] = z


def rope_factors(config):
    """Return the factors of Llama 3's wavelengths, as llama.cpp's converter computes them."""
    rope, size = config["rope_parameters"], config["head_dim"]
    original, factors = rope["original_max_position_embeddings"], []
    for i in range(0, size, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (i / size)
        if length < original / rope["high_freq_factor"]:
            factors.append(1.0)
        elif length > original / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = original / length - rope["low_freq_factor"]
            smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors)


def add_tokenizer(writer, source: Path, rows: int) -> None:
    """Write the tokenizer of a checkpoint into the metadata, with as many tokens as the embedding has rows."""
    stored, settings = (json.loads((source / f"tokenizer{end}.json").read_text()) for end in ("", "_config"))
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    for text, token in stored["model"]["vocab"].items():
        tokens[token], types[token] = text, NORMAL
    for token in stored["added_tokens"]:
        tokens[token["id"]], types[token["id"]] = token["content"], CONTROL if token["special"] else USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = stored["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokens.index(settings["bos_token"]))
    writer.add_eos_token_id(tokens.index(settings["eos_token"]))
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


def add_sizes(writer, config, layers) -> None:
    """Write the sizes of a model into the metadata."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_experts", config.get("num_local_experts")))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope, head_dim = config["rope_parameters"], config["head_dim"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if rope["rope_type"] == "llama3":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config["model_type"] in HYBRID:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)


def write_gguf(
    source: Path, path: Path, type_name: str = "F32", mtp: bool = False, change=None, tensors=None,
    fused: bool = False, split: bool = True, shared_type: str | None = None,
) -> Path:  # fmt: skip
    """Write the checkpoint in directory `source` as a GGUF file; return its path.

    Args:
        type_name: the type of the matrices whose rows blocks divide; that of all others is F32.
        mtp: add a block that predicts several tokens.
        change: change(writer) adds keys.
        tensors: values by name in the file; they replace those of the checkpoint.
        fused: gate and up of an expert are one matrix.
        split: the rows of in_proj_qkvz are in two tensors, as in files of today's llama.cpp.
        shared_type: the type of the shared expert's matrices. None: type_name.
    """
    gguf = pytest.importorskip("gguf")
    from safetensors.torch import load_file

    config = json.loads((source / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    weights = {name: x for file in sorted(source.glob("*.safetensors")) for name, x in load_file(file).items()}
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])
    layers = config["num_hidden_layers"]
    add_sizes(writer, config, layers + mtp)
    add_tokenizer(writer, source, len(weights["model.embed_tokens.weight"]))
    if mtp:
        writer.add_nextn_predict_layers(1)
    if change:
        change(writer)
    others, experts = stacked(weights, fused)
    written = {stored_name(name, config): converted(name, x.float(), config) for name, x in others.items()}
    written |= {name: x.float() for name, x in experts.items()}
    if split and config["model_type"] == "qwen3_next":
        split_qkvz(written, config)
    if config["rope_parameters"]["rope_type"] == "llama3":
        written["rope_freqs.weight"] = rope_factors(config)
    if mtp:
        written[f"blk.{layers}.nextn.eh_proj.weight"] = torch.randn(64, 128)
        written[f"blk.{layers}.attn_q.weight"] = torch.randn(64, 64)
    for name, x in (written | (tensors or {})).items():
        data = x.contiguous().numpy()
        kind = gguf.GGMLQuantizationType[shared_type if shared_type and "_shexp" in name else type_name]
        columns = gguf.GGML_QUANT_SIZES[kind][0]
        fits = x.ndim in (2, 3) and "gate_inp" not in name and x.shape[-1] % columns == 0 and "conv1d" not in name
        own = kind if fits else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(data, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
