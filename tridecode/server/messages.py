"""Chat messages as clients send them, turned into those that a chat template takes: a role and text."""

from ..errors import as_json
from .errors import ApiError, refusal
from .settings import MESSAGES

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
EMPTY = (None, [], "", {})


def chat_messages(messages: list) -> list[dict]:
    """Each with role, content, and where given name and reasoning_content. Raises ApiError (400), by name."""
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
    made = {"role": ROLES[role], "content": _content(message.get("content"), role, f"{place}.content")}
    for name, value in message.items():
        if name in ("role", "content") or value in EMPTY:
            continue
        if name not in ("name", "reasoning_content"):
            raise _refused(f"{place}.{as_json(name)[1:-1]}", "not supported by this server: leave it out")
        if not isinstance(value, str):
            raise _refused(f"{place}.{name}", f"expected text, got {as_json(value)}")
        made[name] = value
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
