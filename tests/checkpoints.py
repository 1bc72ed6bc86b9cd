"""Tiny random checkpoints of each family, written by transformers, with a byte-level BPE tokenizer.

    path = write_tiny(tmp_path, "qwen3")                         # a directory that Engine.load takes
    path = write_tiny(tmp_path, "llama", dtype=torch.bfloat16, shards=3, num_hidden_layers=1)

Head dimensions and group sizes come from real models. Widths are small and not powers of two. Norm weights and
biases are random, so that a test fails if one is not loaded. The vocabulary of the model is larger than that of the
tokenizer, as in Qwen.
"""

import json
import math
from pathlib import Path

import torch

VOCAB_SIZE = 389
TOKENIZER_VOCAB_SIZE = 384
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # Their ids are 0, 1 and 2.
ADDED_TOKENS = ("<think>", "</think>")  # Added tokens that are not special. Their ids are 382 and 383.
EOS_ID = 2
STOP_IDS = (0, 2)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. Hello, world! How are you today? I am fine, thank you.\n"
    "A graph is captured once and replayed for ever; the token goes back into memory, and the next step reads it.\n"
    "user assistant system one two three four five six seven eight nine ten 0123456789\n"
    "for i in range(10):\n    print(i)\n"
)

_COMMON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=192,
    num_hidden_layers=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    bos_token_id=0,
    eos_token_id=EOS_ID,
    pad_token_id=None,
    tie_word_embeddings=False,
)
_THETA = {"rope_type": "default", "rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # This is short, so that the scaling affects the positions of a test.
}
_MISTRAL = dict(
    intermediate_size=304,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=80,
    rope_parameters=_THETA,
)

FAMILIES = {
    "qwen3": dict(
        architecture="Qwen3",
        intermediate_size=352,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        rope_parameters=_THETA | {"rope_theta": 1000000.0},
    ),
    "qwen3-tied": dict(
        architecture="Qwen3",
        intermediate_size=304,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        rope_parameters=_THETA | {"rope_theta": 1000000.0},
    ),
    "llama": dict(
        architecture="Llama",
        hidden_size=240,
        intermediate_size=432,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_parameters=_LLAMA3,
    ),
    "qwen2": dict(
        architecture="Qwen2",
        hidden_size=448,
        intermediate_size=608,
        num_attention_heads=7,
        num_key_value_heads=1,
        rope_parameters=_THETA | {"rope_theta": 1000000.0},
    ),
    "mistral": dict(architecture="Mistral", sliding_window=16, **_MISTRAL),
    "mistral-full": dict(architecture="Mistral", sliding_window=None, **_MISTRAL),
    "qwen3.5": dict(
        architecture="Qwen3_5Text",
        causal="Qwen3_5ForCausalLM",
        num_hidden_layers=4,
        intermediate_size=352,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        rope_parameters=_THETA | {"partial_rotary_factor": 0.25},
    ),
    "qwen3.5-g3": dict(
        architecture="Qwen3_5Text",
        causal="Qwen3_5ForCausalLM",
        num_hidden_layers=3,
        intermediate_size=304,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=80,
        linear_num_key_heads=1,
        linear_num_value_heads=3,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        tie_word_embeddings=True,
        rope_parameters=_THETA | {"partial_rotary_factor": 0.5},
    ),
    "qwen3-moe": dict(
        architecture="Qwen3Moe",
        num_hidden_layers=3,
        mlp_only_layers=[1],
        intermediate_size=304,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        moe_intermediate_size=80,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        rope_parameters=_THETA | {"rope_theta": 1000000.0},
    ),
    "qwen3-moe-step": dict(
        architecture="Qwen3Moe",
        decoder_sparse_step=2,
        intermediate_size=272,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=80,
        moe_intermediate_size=112,
        num_experts=5,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        tie_word_embeddings=True,
        rope_parameters=_THETA | {"rope_theta": 1000000.0},
    ),
    "qwen2-moe": dict(
        architecture="Qwen2Moe",
        hidden_size=256,
        intermediate_size=304,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=80,
        shared_expert_intermediate_size=208,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        rope_parameters=_THETA | {"rope_theta": 1000000.0},
    ),
    "qwen2-moe-equal": dict(
        architecture="Qwen2Moe",
        hidden_size=256,
        intermediate_size=304,
        num_attention_heads=4,
        num_key_value_heads=4,
        moe_intermediate_size=96,
        shared_expert_intermediate_size=96,
        num_experts=4,
        num_experts_per_tok=1,
        norm_topk_prob=False,
        rope_parameters=_THETA | {"rope_theta": 1000000.0},
    ),
    "qwen3.5-moe": dict(
        architecture="Qwen3_5MoeText",
        causal="Qwen3_5MoeForCausalLM",
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        moe_intermediate_size=80,
        shared_expert_intermediate_size=80,
        num_experts=6,
        num_experts_per_tok=2,
        rope_parameters=_THETA | {"partial_rotary_factor": 0.25},
    ),
    "qwen3-next": dict(
        architecture="Qwen3Next",
        num_hidden_layers=3,
        intermediate_size=304,
        mlp_only_layers=[1],
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        moe_intermediate_size=80,
        shared_expert_intermediate_size=80,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        rope_parameters=_THETA | {"partial_rotary_factor": 0.25},
    ),
    "qwen3-next-wide": dict(
        architecture="Qwen3Next",
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=80,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
        layer_types=["full_attention", "linear_attention"],
        moe_intermediate_size=48,
        shared_expert_intermediate_size=112,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        rope_parameters=_THETA | {"partial_rotary_factor": 0.5},
    ),
}


