"""The parameters of requests that this server does not implement: ignored, accepted with neutral values, or refused.

The parameters that it implements are the fields of the request bodies in protocol.py. docs/serving.md lists both.
"""

EMPTY: tuple[object, ...] = (None, "", [], {})

# Parameters that never change the text. Clients and routers add them to every request.
IGNORED = frozenset(
    "user metadata service_tier prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier "
    "request_id rid priority verbosity cache_control provider_specific_fields spaces_between_special_tokens "
    "timings_per_token return_progress id_slot keep_alive ttl session_id data_parallel_rank routed_dp_rank "
    "litellm_call_id litellm_session_id litellm_trace_id litellm_metadata extra_key custom_labels "
    "stream_reasoning".split()
)
IGNORED_IN_RESPONSES = frozenset(
    "client_metadata include max_tool_calls stream_options context_management background_options "
    "access_programs".split()
)
IGNORED_IN_MESSAGES = frozenset(
    "context_management diagnostics inference_geo speed user_profile_id workspace_id betas billing_policy fallbacks "
    "fallback_credit_token thread compaction".split()
)

# Parameter -> values that request nothing. An empty value (null, "", [], {}) of any parameter is accepted, except where
# it requests something (DEMANDING).
NEUTRAL: dict[str, list] = {
    "best_of": [1],
    "do_sample": [True],
    "dry_multiplier": [0],
    "dynatemp_range": [0],
    "early_stopping": [False],
    "function_call": ["none", "auto"],
    "guidance_scale": [1],
    "include_reasoning": [True],
    "length_penalty": [1],
    "lora_path": [],
    "min_keep": [0],
    "mirostat": [0],
    "mirostat_mode": [0],
    "modalities": [["text"]],
    "n_keep": [0],
    "no_repeat_ngram_size": [0],
    "no_stop_trim": [False],
    "num_beams": [1],
    "reasoning_format": ["auto", "deepseek"],
    "repeat_penalty": [1],
    "return_cached_tokens_details": [False],
    "return_hidden_states": [False],
    "return_meta_info": [False],
    "return_prompt_text": [False],
    "return_routed_experts": [False],
    "return_tokens_as_token_ids": [False],
    "separate_reasoning": [True],
    "store": [False],
    "tfs_z": [1],
    "top_a": [0],
    "top_n_sigma": [-1, 0],
    "truncate_prompt_tokens": [-1],
    "typical_p": [1],
    "use_beam_search": [False],
    "xtc_probability": [0],
}
NEUTRAL_IN_COMPLETIONS: dict[str, list] = {
    "parallel_tool_calls": [True, False],
    "tool_choice": ["none", "auto"],
    "tools": [],
}
NEUTRAL_IN_RESPONSES: dict[str, list] = {
    "background": [False],
    "conversation": [],
    "image": [],
    "moderation": [],
    "prompt": [],
    "top_logprobs": [0],
    "truncation": ["disabled"],
}
NEUTRAL_IN_MESSAGES: dict[str, list] = {"container": [], "mcp_servers": []}
# Parameters that request something even if their value is empty.
DEMANDING = frozenset("messages prompt input content web_search_options options".split())

