"""Tests of the inputs of `generate`: prompts, stdin, message files and saved sessions, and which inputs it refuses."""

import io
import json
import os
import socket
import threading
from itertools import product

import pytest
from generating import LIMITS, user

from tridecode.cli.inputs import stdin_lines
from tridecode.cli.terminal import Output

SESSION = {
    "format": "tridecode session", "version": 1, "model": "m", "raw": False, "system": None,
    "turns": [{"user": "Hi", "assistant": "Hello"}, {"user": "Bye", "assistant": "See you"}],
}  # fmt: skip


HYPHENS = {  # prompt: the same prompt after IN was read from stdin
    "-": "IN",
    "Shorten: -": "Shorten: IN",
    "Text:\n-\nShorten it.": "Text:\nIN\nShorten it.",
    "5 - 3 = ?": "5 - 3 = ?",
    "- a\n- b": "- a\n- b",
    "a-": "a-",
    "well-known": "well-known",
}


def test_hyphen_is_replaced_with_stdin(generate, seen):
    for prompt, text in HYPHENS.items():
        assert generate(f"--prompt={prompt}", *LIMITS, stdin=b"IN")[0] == 0 and seen[-1][0] == [user(text)]
    assert generate("Name", "a", "river.", *LIMITS)[0] == 0 and seen[-1][0] == [user("Name a river.")]
    assert generate("Shorten: -", *LIMITS, stdin=b"a river")[0] == 0 and seen[-1][0] == [user("Shorten: a river")]


def test_stdin_inside_the_prompt(generate, seen):
    code, _, err = generate("--prompt", "Shorten: -", *LIMITS, stdin=b"\\1 a river\n")
    assert code == 0 and seen[0][0] == [user("Shorten: \\1 a river")] and err.count("\n") == 1
    _, _, err = generate("--prompt", "Shorten: -", *LIMITS, stdin=b"")
    assert err.startswith("stdin, which replaces the - in the prompt, is empty\n")


def test_invalid_unicode_is_replaced_with_a_note(generate, seen, tmp_path):
    code, _, err = generate(*LIMITS, stdin=b"a \xff b\n")
    assert code == 0 and seen[-1][0] == [user("a \ufffd b")] and err.startswith("stdin: bytes that are not valid UTF-8")
    code, _, err = generate("--prompt", "x", "--system", "\ud800", *LIMITS)
    assert code == 0 and seen[-1][0][0]["content"] == "\ufffd" and err.count("\n") == 2
    # Python represents an invalid UTF-8 byte of an argument as such a surrogate.
    code, _, err = generate("--prompt", "x\udcff", *LIMITS)
    assert code == 0 and seen[-1][0] == [user("x\ufffd")] and err.startswith("--prompt: ")
    file = tmp_path / "m.json"
    file.write_bytes(b'\xef\xbb\xbf[{"role": "user", "content": "\\ud800 \\ud83d\\ude00 \xfe"}]')
    code, _, err = generate("--messages", file, *LIMITS)
    assert code == 0 and seen[-1][0] == [user("\ufffd 😀 \ufffd")] and str(file) in err
    valid = "😀 \ufffd\x00é"
    code, _, err = generate("--prompt", valid, *LIMITS)
    assert code == 0 and seen[-1][0] == [user(valid)] and err.count("\n") == 1


def test_encodings_with_and_without_mark(generate, seen, tmp_path):
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        for order in ("",) if "sig" in encoding else ("-le", "-be"):
            mark = "\ufeff" if order else ""
            text = f"{mark}é 😀\r\nend".encode(encoding + order)
            code, _, err = generate(*LIMITS, stdin=text)
            assert (code, seen[-1][0]) == (0, [user("é 😀\nend")]), (encoding, order, err)
            (file := tmp_path / "f").write_bytes(
                f'{mark}{{"prompt": "é"}}\n\ufeff{{"prompt": "b"}}\n'.encode(encoding + order)
            )
            assert generate("--jsonl", file, *LIMITS)[0] == 0 and [p for p, *_ in seen[-2:]] == [
                [user("é")],
                [user("b")],
            ]
    for data, named in (
        ("é 1".encode("utf-16-le"), "NUL"),
        (b"\x89PNG\r\n\x1a\n\0\0", "NUL"),
        (b"\xff\xfea\0b", "UTF-16"),
        (b"\xff\xfe\0\xdc", "UTF-16"),
    ):
        code, out, err = generate(*LIMITS, stdin=data)
        assert (
            (code, out, err.count("\n")) == (1, "", 1) and err.startswith("tridecode: error: stdin: ") and named in err
        )
        file.write_bytes(data)
        code, out, err = generate("--jsonl", file, *LIMITS)
        assert (code, out, err.count("\n")) == (1, "", 1) and str(file) in err and named in err


