"""The chat page at /: one document with inline style and scripts, and a policy that allows only these."""

import base64
import hashlib
from pathlib import Path

STATIC = Path(__file__).parent / "static"
PARTS = {  # Reference in page.html -> (tag of the inline element that replaces it, file).
    '<link rel="stylesheet" href="page.css">': ("style", "page.css"),
    '<script src="markdown.js"></script>': ("script", "markdown.js"),
    '<script src="chat.js"></script>': ("script", "chat.js"),
}


def page() -> tuple[bytes, dict[str, str]]:
    """Return the document and its response headers."""
    html = (STATIC / "page.html").read_text(encoding="utf-8")
    sources: dict[str, list[str]] = {"style": [], "script": []}
    for reference, (tag, name) in PARTS.items():
        content = (STATIC / name).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        sources[tag].append(f"'sha256-{digest}'")
        html = html.replace(reference, f"<{tag}>{content}</{tag}>")
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(sources["script"]),
        "style-src": " ".join(sources["style"]),
        "connect-src": "'self'",
        "img-src": "data:",  # The page has an empty icon.
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # Scripts cannot insert text as HTML.
        "trusted-types": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return html.encode(), headers
