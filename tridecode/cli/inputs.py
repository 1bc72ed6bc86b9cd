"""Input of the commands: files, stdin and JSON. Its size is limited, and it is checked and valid Unicode."""

import codecs
import io
import json
import math
import os
import re
import select
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from ..arguments import check_messages
from ..errors import PromptError, as_json
from .terminal import Output, did_you_mean

LARGEST = 64_000_000  # Maximum characters of stdin, or bytes of a file. No context holds such a long prompt.
READ_SIZE = 1 << 20  # Characters or bytes that are read at a time. Ctrl-C takes effect between two reads.
DIGITS = 100  # Maximum digits of a number in JSON.
STDIN_NOTE_DELAY = 1.0  # Seconds of waiting after which a note reports that the program reads stdin.
# Marks with which a text in another encoding begins. The mark of UTF-16 is the beginning of a mark of UTF-32.
ENCODINGS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
PROMPTS = ("prompt", "messages", "prompt_ids")  # Fields of JSON lines that contain a prompt.
STDIN = re.compile(r"(?m)^-$|(?<!\S)-\Z")  # A hyphen in a prompt that stdin replaces. Any other hyphen is text.


def read_file(path: str, output: Output, limit: int | None = None) -> str:
    """Return the text of a regular file or a pipe; - is stdin. Raises PromptError."""
    if path == "-":
        return read_stdin(output, limit)
    data = read_bytes(path, limit, "a regular file or a pipe, or - for stdin")
    return clean("".join(decoded(iter([data]), path)), path, output)


def read_bytes(path: str, limit: int | None, expected: str, pipes: bool = True) -> bytes:
    """Return the bytes of a regular file or, with `pipes`, a pipe.

    Raises PromptError, which names `expected`, for anything else.
    """
    try:
        if not (is_file if pipes else stat.S_ISREG)(os.stat(path).st_mode):
            raise PromptError(f"{path}: not a file; give {expected}")
        with open(path, "rb") as file:
            return read_all(file.read, path, limit)
    except OSError as error:
        raise PromptError(f"{path}: {error.strerror}; give {expected}") from None


def read_stdin(output: Output, limit: int | None = None, hint: str = "") -> str:
    """Return all of stdin. hint: the end of the note that reports a wait."""
    if sys.stdin.isatty():
        output.note("reading from the terminal; Ctrl-D on an empty line ends it")
    elif not readable_within(STDIN_NOTE_DELAY):
        output.note(f"waiting for stdin, which is open and sends no data{hint}")
    texts = stdin_texts()
    return clean(read_all(lambda size: next(texts, ""), "stdin", limit), "stdin", output)


def with_stdin(text: str, output: Output) -> str:
    """Return a prompt in which stdin replaces a -. If stdin is a pipe or a file and there is no -, it is appended."""
    if STDIN.search(text):
        data = read_stdin(output).removesuffix("\n")
        if not data:
            output.note("stdin, which replaces the - in the prompt, is empty")
        return STDIN.sub(lambda _: data, text)
    if not stdin_is_file():
        return text
    data = read_stdin(output, hint="; </dev/null leaves it out of the prompt").removesuffix("\n")
    before = text.removesuffix("\n")
    return f"{before}\n{data}" if before and data else data or text


def stdin_lines(output: Output, mark: str = "") -> Iterator[str]:
    """Yield the lines of stdin as they arrive. Before each line, write `mark` to stderr.

    Raises PromptError if a line is too long.
    """
    pieces, size, texts = [], 0, stdin_texts()
    while (text := next_text(texts, mark)) is not None:
        for piece in re.findall(r"[^\n]*\n|[^\n]+", text):
            pieces.append(piece)
            size += len(piece)
            if size > LARGEST:
                raise PromptError(f"stdin: a line longer than {LARGEST:,} characters, the limit; end it earlier")
            if piece.endswith("\n"):
                yield clean("".join(pieces), "stdin", output)
                pieces, size = [], 0
    if pieces:
        yield clean("".join(pieces), "stdin", output)