def test_lines_of_a_piped_chat_are_decoded_as_they_arrive(monkeypatch, capsys):
    read, write = os.pipe()
    with os.fdopen(write, "wb", buffering=0) as end, os.fdopen(read, encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        for encoding, mark in (("utf-16-le", "\ufeff"), ("utf-16-be", "\ufeff"), ("utf-8", "")):
            lines = stdin_lines(Output())
            for line in ("é", "", "😀\ufeff"):
                end.write(f"{mark}{line}\n".encode(encoding))
                assert next(lines) == line.removesuffix("\ufeff") + "\n"
                mark = ""
        end.write(b"a\xff\n")
        assert next(lines) == "a\ufffd\n" and "stdin: bytes" in capsys.readouterr().err


def test_messages_and_system(generate, seen, pipe, tmp_path):
    chat = [user("Hi"), {"role": "assistant", "content": "Hello"}, user("Bye")]
    file = tmp_path / "m.json"
    for content in (chat, {"messages": chat}):
        file.write_text(json.dumps(content))
        assert generate("--messages", file, *LIMITS)[0] == 0 and seen[-1][0] == chat
    assert generate("--messages", "-", *LIMITS, stdin=json.dumps(chat).encode())[0] == 0 and seen[-1][0] == chat
    stdin, end = pipe(json.dumps(chat).encode())
    end.close()
    assert generate("--messages", f"/dev/fd/{stdin.fileno()}", *LIMITS)[0] == 0 and seen[-1][0] == chat
    assert generate("--messages", file, "--system", "Be brief", *LIMITS)[0] == 0
    assert seen[-1][0] == [{"role": "system", "content": "Be brief"}, *chat]
    assert generate("--prompt", "Hi", "--system", "S", *LIMITS)[0] == 0
    assert seen[-1][0] == [{"role": "system", "content": "S"}, user("Hi")]


def test_last_message_of_a_saved_session_is_answered_again(generate, seen, tmp_path):
    file = tmp_path / "s.json"
    file.write_text(json.dumps(SESSION | {"system": "S"}))
    code, _, err = generate("--messages", file, *LIMITS)
    as_messages = [user("Hi"), {"role": "assistant", "content": "Hello"}, user("Bye")]
    assert code == 0 and seen[-1][0] == [{"role": "system", "content": "S"}, *as_messages]
    assert err.startswith(f"{file}: a saved session; its last message is answered again\n")
    file.write_text(json.dumps(SESSION))
    assert generate("--messages", file, "--system", "T", *LIMITS)[0] == 0
    assert seen[-1][0] == [{"role": "system", "content": "T"}, *as_messages]


def test_forms_of_other_programs_are_read(generate, seen, tmp_path):
    (file := tmp_path / "m").write_text(json.dumps(user("Hi")))
    assert generate("--messages", file, *LIMITS)[0] == 0 and seen[-1][0] == [user("Hi")]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    file.write_text(json.dumps({"model": "m", "messages": [user(parts)]}))
    assert generate("--messages", file, *LIMITS)[0] == 0 and seen[-1][0] == [user("one\ntwo")]
    image = {"type": "image_url", "image_url": {"url": "x"}}
    file.write_text(json.dumps([user([image])]))
    code, out, err = generate("--messages", file, *LIMITS)
    assert (code, out) == (1, "") and f"{file}: message 1: expected text parts like" in err
    batch = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions"}
    body = {"model": "m", "messages": [user(parts)], "max_completion_tokens": 2, "seed": 3}
    file.write_text(json.dumps(batch | {"body": body}) + "\n" + json.dumps(batch | {"body": body | {"zz": 1}}))
    code, out, err = generate("--jsonl", file, *LIMITS)
    first, second = map(json.loads, out.splitlines())
    assert (code, first["id"], first["seed"], first["cut_by"]) == (1, "r-1", 3, "max_tokens")
    assert seen[-1][0] == [user("one\ntwo")] and seen[-1][1].max_tokens == 2
    assert 'unknown field "zz"' in second["error"]


@pytest.mark.parametrize(
    "text, named",
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("1" * 5000, "a number of 5,000 digits"),
        ("[1e999]", "1e999 is out of range"),
        ("[]", "got []"),
        ('{"role": "user"}', "expected a list"),
        ('["x"]', "message 1"),
        ('[{"role": "user", "content": "a"}, {"role": "user"}]', "message 2: content must be a string, got none"),
        ('[{"role": 1, "content": "a"}]', "message 1: role must be a string, got 1"),
        ('[{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]', "message 2: role must be one of"),
        ('{"format": "tridecode session", "version": 1}', "raw, system, title or turns is missing"),
        (json.dumps(SESSION | {"raw": True}), "made with --raw"),
        (json.dumps(SESSION | {"turns": []}), "it has no turns"),
        ('[{"role": "system", "content": "a"}]', "leave out --system"),
    ],
)
def test_invalid_messages_are_refused(generate, tmp_path, text, named):
    file = tmp_path / "m.json"
    file.write_text(text)
    code, out, err = generate("--messages", file, "--system", "S", *LIMITS)
    assert (code, out, err.count("\n")) == (1, "", 1) and str(file) in err and named in err