# Parameter of another API -> what to use here. The first parameter of the list that the request has is named.
INSTEAD: dict[str, tuple[str, ...]] = {
    "add_special": ("add_special_tokens",),
    "choice": ("structured_outputs",),
    "content": ("prompt", "messages", "input"),
    "ebnf": ("structured_outputs",),
    "enable_thinking": ("chat_template_kwargs", "thinking"),
    "format": ("response_format",),
    "function_call": ("tool_choice",),
    "functions": ("tools",),
    "grammar": ("structured_outputs",),
    "guided_choice": ("structured_outputs",),
    "guided_grammar": ("structured_outputs",),
    "guided_json": ("response_format",),
    "guided_regex": ("structured_outputs",),
    "input": ("messages", "prompt"),
    "instructions": ("system", "messages", "prompt"),
    "json_schema": ("response_format",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_gen_len": ("max_tokens",),
    "max_length": ("max_tokens",),
    "max_new_tokens": ("max_tokens",),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "max_tokens_to_sample": ("max_tokens",),
    "messages": ("prompt", "input"),
    "n_predict": ("max_tokens",),
    "n_probs": ("top_logprobs", "logprobs"),
    "num_predict": ("max_tokens",),
    "parse_special": ("prompt",),
    "prompt": ("messages", "input", "content"),
    "reasoning": ("reasoning_effort", "thinking"),
    "regex": ("structured_outputs",),
    "repeat_penalty": ("repetition_penalty",),
    "schema": ("response_format",),
    "stop_sequences": ("stop",),
    "stop_words": ("stop",),
    "stopping_strings": ("stop",),
    "system": ("messages", "instructions", "prompt"),
    "system_prompt": ("messages", "instructions", "system"),
    "text": ("prompt",),
    "think": ("reasoning_effort", "thinking", "reasoning"),
    "thinking": ("chat_template_kwargs", "reasoning"),
    "with_pieces": ("return_token_strs",),
}
# Parameter -> advice where no single parameter replaces it.
ADVICE = {
    "options": "put its fields at the top level of the request",
    "num_ctx": "set the context length with --max-seq-len when the server starts",
    "prompt_logprobs": "/v1/completions returns them with echo and logprobs",
}

# Parameter -> {value: its meaning}. These values switch a parameter off in other servers. None means absent.
OFF: dict[str, dict] = {
    "top_p": {0: 1},
    "top_k": {-1: 0},
    "seed": {-1: None},
    "max_tokens": {-1: None},
    "max_completion_tokens": {-1: None},
    "max_output_tokens": {-1: None},
    "repetition_penalty": {0: 1},
    "min_p": {-1: 0},
    "logprobs": {-1: None},
}
# Parameters for which an empty value means that they are absent.
EMPTY_IS_ABSENT = frozenset(
    "response_format structured_outputs stop stop_sequences tool_choice reasoning_effort stream_options suffix "
    "logit_bias chat_template_kwargs text reasoning thinking output_config tools stop_token_ids "
    "previous_response_id".split()
)


def is_neutral(value, accepted: list) -> bool:
    """Return whether `value` is one of the `accepted` values. 1 equals 1.0, but not true."""
    return any(
        isinstance(value, bool) == isinstance(other, bool) and type(value) in (type(other), int, float)
        and value == other
        for other in accepted
    )  # fmt: skip


def replacement(name: str, fields) -> str | None:
    """Return advice about a parameter of another API, such as "use max_tokens"; None if there is none."""
    if name in ADVICE:
        return ADVICE[name]
    instead = next((other for other in INSTEAD.get(name, ()) if other in fields), None)
    return instead and f"use {instead}"


def without_off_values(values: dict) -> dict:
    """Return the parameters of a body in their normal form.

    Values that switch a parameter off elsewhere are replaced or removed, and integral floats become integers.
    """
    made = {}
    for name, value in values.items():
        value = _integral(value)
        if isinstance(value, list) and name in ("stop_token_ids", "prompt", "tokens"):
            value = [_integral_list(item) for item in value] if {float, list} & set(map(type, value)) else value
        off = OFF.get(name, {})
        if isinstance(value, int | float) and not isinstance(value, bool) and value in off:
            value = off[value]
        if name in ("stop", "stop_sequences") and isinstance(value, list):
            value = [stop for stop in value if stop not in EMPTY]
        if name == "structured_outputs" and isinstance(value, dict):
            value = {key: setting for key, setting in value.items() if setting not in (None, False, "", {}, [])}
        if value is not None and not (name in EMPTY_IS_ABSENT and value in EMPTY):
            made[name] = value
    return made


def _integral(value):
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _integral_list(value):
    if not isinstance(value, list):
        return _integral(value)
    return [_integral(item) for item in value] if float in set(map(type, value)) else value