def next_text(texts: Iterator[str], mark: str) -> str | None:
    """Write `mark` to stderr, then return the next text, or None at the end."""
    if mark:
        print(mark, end="", file=sys.stderr, flush=True)
    text = next(texts, None)
    if text is None and mark:
        print(file=sys.stderr)  # Ctrl-D leaves the cursor after the mark.
    return text


def stdin_texts() -> Iterator[str]:
    """Yield the text of stdin as it arrives. Undecodable bytes become lone surrogates."""
    if not hasattr(sys.stdin, "buffer"):  # It is not a stream of the operating system.
        return iter(lambda: sys.stdin.read(READ_SIZE), "")
    chunks = iter(lambda: sys.stdin.buffer.read1(READ_SIZE), b"")  # type: ignore[attr-defined, union-attr]
    return decoded(chunks, "stdin", sys.stdin.encoding, newlines=True)


def decoded(chunks: Iterator[bytes], name: str, encoding: str = "utf-8", newlines: bool = False) -> Iterator[str]:
    """Yield the text of bytes as they arrive. Undecodable bytes become lone surrogates.

    Args:
        chunks: the bytes
        name: the source, for errors
        encoding: the encoding of a text that does not begin with one of the marks ENCODINGS
        newlines: whether CR and CR LF become LF

    Raises:
        PromptError: the bytes are not text
    """
    head = b""
    for chunk in chunks:
        head += chunk
        if not any(mark.startswith(head) for mark in ENCODINGS):
            break
    encoding = next((each for mark, each in ENCODINGS.items() if head.startswith(mark)), encoding)
    decoder: Any = codecs.getincrementaldecoder(encoding)("surrogateescape")
    decoder = io.IncrementalNewlineDecoder(decoder, translate=True) if newlines else decoder
    try:
        for chunk in chain([head], chunks, [b""]):
            text = decoder.decode(chunk, final=not chunk)
            if "\0" in text:
                raise PromptError(f"{name}: contains NUL bytes, so it is UTF-16 without a mark, or no text; give UTF-8")
            if text:
                yield text
    except UnicodeDecodeError:  # Only bytes of the encodings with a mark cannot become surrogates.
        raise PromptError(f"{name}: it begins as {encoding.upper()}, but is not valid; give UTF-8") from None


def is_file(mode: int) -> bool:
    """Return whether an st_mode describes a regular file or a pipe.

    Input from both ends, unlike input from a terminal.
    """
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode)


def stdin_is_file() -> bool:
    """Return whether stdin is a file, not a pipe, a terminal or closed."""
    try:
        return is_file(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):  # stdin is closed, or is not a stream of the operating system.
        return False


def readable_within(seconds: float) -> bool:
    """Return whether stdin has data, or ends, within that time."""
    try:
        return bool(select.select([sys.stdin], [], [], seconds)[0])
    except (OSError, ValueError):
        return True


def read_all(read: Callable, name: str, limit: int | None):
    """Read until the end in several reads, and return str or bytes.

    Args:
        read: reads at most the given number of characters or bytes, like `read` of a file
        name: the source, for errors
        limit: largest number of characters or bytes; None for LARGEST

    Raises:
        PromptError: the input is longer
    """
    chunks, size, limit = [], 0, limit or LARGEST
    while chunk := read(READ_SIZE):
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            unit = "bytes" if isinstance(chunk, bytes) else "characters"
            raise PromptError(f"{name}: longer than the limit of {limit:,} {unit}; shorten it, or split it")
    return chunks[0][:0].join(chunks) if chunks else read(0)


