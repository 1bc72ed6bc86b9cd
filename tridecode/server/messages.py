"""Conversion of clients' chat messages into messages for a chat template."""

from ..errors import as_json
from .errors import ApiError, bad_request
from .fields import EMPTY
from .settings import MAX_MESSAGES

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
         "function": "tool"}  # fmt: skip
# Fields of messages that do not change the prompt. Servers and clients add them to answers that come back as history.
IGNORED = frozenset(
    "id type object status phase annotations audio reasoning_details thinking_blocks provider_specific_fields "
    "cache_control citations token_ids logprobs timestamp created created_at metadata parsed usage "
    "recipient end_turn refusal".split()
)


def chat_messages(messages: list) -> list[dict]:
    """Check messages of OpenAI's chat API and convert them for a chat template.

    Returns:
        Dicts with role, content (text) and, if set, name, reasoning_content, tool_calls and tool_call_id.

    Raises:
        ApiError: (400) a message is invalid or has content that is not text.
    """
    if not messages:
        raise bad_request("messages must contain at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(f"messages: at most {MAX_MESSAGES:,}, got {len(messages):,}", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message, place: str) -> dict:
    if not isinstance(message, dict):
        raise _refused(place, f"expected an object with role and content, got {as_json(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _refused(f"{place}.role", f"expected {', '.join(ROLES)}, got {as_json(role)}")
    converted: dict = {"role": ROLES[role], "content": _content(message.get("content"), role, f"{place}.content")}
    message = _known_fields(message, role)
    converted["content"] = converted["content"] or message.pop("refusal", "")
    for name, value in message.items():
        if name in ("role", "content") or name in IGNORED or value in EMPTY:
            continue
        if name == "tool_calls" and role == "assistant":
            converted[name] = _calls(value, f"{place}.{name}")
            continue
        if name not in ("name", "reasoning_content") and (name, ROLES[role]) != ("tool_call_id", "tool"):
            raise _refused(f"{place}.{as_json(name)[1:-1]}", "not supported by this server: leave it out")
        if not isinstance(value, str):
            raise _refused(f"{place}.{name}", f"expected text, got {as_json(value)}")
        converted[name] = value
    return converted


def _known_fields(message: dict, role: str) -> dict:
    """Return a message in which other servers' and older fields have today's names."""
    message = dict(message)
    if role == "assistant" and isinstance(thoughts := message.pop("reasoning", None), str):
        message.setdefault("reasoning_content", thoughts)
    if not isinstance(message.get("refusal"), str) or role != "assistant":
        message.pop("refusal", None)
    if role == "assistant" and isinstance(call := message.pop("function_call", None), dict):
        message.setdefault("tool_calls", [{"id": call.get("name"), "function": call}])
    if role == "function":
        message["tool_call_id"] = message.get("name")
    return message


def _calls(calls, place: str) -> list[dict]:
    """Check the tool calls of an earlier answer and convert them for a chat template."""
    converted = []
    for i, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            expected = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise _refused(f"{place}[{i}]", f"expected {expected}, got {as_json(call)}")
        if not isinstance(arguments := function.get("arguments") or "{}", str):
            raise _refused(f"{place}[{i}].function.arguments", f"expected JSON as text, got {as_json(arguments)}")
        converted.append(function_call(str(call.get("id") or f"call_{i}"), function["name"], arguments))
    return converted


def function_call(id: str, name: str, arguments: str) -> dict:
    """Return a tool call in the form of chat templates; `arguments` is JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def merge_turns(messages: list[dict]) -> list[dict]:
    """Merge messages into alternating turns, as chat templates require.

    System messages before the first turn become one system turn; later ones become messages of the user. Consecutive
    messages of one role become one message.
    """
    merged: list[dict] = []
    for message in messages:
        if message["role"] == "system" and any(earlier["role"] != "system" for earlier in merged):
            message = message | {"role": "user"}
        last = merged[-1] if merged else None
        if last and last["role"] == message["role"] != "tool":
            joined = "\n\n".join(text for text in (last["content"], message["content"]) if text)
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            merged[-1] = last | message | {"content": joined} | ({"tool_calls": calls} if calls else {})
        else:
            merged.append(message)
    return merged


def _content(content, role: str, place: str) -> str:
    """Return text content, or the texts of its parts joined by newlines."""
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise _refused(place, f"expected text or a list of text parts, got {as_json(content)}")
    return "\n".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _part(part, place: str) -> str:
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
        raise _refused(place, f'expected {{"type": "text", "text": "..."}}, got {as_json(part)}')
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return part["refusal"]
    if kind != "text":
        raise _refused(place, f"{as_json(kind)[1:-1]} is not supported: this model reads text only")
    if not isinstance(part.get("text"), str):
        raise _refused(f"{place}.text", f"expected text, got {as_json(part.get('text'))}")
    return part["text"]


def _refused(place: str, message: str) -> ApiError:
    return bad_request(f"{place}: {message}", "messages")
