"""Chat messages as clients send them, turned into those that a chat template takes: a role and text."""

from ..errors import as_json
from .errors import ApiError, refusal
from .settings import MESSAGES

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
EMPTY: tuple[object, ...] = (None, [], "", {})


def chat_messages(messages: list) -> list[dict]:
    """Each with role, content, and where given name, reasoning_content, tool_calls and tool_call_id. Raises ApiError
    (400), by name."""
    if not messages:
        raise refusal("messages must hold at least one message", "messages")
    if len(messages) > MESSAGES:
        raise refusal(f"messages: at most {MESSAGES:,}, got {len(messages):,}", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message, place: str) -> dict:
    if not isinstance(message, dict):
        raise _refused(place, f"expected an object with role and content, got {as_json(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _refused(f"{place}.role", f"expected {', '.join(ROLES)}, got {as_json(role)}")
    made: dict = {"role": ROLES[role], "content": _content(message.get("content"), role, f"{place}.content")}
    for name, value in message.items():
        if name in ("role", "content") or value in EMPTY:
            continue
        if name == "tool_calls" and role == "assistant":
            made[name] = _calls(value, f"{place}.{name}")
            continue
        if name not in ("name", "reasoning_content") and (name, role) != ("tool_call_id", "tool"):
            raise _refused(f"{place}.{as_json(name)[1:-1]}", "not supported by this server: leave it out")
        if not isinstance(value, str):
            raise _refused(f"{place}.{name}", f"expected text, got {as_json(value)}")
        made[name] = value
    return made


def _calls(calls, place: str) -> list[dict]:
    """Those of an earlier answer, as templates take them."""
    made = []
    for i, call in enumerate(calls if isinstance(calls, list) else [calls]):
        told = call.get("function") if isinstance(call, dict) else None
        if not isinstance(told, dict) or not isinstance(told.get("name"), str):
            expected = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise _refused(f"{place}[{i}]", f"expected {expected}, got {as_json(call)}")
        if not isinstance(arguments := told.get("arguments") or "{}", str):
            raise _refused(f"{place}[{i}].function.arguments", f"expected JSON as text, got {as_json(arguments)}")
        made.append(call_of(str(call.get("id") or f"call_{i}"), told["name"], arguments))
    return made


def call_of(id: str, name: str, arguments: str) -> dict:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def in_turns(messages: list[dict]) -> list[dict]:
    """Messages of APIs that put instructions anywhere, as templates take them: those before the first turn are one
    system turn, later ones are the user's, and texts of one role that follow each other are one."""
    made: list[dict] = []
    for message in messages:
        if message["role"] == "system" and any(before["role"] != "system" for before in made):
            message = message | {"role": "user"}
        last = made[-1] if made else None
        if last and last["role"] == message["role"] != "tool":
            joined = "\n\n".join(text for text in (last["content"], message["content"]) if text)
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            made[-1] = last | message | {"content": joined} | ({"tool_calls": calls} if calls else {})
        else:
            made.append(message)
    return made


def _content(content, role: str, place: str) -> str:
    """Text, or the texts of its parts, a line each."""
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
    if kind != "text":
        raise _refused(place, f"{as_json(kind)[1:-1]} is not supported: this model reads text only")
    if not isinstance(part.get("text"), str):
        raise _refused(f"{place}.text", f"expected text, got {as_json(part.get('text'))}")
    return part["text"]


def _refused(place: str, message: str) -> ApiError:
    return refusal(f"{place}: {message}", "messages")