def parse_json(text: str, place: str, output: Output):
    """Return the value of a JSON text.

    Lone surrogates are replaced as in `clean`, so that the value can be written as JSON again.
    """
    try:
        value = loads(text)
        again = json.dumps(value, ensure_ascii=False)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno:,}, " if "\n" in text.strip() else ""
        raise PromptError(f"{place}: not JSON ({error.msg}, {line}column {error.colno:,}); correct it") from None
    except RecursionError:
        raise PromptError(f"{place}: not JSON that can be read (nested too deep); correct it") from None
    except ValueError as error:  # The functions below raise ValueError.
        raise PromptError(f"{place}: not JSON that can be read ({error}); correct it") from None
    cleaned = clean(again, place, output)
    return value if cleaned == again else json.loads(cleaned)


def parse_object(text: str, place: str, output: Output) -> dict:
    """Return the object in a line of JSON lines. Raises PromptError, which begins with `place`."""
    value = parse_json(text, place, output)
    if not isinstance(value, dict):
        raise PromptError(f'{place}: expected an object like {{"prompt": "..."}}, got {as_json(value)}')
    return value


def prompt_field(line: dict, place: str, others: Sequence[str]) -> str:
    """Return the name of the field of a parsed line that contains its prompt, one of PROMPTS.

    Args:
        line: an object
        place: file and line, for errors
        others: names of the fields that the line may also have

    Raises:
        PromptError: the line has an unknown field, no prompt or several, or a prompt of the wrong type
    """
    for name in line:
        if name not in (*PROMPTS, *others):
            known = f"known are {', '.join((*PROMPTS, *others))}"
            raise PromptError(f"{place}: unknown field {as_json(name)}; {did_you_mean(name, others) or known}")
    kinds = [name for name in PROMPTS if name in line]
    if len(kinds) != 1:
        listed = " and ".join(kinds) or "none"
        raise PromptError(f"{place}: expected one of prompt, messages and prompt_ids, got {listed}")
    (kind,) = kinds
    prompt = line[kind]
    if kind == "messages":
        line[kind] = chat_of(prompt, place)
    elif kind == "prompt_ids":
        if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
            raise PromptError(f"{place}: prompt_ids must be a list of token ids like [1, 2, 3], got {as_json(prompt)}")
    elif not isinstance(prompt, str) or not prompt:
        raise PromptError(f"{place}: prompt must be a nonempty string, got {as_json(prompt)}")
    return kind


def chat_of(value, place: str) -> list[dict]:
    """Return a chat from JSON. One message needs no list, and a content may be a list of text parts.

    Raises PromptError, which begins with `place`.
    """
    if isinstance(value, dict) and {"role", "content"} <= value.keys():
        value = [value]
    messages = []
    for number, message in enumerate(value if isinstance(value, list) else (), 1):
        if isinstance(message, dict) and isinstance(parts := message.get("content"), list):
            for part in parts:
                if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                    expected = f'expected text parts like {{"type": "text", "text": "..."}}, got {as_json(part)}'
                    raise PromptError(f"{place}: message {number:,}: {expected}")
            message = message | {"content": "\n".join(part["text"] for part in parts)}
        messages.append(message)
    return check_messages(messages or value, place)


def loads(text: str | bytes):
    """Parse JSON. Raises ValueError for numbers that cannot be written as JSON again."""
    return json.loads(text, parse_int=_integer, parse_float=_real, parse_constant=_constant)


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits is not supported; use at most {DIGITS}")
    return int(digits)


def _real(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"the number {digits[:40]} is out of range")
    return value


def _constant(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")


def clean(text: str, name: str, output: Output) -> str:
    """Return a text as valid Unicode without byte order marks, which stay where files were joined.

    Lone surrogates, which represent undecodable bytes, become U+FFFD with a note.
    """
    data = text.replace("\ufeff", "").encode("utf-16-le", "surrogatepass")
    try:
        return data.decode("utf-16-le")
    except UnicodeDecodeError:
        output.note(f"{name}: bytes that are not valid UTF-8 or Unicode were replaced by U+FFFD")
        return data.decode("utf-16-le", "replace")