HYBRID = [name for name in FAMILIES if name.startswith(("qwen3.5", "qwen3-next"))]
EXPERTS = [name for name in FAMILIES if "num_experts" in FAMILIES[name]]
DENSE = [name for name in FAMILIES if name not in HYBRID + EXPERTS]


def write_tiny(path, family, dtype=torch.float32, shards=1, seed=0, stacked=False, **overrides) -> Path:
    """Write a tiny checkpoint of `family` (a key of FAMILIES) into directory `path`; returns the directory.

    `overrides` replace entries of config.json. With `shards` > 1 the tensors are split over at least that many files.
    With `stacked` the experts of a layer are one tensor, instead of one for each. Skips the test where transformers is
    not installed.
    """
    import pytest

    transformers = pytest.importorskip("transformers")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    settings = _COMMON | FAMILIES[family] | overrides
    architecture = settings.pop("architecture")
    causal = settings.pop("causal", f"{architecture}ForCausalLM")
    config = getattr(transformers, f"{architecture}Config")(**settings)
    # On the meta device transformers does not initialize the weights, which takes long at real widths.
    with torch.device("meta"):
        model = getattr(transformers, causal)(config)
    large = sum(parameter.numel() for parameter in model.parameters()) > 1 << 24
    model = model.to_empty(device="cuda" if large and torch.cuda.is_available() else "cpu")
    model.tie_weights()
    randomise(model, seed)
    model = model.to(dtype)
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=list(STOP_IDS))
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    # By default transformers writes a tensor for each expert. Its own form has one for all experts.
    size = total + 1 if shards == 1 else math.ceil(total / shards)
    model.save_pretrained(path, max_shard_size=size, save_original_format=not stacked)
    write_tokenizer(path)
    return path


@torch.no_grad()
def randomise(model, seed: int) -> None:
    """Set random parameters with which activations stay near 1 and logits have a clear maximum."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=model.device)
        if name.endswith("embed_tokens.weight"):
            parameter.copy_(noise * 0.15)
        elif parameter.ndim == 2:
            gain = 2.0 if name.startswith("lm_head") else 1.0
            # The gaps between the logits of a router must be larger than the errors of fp32.
            gain = 3.0 if name.endswith("mlp.gate.weight") else gain
            parameter.copy_(noise * (gain / math.sqrt(parameter.shape[1])))
        elif ".experts." in name:  # [experts, rows, columns]
            parameter.copy_(noise / math.sqrt(parameter.shape[2]))
        elif name.endswith("bias"):
            parameter.copy_(noise * 0.5)
        else:
            parameter.copy_(1.0 + 0.2 * noise)


def write_tokenizer(path, chat_template: str | None = CHATML, add_bos: bool = False) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE, ChatML tokens, `chat_template` (None: none)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB_SIZE - len(ADDED_TOKENS),
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in ADDED_TOKENS])
    if add_bos:
        bos = SPECIAL_TOKENS[0]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    assert tokenizer.get_vocab_size() == TOKENIZER_VOCAB_SIZE
    tokenizer.save(str(Path(path) / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (Path(path) / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def sentencepiece(metaspace: bool = False):
    """Write a tokenizer like Llama 2's: U+2581 for spaces, byte tokens, <s> and </s> in the vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = ["h e", "he l", "hel l", "hell o", "▁ hello", "w o", "wo r", "▁ wor", "▁ ▁"]
    merges = [tuple(merge.split()) for merge in merges]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlorsw</>"]
    vocab = {piece: i for i, piece in enumerate([*pieces, *("".join(merge) for merge in merges)])}
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback()])
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in ("<unk>", "<s>", "</s>")])
    return made