@pytest.fixture
def pipe():
    """Return a function that creates a pipe with data; it returns the reading stream and the open writing end."""
    streams = []

    def pipe(data=b""):
        read, write = os.pipe()
        os.write(write, data)
        streams.extend((os.fdopen(read, encoding="utf-8"), os.fdopen(write, "wb")))
        return streams[-2:]

    yield pipe
    for stream in streams:
        stream.close()


def test_stdin_is_appended_to_the_prompt(generate, seen, pipe, tmp_path):
    for prompt, data, text in (
        ("Explain:", b"a diff\n", "Explain:\na diff"),
        ("Explain:\n", b"a\nb\n\n", "Explain:\na\nb\n"),
        ("Explain:", b"", "Explain:"),
        ("", b"a diff\n", "a diff"),
        ("Explain: -", b"a diff\n", "Explain: a diff"),
        ("-\nis what?", b"a diff\n", "a diff\nis what?"),
    ):
        stdin, end = pipe(data)
        end.close()
        code, _, err = generate("--prompt", prompt, *LIMITS, "--raw", stdin=stdin)
        assert (code, seen[-1][0], err.count("\n")) == (0, text, 1)
    (file := tmp_path / "f").write_text("a file")
    with file.open() as stdin:
        assert generate("--prompt", "Explain:", *LIMITS, stdin=stdin)[0] == 0
    assert seen[-1][0] == [user("Explain:\na file")]


def test_other_kinds_of_stdin_are_not_read_without_hyphen(generate, seen):
    ours, theirs = socket.socketpair()
    leader, follower = os.openpty()
    theirs.sendall(b"not for us")
    for stdin in (ours.makefile("r"), os.fdopen(follower), open(os.devnull), open("/dev/zero")):
        with stdin:
            assert generate("--prompt", "Hi", *LIMITS, stdin=stdin)[0] == 0
        assert seen[-1][0] == [user("Hi")]
    for each in (ours, theirs):
        each.close()
    os.close(leader)


def test_wait_for_an_open_pipe_is_reported(generate, seen, pipe, monkeypatch):
    stdin, end = pipe()
    noted, note = threading.Event(), Output.note
    monkeypatch.setattr(Output, "note", lambda *args, **options: (note(*args, **options), noted.set()))
    writer = threading.Thread(target=lambda: (noted.wait(60), end.write(b"late"), end.close()))
    writer.start()
    monkeypatch.setattr("tridecode.cli.inputs.STDIN_NOTE_DELAY", 0.05)
    code, _, err = generate("--prompt", "Hi", *LIMITS, stdin=stdin)
    assert code == 0 and seen[-1][0] == [user("Hi\nlate")]
    assert err.startswith("waiting for stdin, which is open and sends no data; </dev/null leaves it out of the prompt")
    writer.join()


def test_path_that_is_not_a_file_is_refused(generate, tmp_path):
    for option, path in product(("--messages", "--jsonl"), ("/dev/zero", "/dev/null", ".")):
        code, out, err = generate(option, path)
        told = f"tridecode: error: {path}: not a file; give a regular file or a pipe, or - for stdin\n"
        assert (code, out, err) == (1, "", told)
        code, out, err = generate(option, tmp_path / "absent")
        assert (code, out, err.count("\n")) == (1, "", 1) and "absent: No such file" in err


class Endless(io.TextIOBase):
    """A stdin without an end."""

    bytes_read = 0

    def read(self, size=-1):
        assert size > 0, "the program read an endless stream without a limit"
        self.bytes_read += size
        return "0" * size


def test_endless_input_is_refused_at_the_limit(generate, monkeypatch, tmp_path):
    monkeypatch.setattr("tridecode.cli.inputs.LARGEST", 3_000_000)
    monkeypatch.setattr("tridecode.cli.generate.batch.LARGEST", 5_000_000)
    for argv, limit in (((), 3), (("--prompt", "Is: -"), 3), (("--messages", "-"), 3), (("--jsonl", "-"), 5)):
        stdin = Endless()
        code, out, err = generate(*argv, stdin=stdin)
        assert (code, out, err.count("\n")) == (1, "", 1) and f"stdin: longer than the limit of {limit},000,000" in err
        assert stdin.bytes_read < (limit + 2) << 20
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    for option, limit in (("--messages", 3), ("--jsonl", 5)):
        assert f"sparse: longer than the limit of {limit},000,000 bytes" in generate(option, tmp_path / "sparse")[2]
