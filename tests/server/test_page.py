"""The chat page at /: its headers and files, and its behavior in a headless Chromium."""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from browser import CHROMIUM, browser
from servers import ANSWER, CHAT, Running, slow_passes, until
from wire import Wire

from tridecode import Engine, SamplingParams
from tridecode.cli.chat.session import loads
from tridecode.server.page import DOCUMENT_HEADERS, STATIC, TYPES, Page

QUESTION = CHAT[0]["content"]
STORY = "Tell me a short story about a snail."
LOST = "the server is not reachable, or the connection was lost"
MAX_BYTES = 400_000  # Size of all files of the page, with the licenses of libraries.
OWN = [path for path in STATIC.iterdir() if path.is_file()]
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian's package chromium)")


@pytest.fixture(scope="module")
def engine():
    with Engine.load(device="cpu", slots=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(engine):
    with Running(engine) as running:
        yield running


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running


def opened(tab, url):
    """Load the page and wait until it has received the model's name."""
    tab.open(url)
    tab.until("document.querySelector('#model')?.textContent && document.activeElement.id === 'input'")
    return tab


@pytest.fixture
def chat(chromium, served):
    """The page without conversations."""
    chromium.window(1000, 700)
    chromium.clear(served.url)
    opened(chromium, served.url)
    chromium.errors.clear()
    yield chromium
    assert chromium.errors == [], "the browser reported script errors or blocked requests"


@pytest.fixture
def slowly(served, monkeypatch):
    """Answers of the server take so long that a test can interrupt them."""
    with monkeypatch.context() as patches:
        slow_passes(served.engine, patches, 0.05)
        yield


def select(tab, selector, value, event="change"):
    """Give a field a value, as a user does."""
    tab.run(f"""(field => {{ field.value = {json.dumps(value)}; field.dispatchEvent(new Event("{event}")) }})(
        document.querySelector({json.dumps(selector)}))""")


def set_up(tab, **settings):
    """Change settings."""
    for name, value in settings.items():
        select(tab, f"#{'stop-strings' if name == 'stop' else name}", value, "input")


def ask(tab, text):
    """Type a message, send it, and wait until it is a turn."""
    enter(tab, text)
    tab.until("!document.querySelector('#input').value")


def enter(tab, text):
    tab.run("document.querySelector('#input').focus()")
    tab.type(text)
    tab.press("Enter")


def wait_for_draft(tab, text):
    """Wait until the page has saved this draft. Without this, a reload may be earlier than the save."""
    load = """const {loadDraft} = await page("store"); return (await loadDraft(location.hash.slice(1)))?.text"""
    until(lambda: tab.script(load) == text)


def answered(tab, number=1):
    """Wait for the end of the answer to the turn with this number and return its text."""
    tab.until(f"document.querySelectorAll('.turn').length === {number} && document.querySelector('#stop').hidden"
              " && document.querySelector('.turn:last-child .actions button')")  # fmt: skip
    return text_of(tab, ".turn:last-child .assistant")


def text_of(tab, selector):
    return tab.run(f"document.querySelector({json.dumps(selector)}).innerText")


def texts_of(tab, selector):
    return tab.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.innerText)")


def click(tab, label, within="body"):
    """Click the last visible button with this text or label."""
    found = f"""[...document.querySelectorAll({json.dumps(within)} + ' :is(button, summary, a)')].findLast(node =>
        node.checkVisibility() && [node.innerText, node.ariaLabel].includes({json.dumps(label)}))"""
    tab.until(found)
    tab.run(f"{found}.click()")


def partial_answer(tab, characters=20):
    """Wait until an answer has this many characters, and return the text that is on the screen."""
    tab.until(f"document.querySelector('.turn:last-child .assistant')?.innerText.length > {characters}")
    return text_of(tab, ".turn:last-child .assistant")


def errors_of(tab):
    """Return the messages of the console, which the test expects, and forget them."""
    tab.run("0")
    errors, tab.errors = tab.errors, []
    return errors


# ---- the document and its files


def test_document_refers_only_to_files_of_the_page():
    page = Page()
    assert not re.search(r"<(img|iframe|object|embed|base|style)\b|@import|\burl\(|\bon\w+=|style=", page.document)
    assert not re.search(r"<script[^>]*>[^<]", page.document), "the document contains a script"
    references = re.findall(r'(?:href|src)="([^"]*)"', page.document)
    names = [name.removeprefix(f"page/{page.version}/") for name in references if name != "data:,"]
    assert names and all((STATIC / name).is_file() for name in names)
    assert not re.search(r"@import|\burl\(", (STATIC / "page.css").read_text())


def test_policy_allows_no_inline_script_or_style():
    policy = DOCUMENT_HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self'; style-src 'self'" in policy
    assert "trusted-types 'none'" in policy and "unsafe" not in policy and "sha256" not in policy


def test_scripts_never_assign_markup():
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|setHTML|DOMParser"
    for script in OWN:
        assert not re.search(ways, script.read_text()), script


def test_bundle_is_small_and_libraries_are_unchanged():
    """VENDORED.md names the version and the hash of each file that another project wrote."""
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    known = dict(re.findall(r"`(\S+)` \| `([0-9a-f]{64})`", (STATIC / "vendor" / "VENDORED.md").read_text()))
    libraries = {path.relative_to(STATIC / "vendor").as_posix(): path for path in files if path.parts[-2] != "static"}
    scripts = {name: path for name, path in libraries.items() if path.suffix in TYPES}
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in scripts.items()} == known


def test_page_needs_no_key_but_its_requests_do(engine):
    page = Page()
    with Running(engine, api_keys=("right",)) as running:
        got = running.get("/")
        assert got.status_code == 200 and got.headers["content-type"] == "text/html; charset=utf-8"
        assert got.headers["x-content-type-options"] == "nosniff" and got.text == page.document
        file = running.get(f"/page/{page.version}/chat.js")
        assert file.status_code == 200 and file.headers["content-type"] == "text/javascript; charset=utf-8"
        assert "immutable" in file.headers["cache-control"] and file.headers["x-content-type-options"] == "nosniff"
        for path in ("/page/0/chat.js", f"/page/{page.version}/../page.py", f"/page/{page.version}/page.html"):
            assert running.get(path).status_code in (401, 404)
        assert running.get("/v1/models").status_code == running.get("/page.css").status_code == 401
        assert running.post("/", {}).status_code == 405


def test_settings_have_the_ranges_of_sampling_params():
    text = (STATIC / "settings.js").read_text()
    options = {each.name: each.metadata["option"].constraint for each in fields(SamplingParams) if each.metadata}
    rows = re.findall(r"^  (\w+): \{label: .*?, min: (\S+), max: ([^,}]+)(.*)\},$", text, re.MULTILINE)
    assert len(rows) == 9
    for name, low, high, rest in rows:
        constraint = options[name]
        assert ("integer" in rest) == (type(constraint).__name__ == "Integer") and ("above" in rest) == getattr(
            constraint, "above", False
        )
        if name != "seed":  # Numbers of JavaScript are exact up to 2**53.
            assert (float(low), float(high.replace("TOP", str(2**31 - 1)))) == (constraint.low, constraint.high)


# ---- a chat


@in_chromium
def test_chat_streams_and_shows_statistics(chat):
    set_up(chat, temperature="0")
    ask(chat, QUESTION)
    assert answered(chat) == ANSWER
    parts = text_of(chat, ".turn .stats:last-of-type").split(" · ")
    assert parts[0] == "12 tokens" and parts[1].endswith(" tok/s") and parts[2].startswith("first token 0.")
    assert parts[3].endswith(" of 18 reused") and parts[4] == "context 30 / 2,048"
    ask(chat, "and plus 10?")
    assert answered(chat, 2) == "42 + 10 = 52."
    assert text_of(chat, "#title") == QUESTION and chat.run("document.title") == f"{QUESTION} · tridecode"


@pytest.fixture
def sent(served, monkeypatch):
    """The list of (messages, parameters) that the server receives."""
    got, prepare, params = [], served.engine.tokenizer.prepare_chat, served.engine.default_params
    monkeypatch.setattr(served.engine, "default_params", lambda **options: (got.append(options), params(**options))[1])
    monkeypatch.setattr(
        served.engine.tokenizer, "prepare_chat",
        lambda messages, *rest, **more: (got.append(messages), prepare(messages, *rest, **more))[1],
    )  # fmt: skip
    return got


@in_chromium
def test_spaces_newlines_and_system_prompt_are_sent(chat, sent):
    set_up(chat, system="Be brief.\n  Be kind.", max_tokens="3")
    chat.type("    if x:")
    chat.press("Enter", shift=True)
    ask(chat, "        y()  ")
    answered(chat)
    system = {"role": "system", "content": "Be brief.\n  Be kind."}
    assert sent == [{"max_tokens": 3, "adapter": None}, [system, {"role": "user", "content": "    if x:\n        y()"}]]
    assert text_of(chat, ".turn .remark") == "the answer was cut: the maximum length (3) was reached"
    assert chat.run("document.querySelector('.user').textContent") == "    if x:\n        y()"


@in_chromium
def test_sampling_options_are_checked_and_sent(chat, sent):
    set_up(chat, temperature="warm", top_k="1.5", top_p="0", stop="END\n###", seed="7", presence_penalty="-2")
    enter(chat, QUESTION)
    chat.until("document.querySelector('#settings').open && document.activeElement.id === 'temperature'")
    assert sent == [] and chat.run("document.querySelector('#input').value") == QUESTION
    assert texts_of(chat, "#sampling .error") == [
        "expected a number from 0 to 100",
        "expected a number above 0 and at most 1",
        "expected an integer of at least 0",
        *[""] * 6,
    ]
    assert chat.run("document.querySelector('#temperature').ariaInvalid") == "true"
    set_up(chat, temperature="0", top_k="40", top_p=" ")
    click(chat, "Close", "#settings")
    ask(chat, "")
    answered(chat)
    options = {"temperature": 0, "top_k": 40, "seed": 7, "presence_penalty": -2, "stop": ["END", "###"]}
    assert sent[0] == options | {"adapter": None}


@in_chromium
def test_settings_stay_with_their_conversation_and_begin_the_next(chat):
    set_up(chat, temperature="0", system="Be brief.")
    ask(chat, QUESTION)
    answered(chat)
    click(chat, "New chat")
    chat.until("!document.querySelector('.turn')")
    assert chat.run("document.querySelector('#system').value") == "Be brief."
    set_up(chat, system="Be kind.")
    click(chat, QUESTION, "#list")
    chat.until("document.querySelector('.turn')")
    assert chat.run("document.querySelector('#system').value") == "Be brief."
    chat.reload()
    chat.until("document.querySelector('.turn')")
    assert chat.run("document.querySelector('#temperature').value") == "0"


@in_chromium
@pytest.mark.parametrize("stop", ["Escape", "button"])
def test_stopped_answer_is_kept_and_continued(chat, served, monkeypatch, stop):
    set_up(chat, temperature="0")
    ask(chat, STORY)
    whole = answered(chat)
    with monkeypatch.context() as patches:
        slow_passes(served.engine, patches, 0.05)
        click(chat, "Regenerate")
        partial_answer(chat)
        assert chat.run("document.querySelector('#send').hidden && !document.querySelector('#stop').hidden")
        chat.press("Escape") if stop == "Escape" else click(chat, "Stop")
        half = answered(chat)
        until(lambda: served.metric("num_requests_running") == 0)
    assert whole.startswith(half) and len(half) < len(whole)
    assert text_of(chat, ".turn .stats:last-of-type").startswith("stopped · first token ")
    click(chat, "Continue")
    chat.until("!document.querySelector('#stop').hidden || document.querySelectorAll('.actions button').length > 4")
    assert answered(chat) == whole
    assert text_of(chat, ".actions .note") == "2 / 2", "the stopped version is hidden behind the one that continues it"


# ---- failures do not lose text


@in_chromium
def test_reload_during_an_answer_keeps_it(chat, slowly):
    ask(chat, STORY)
    seen = partial_answer(chat)
    chat.reload()
    kept = answered(chat)
    assert kept.startswith(seen) and texts_of(chat, ".user") == [STORY]
    assert "interrupted" in text_of(chat, ".turn .remark")
    click(chat, "Continue")
    chat.until(f"document.querySelector('.assistant').innerText.length > {len(kept)}")
    assert partial_answer(chat).startswith(kept)
    click(chat, "Stop")
    answered(chat)


@in_chromium
def test_closed_tab_during_an_answer_keeps_it(chat, served, slowly):
    tab = opened(chat.tab(), served.url)
    tab.window(1000, 700)
    ask(tab, STORY)
    seen = partial_answer(tab)
    tab.close()
    until(lambda: served.metric("num_requests_running") == 0)
    chat.reload()
    click(chat, STORY, "#list")
    assert answered(chat).startswith(seen)
    click(chat, "Continue")
    chat.until(f"document.querySelector('.assistant').innerText.length > {len(seen) + 10}")
    click(chat, "Stop")
    assert answered(chat).startswith(seen)


@in_chromium
def test_cut_network_keeps_the_answer(chat, served, slowly):
    with Wire(served.port) as wire:
        opened(chat, wire.url)
        ask(chat, STORY)
        seen = partial_answer(chat)
        wire.cut()
        kept = answered(chat)
        assert kept.startswith(seen) and text_of(chat, ".turn .remark") == LOST
        assert chat.run("document.querySelector('.remark').className") == "remark error"
        ask(chat, "Are you there?")
        assert answered(chat, 2) == "" and texts_of(chat, ".turn .remark") == [LOST, LOST] and errors_of(chat)
        wire.restore()
        chat.reload()
        answered(chat, 2)
        assert texts_of(chat, ".user") == [STORY, "Are you there?"] and texts_of(chat, ".assistant") == [kept, ""]
        click(chat, "Retry")
        chat.until("document.querySelector('.turn:last-child .assistant').innerText")
        click(chat, "Stop")
        answered(chat, 2)


@in_chromium
def test_silent_connection_counts_as_lost(chat, served, slowly):
    assert "SILENCE = 60_000" in (STATIC / "api.js").read_text()
    with Wire(served.port) as wire:
        opened(chat, wire.url)
        chat.script("window.setTimeout = (of => (work, ms) => of(work, ms === 60_000 ? 1000 : ms))(window.setTimeout)")
        ask(chat, STORY)
        seen = partial_answer(chat)
        wire.silent = True
        assert answered(chat).startswith(seen) and text_of(chat, ".turn .remark") == LOST


SLOW_SERVER = """
import sys, time
from tridecode.cli import main
from tridecode.step.graphs import DecodePasses
replay = DecodePasses.replay
DecodePasses.replay = lambda *args, **rest: (time.sleep(0.05), replay(*args, **rest))
sys.exit(main())
"""


@in_chromium
def test_killed_server_loses_nothing(chromium, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start():
        command = [sys.executable, "-c", SLOW_SERVER, "serve", "--device", "cpu", "--port", str(port)]
        process = subprocess.Popen(command, cwd=STATIC.parents[2], stderr=subprocess.PIPE, text=True)
        assert any(line.startswith("serving ") for line in process.stderr)
        return process

    process = start()
    try:
        chromium.window(1000, 700)
        opened(chromium, f"http://127.0.0.1:{port}")
        set_up(chromium, temperature="0")
        ask(chromium, STORY)
        seen = partial_answer(chromium)
        process.kill()
        process.wait()
        kept = answered(chromium)
        assert kept.startswith(seen) and text_of(chromium, ".turn .remark") == LOST
        process = start()
        chromium.reload()
        assert answered(chromium) == kept
        click(chromium, "Continue")
        chromium.until(f"document.querySelector('.assistant').innerText.length > {len(kept)}")
        assert answered(chromium).startswith(kept)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        chromium.errors.clear()


@in_chromium
def test_killed_browser_loses_nothing(served, slowly, tmp_path):
    with browser(tmp_path) as first:
        opened(first, served.url)
        ask(first, STORY)
        seen = partial_answer(first)
        main = int(os.readlink(tmp_path / "SingletonLock").rpartition("-")[2])
        os.kill(main, signal.SIGKILL)
    (tmp_path / "SingletonLock").unlink(missing_ok=True)
    with browser(tmp_path) as second:
        second.window(1000, 700)
        opened(second, served.url)
        click(second, STORY, "#list")
        assert answered(second).startswith(seen)


@in_chromium
def test_new_chat_and_second_tab_keep_conversations(chat, served):
    set_up(chat, temperature="0")
    ask(chat, "Hi, I'm Nora!")
    first = answered(chat)
    click(chat, "New chat")
    chat.until("!document.querySelector('.turn')")
    ask(chat, QUESTION)
    answered(chat)
    tab = opened(chat.tab(), served.url)
    tab.window(1000, 700)
    assert texts_of(tab, ".turn") == [] and texts_of(tab, "#list a") == [QUESTION, "Hi, I'm Nora!"]
    click(tab, "Hi, I'm Nora!", "#list")
    assert answered(tab) == first
    ask(tab, "What's my name?")
    assert "Nora" in answered(tab, 2)
    tab.close()
    chat.until("document.querySelector('#list a').innerText === \"Hi, I'm Nora!\"")
    assert answered(chat) == ANSWER
    chat.run("history.back()")
    assert "Nora" in answered(chat, 2), "the other tab's turn is missing"


@in_chromium
def test_tabs_with_one_conversation_keep_both_answers(chat, served, slowly):
    ask(chat, "Hi")
    answered(chat)
    tab = opened(chat.tab(), chat.run("location.href"))
    tab.window(1000, 700)
    answered(tab)
    ask(chat, STORY)
    partial_answer(chat, 5)
    ask(tab, QUESTION)
    partial_answer(tab, 2)
    click(chat, "Stop")
    answered(tab, 2)
    tab.close()
    chat.reload()
    answered(chat, 2)
    click(chat, "Previous version" if QUESTION in texts_of(chat, ".user") else "Next version")
    both = {*texts_of(chat, ".user")}
    click(chat, "Next version" if QUESTION not in both else "Previous version")
    assert both | {*texts_of(chat, ".user")} == {"Hi", STORY, QUESTION}


@in_chromium
def test_draft_and_files_survive_reload_and_closed_tab(chat, served, tmp_path):
    (tmp_path / "notes.txt").write_text("one\ntwo\n")
    tab = opened(chat.tab(), served.url)
    tab.window(1000, 700)
    tab.choose_files("#chosen", tmp_path / "notes.txt")
    tab.until("document.querySelector('#files li')")
    tab.run("document.querySelector('#input').focus()")
    tab.type("a long message that is not sent yet")
    wait_for_draft(tab, "a long message that is not sent yet")
    tab.reload()
    tab.until("document.querySelector('#files li')")
    assert tab.run("document.querySelector('#input').value") == "a long message that is not sent yet"
    tab.close()
    chat.reload()
    click(chat, "Draft: a long message that is not sent yet", "#list")
    chat.until("document.querySelector('#files li')")
    assert chat.run("document.querySelector('#input').value") == "a long message that is not sent yet"
    ask(chat, "")
    answered(chat)
    assert texts_of(chat, "#list a") == ["a long message that is not sent yet"] and texts_of(chat, "#files li") == []


@in_chromium
def test_page_works_when_the_storage_fails(chat):
    chat.run("IDBObjectStore.prototype.put = () => { throw new DOMException('the disk is full') }; 0")
    set_up(chat, temperature="0")
    ask(chat, QUESTION)
    assert answered(chat) == ANSWER
    assert text_of(chat, "#error") == "this conversation is not saved: the disk is full"


@in_chromium
def test_turns_that_were_not_saved_are_saved_later(chat):
    put = "IDBObjectStore.prototype.put"
    set_up(chat, temperature="0")
    ask(chat, "Hi")
    answered(chat)
    chat.run(f"window.put = {put}; {put} = () => {{ throw new DOMException('the disk is full') }}; 0")
    ask(chat, QUESTION)
    answered(chat, 2)
    assert text_of(chat, "#error") == "this conversation is not saved: the disk is full"
    chat.run(f"{put} = window.put; 0")
    ask(chat, "and plus 10?")
    answered(chat, 3)
    assert chat.run("document.querySelector('#failed').hidden")
    chat.reload()
    answered(chat, 3)
    assert texts_of(chat, ".user") == ["Hi", QUESTION, "and plus 10?"] and texts_of(chat, ".assistant")[1] == ANSWER


@in_chromium
def test_idle_tab_shows_turns_of_another_tab_and_keeps_its_draft(chat, served):
    ask(chat, "Hi")
    answered(chat)
    tab = opened(chat.tab(), chat.run("location.href"))
    tab.window(1000, 700)
    answered(tab)
    tab.run("document.querySelector('#input').focus()")
    tab.type("my draft")
    ask(chat, QUESTION)
    answered(chat, 2)
    tab.until("document.querySelectorAll('.turn').length === 2")
    wait_for_draft(tab, "my draft")
    tab.reload()
    answered(tab, 2)
    assert tab.run("document.querySelector('#input').value") == "my draft"
    tab.close()


# ---- errors


def answers(tab, status, body, headers=None, path="v1/chat/completions"):
    """Make the page receive this response to its next request for a path, with the body in parts of a few bytes."""
    tab.run(f"""
        (original => {{ window.fetch = async (path, ...rest) => {{
          if (path !== {json.dumps(path)}) return original(path, ...rest);
          window.fetch = original;
          const bytes = new TextEncoder().encode({json.dumps(body)}), body = new ReadableStream({{start(to) {{
            for (let i = 0; i < bytes.length; i += 7) to.enqueue(bytes.slice(i, i + 7));
            to.close();
          }}}});
          return new Response(body, {{status: {status}, headers: {json.dumps(headers or {})}}});
        }} }})(window.fetch);
    """)


def stream(*choices, **last):
    """Return the events of chunks with these choices, and of a last chunk with these fields."""
    lines = [json.dumps({"choices": [choice]}) for choice in choices] + ([json.dumps(last)] if last else [])
    return "".join(f"data: {line}\n\n: keep-alive\n\n" for line in lines)


@in_chromium
@pytest.mark.parametrize("status, body, headers, message", [
    (503, json.dumps({"error": {"message": "the queue is full"}}), {"Retry-After": "2"},
     "the queue is full; retry after 2 s (503)"),
    (502, "<html>Bad gateway</html>", {}, "an error (502)"),
    (200, stream({"delta": {"content": "Half"}}, error={"message": "the engine died"}), {}, "the engine died"),
    (200, stream({"delta": {"content": "Half"}}), {}, "the answer is incomplete: its stream ended early"),
    (200, "data: {\n\n", {}, "the answer of the server is not valid"),
])  # fmt: skip
def test_failed_answer_is_one_line_and_can_be_retried(chat, status, body, headers, message):
    answers(chat, status, body, headers)
    set_up(chat, temperature="0")
    ask(chat, QUESTION)
    part = answered(chat)
    assert text_of(chat, ".turn .remark") == message and part == ("Half" if "Half" in body else "")
    chat.reload()
    assert answered(chat) == part and text_of(chat, ".turn .remark") == message
    click(chat, "Regenerate" if part else "Retry")
    chat.until(f"document.querySelector('.assistant').innerText === {json.dumps(ANSWER)}")
    answered(chat)
    assert texts_of(chat, ".remark:not([hidden])") == []
    assert texts_of(chat, ".actions .note") == (["2 / 2"] if part else []), "the partial answer is a version"


@in_chromium
def test_unanswered_message_is_not_sent_again(chat, sent):
    answers(chat, 503, "{}")
    ask(chat, "First")
    answered(chat)
    ask(chat, "Second")
    answered(chat, 2)
    assert sent[-1] == [{"role": "user", "content": "Second"}]


@in_chromium
def test_server_that_is_down_keeps_the_message(chat, engine):
    with Running(engine) as running:
        opened(chat, running.url)
        port = running.port
    chat.run("document.querySelector('#models').replaceChildren()")
    ask(chat, QUESTION)
    answered(chat)
    assert text_of(chat, ".turn .remark") == LOST and errors_of(chat)
    with Running(engine, port=port):
        set_up(chat, temperature="0")
        click(chat, "Retry")
        chat.until(f"document.querySelector('.assistant').innerText === {json.dumps(ANSWER)}")
        answered(chat)


@in_chromium
def test_page_requests_key_and_stores_it_for_the_tab(chromium, engine):
    with Running(engine, api_keys=("right",)) as running:
        chromium.open(running.url)
        chromium.until("!document.querySelector('#keyed').hidden && document.activeElement.id === 'key'")
        assert "the API key is missing or wrong" in text_of(chromium, "#error")
        enter(chromium, "Hi")
        chromium.until("document.activeElement.id === 'key'")
        assert chromium.run("document.querySelector('#input').value") == "Hi"
        chromium.type("right")
        chromium.press("Enter")
        chromium.until("document.querySelector('#model').textContent && document.querySelector('#failed').hidden")
        chromium.reload()
        chromium.until("document.querySelector('#model').textContent")
        ask(chromium, "")
        assert answered(chromium)
        assert chromium.run("document.cookie") == "" and "right" not in chromium.run("JSON.stringify(localStorage)")
    chromium.errors.clear()


@in_chromium
def test_late_error_of_an_earlier_request_is_not_shown(chat):
    chat.run("""
        (async original => {
          let calls = 0;
          window.fetch = async (path, ...rest) => {
            if (!String(path).includes("v1/models")) return original(path, ...rest);
            const call = ++calls;
            if (call === 1) await new Promise(done => setTimeout(done, 300));
            return Response.json({error: {message: `error of call ${call}`}}, {status: 500});
          };
          for (let i = 0; i < 2; i++) document.querySelector("#retry").click();
          await new Promise(done => setTimeout(done, 600));
        })(window.fetch)
    """)
    assert text_of(chat, "#error") == "error of call 2 (500)"


@in_chromium
@pytest.mark.parametrize("key", ["\u201cright\u201d", "right\u200b", " right "])
def test_key_with_other_characters_is_explained(chromium, engine, key):
    with Running(engine, api_keys=("right",)) as running:
        chromium.clear(running.url)
        chromium.open(running.url)
        chromium.until("!document.querySelector('#keyed').hidden && document.activeElement.id === 'key'")
        chromium.type(key)
        chromium.press("Enter")
        if key.strip() == "right":
            chromium.until("document.activeElement.id === 'input' && document.querySelector('#model').textContent")
        else:
            chromium.until("document.querySelector('#error').innerText.includes('not printable ASCII')")
            assert chromium.run("document.activeElement.id") == "key"
    chromium.errors.clear()


@in_chromium
def test_page_behind_a_proxy_that_changes_host_shows_the_reason(chromium, served):
    """Requests that send Origin are refused there, but the files of the page are not."""
    with Wire(served.port, host="10.0.0.7") as wire:
        opened(chromium, wire.url)
        ask(chromium, QUESTION)
        answered(chromium)
        assert "may not use this server; start it with --cors" in text_of(chromium, ".turn .remark")
    chromium.errors.clear()


@in_chromium
def test_request_during_an_answer_is_refused_with_a_reason(chat, slowly):
    set_up(chat, max_tokens="30")
    ask(chat, "Hi")
    answered(chat)
    ask(chat, STORY)
    partial_answer(chat, 5)
    enter(chat, "next")
    reason = "an answer of this conversation is running: wait for its end, or stop it"
    chat.until(f"document.querySelector('#error').innerText === {json.dumps(reason)}")
    chat.run("document.querySelector('#error').textContent = ''")
    click(chat, "Regenerate", ".turn:first-child")
    chat.until(f"document.querySelector('#error').innerText === {json.dumps(reason)}")
    assert len(texts_of(chat, ".turn")) == 2 and chat.run("document.querySelector('#input').value") == "next"
    click(chat, "Stop")
    answered(chat, 2)
    assert chat.run("document.querySelector('#failed').hidden")


# ---- thinking, the context, models


@in_chromium
def test_thinking_is_collapsed_above_the_answer(chat, sent):
    thoughts = [{"reasoning_content": text} for text in ("Hm, ", "42\u00e9?")]
    deltas = [*thoughts, {"content": "It is"}, {"content": " **42**."}]
    usage = {"prompt_tokens": 9, "completion_tokens": 5}
    body = stream(*({"delta": delta} for delta in deltas), {"delta": {}, "finish_reason": "stop"})
    answers(chat, 200, body + stream(choices=[], usage=usage) + "data: [DONE]\n\n")
    set_up(chat, think="off")
    ask(chat, QUESTION)
    assert answered(chat) == "It is 42."
    assert chat.run("document.querySelector('.thought').textContent") == "Hm, 42\u00e9?"
    assert not chat.run("document.querySelector('.thinking').open || document.querySelector('.thinking').hidden")
    ask(chat, "Thanks")
    answered(chat, 2)
    assert sent[-1][1] == {"role": "assistant", "content": "It is **42**."}, "the page sent the model's thinking back"


@in_chromium
def test_interrupted_thinking_is_kept_and_ended_when_it_continues(chat, sent):
    answers(chat, 200, stream({"delta": {"reasoning_content": "Hm, 42"}}))
    ask(chat, QUESTION)
    assert answered(chat) == "" and text_of(chat, ".turn .remark").startswith("the answer is incomplete")
    assert chat.run("document.querySelector('.thinking').open")
    click(chat, "Continue")
    chat.until("document.querySelector('.assistant').innerText")
    answered(chat)
    assert sent[-1][-1] == {"role": "assistant", "content": "", "reasoning_content": "Hm, 42"}
    assert chat.run("document.querySelector('.thought').textContent") == "Hm, 42"


@in_chromium
def test_full_context_drops_oldest_turns_with_a_note(chat, sent):
    long = "word " * 700
    set_up(chat, max_tokens="5")
    for number in (1, 2, 3):
        ask(chat, f"{number} {long}")
        answered(chat, number)
    notes = texts_of(chat, ".turn > .stats:first-of-type")
    assert [bool(note) for note in notes] == [False, False, True], notes
    note = r"(more than )?[\d,]+ tokens do not fit in the context of 2,048( with room for the answer \(5\))?: "
    assert re.fullmatch(f"{note}turn 1 is no longer sent to the model", notes[2])
    assert [message["content"][0] for message in sent[-1] if message["role"] == "user"] == ["2", "3"]
    assert len(texts_of(chat, ".user")) == 3
    ask(chat, "short")
    answered(chat, 4)
    assert [message["content"][0] for message in sent[-1] if message["role"] == "user"] == ["2", "3", "s"]
    set_up(chat, overflow="error")
    ask(chat, long)
    answered(chat, 5)
    assert text_of(chat, ".turn:last-child .remark").startswith("this turn needs ")
    set_up(chat, overflow="drop-oldest")
    errors_of(chat)


@in_chromium
def test_message_that_exceeds_the_context_can_be_edited(chat):
    ask(chat, "word " * 3000)
    answered(chat)
    remark = text_of(chat, ".turn .remark")
    needed = r"this message alone needs (more than )?[\d,]+ tokens"
    assert re.fullmatch(f"{needed}, the context holds 2,048; shorten it", remark)
    click(chat, "Edit message")
    chat.run("document.querySelector('#input').select()")
    ask(chat, "Hi")
    assert answered(chat) and texts_of(chat, ".user") == ["Hi"]
    errors_of(chat)


@in_chromium
def test_model_can_be_selected_if_there_are_several(chat, served):
    cards = [{"id": "bundled", "max_model_len": 2048}, {"id": "<b>other</b>", "max_model_len": 4096}]
    answers(chat, 200, json.dumps({"data": cards}), path="v1/models")
    chat.run("document.querySelector('#retry').click()")
    chat.until("!document.querySelector('#models').hidden")
    assert texts_of(chat, "#models option") == ["bundled", "<b>other</b>"]
    assert text_of(chat, "#model") == "context of 2,048"
    select(chat, "#models", "<b>other</b>")
    assert text_of(chat, "#model") == "context of 4,096"
    ask(chat, QUESTION)
    answered(chat)
    assert "does not exist" in text_of(chat, ".turn .remark") and errors_of(chat)


@in_chromium
def test_statistics_name_the_model_if_there_are_several(chat):
    names = ["bundled", "<b>other</b>\u202e"]
    answers(chat, 200, json.dumps({"data": [{"id": name, "max_model_len": 2048} for name in names]}), path="v1/models")
    chat.run("document.querySelector('#retry').click()")
    chat.until("!document.querySelector('#models').hidden")
    body = stream({"delta": {"content": "Yes."}}, usage={"prompt_tokens": 3, "completion_tokens": 1})
    for name in names:
        select(chat, "#models", name)
        answers(chat, 200, body + "data: [DONE]\n\n")
        ask(chat, QUESTION)
        answered(chat, 1 + names.index(name))
    chat.reload()
    answered(chat, 2)
    shown = [stats.split(" · ")[:2] for stats in texts_of(chat, ".turn .stats:last-of-type")]
    assert shown == [["bundled", "1 token"], ["<b>other</b>\ufffd", "1 token"]]


# ---- conversations


@in_chromium
def test_regenerate_and_edit_add_versions(chat):
    set_up(chat, seed="3", temperature="1")
    ask(chat, "Tell me a joke.")
    first = answered(chat)
    ask(chat, "Another one.")
    answered(chat, 2)
    click(chat, "Regenerate", ".turn:first-child")
    chat.until("document.querySelectorAll('.turn').length === 1")
    second = answered(chat)
    assert second != first and text_of(chat, ".actions .note") == "2 / 2"
    chat.until("!document.querySelector('[aria-label=\"Previous version\"]').disabled")
    click(chat, "Previous version")
    assert answered(chat, 2) and text_of(chat, ".assistant") == first
    click(chat, "Edit message", ".turn:first-child")
    assert chat.run("document.querySelector('#input').value") == "Tell me a joke."
    assert text_of(chat, "#editing").startswith("This replaces an earlier message.")
    ask(chat, " Please.")
    answered(chat)
    assert texts_of(chat, ".user") == ["Tell me a joke. Please."] and text_of(chat, ".actions .note") == "3 / 3"
    chat.reload()
    answered(chat)
    assert text_of(chat, ".actions .note") == "3 / 3" and texts_of(chat, ".user") == ["Tell me a joke. Please."]


def fill_versions(chat):
    """Show a conversation with two versions of the fifth turn, each with later turns. The first one is longer."""
    chat.script("""
        const {addTurn, newConversation, newId} = await page("conversation"), {save} = await page("store");
        const made = newConversation(newId(), {}, "bundled"), text = "paragraph\\n\\n";
        const add = (question, times) =>
          addTurn(made, made.leaf, {question, answer: text.repeat(times), state: "done"});
        for (let i = 0; i < 4; i++) add(`question ${i}`, 5);
        const parent = made.leaf;
        for (const [version, times] of [["first", 12], ["second", 5]]) {
          made.leaf = parent;
          for (let i = 4; i < 12; i++) add(i === 4 ? "question 4" : `${version} ${i}`, times);
        }
        made.updated = 1;
        await save(made, made.turns);
        location.hash = made.id;
    """)
    chat.until("document.querySelectorAll('.turn').length === 12")


@in_chromium
def test_arrows_of_versions_keep_place_and_focus(chat):
    fill_versions(chat)
    chat.run("document.querySelector('[aria-label=\"Previous version\"]').focus()")
    place = "document.querySelector('[aria-label=\"Previous version\"]').getBoundingClientRect().top"
    top = chat.run(place)
    for version, focused in (("first", "Next version"), ("second", "Previous version")):
        chat.press("Enter")
        chat.until(f"document.querySelectorAll('.user')[5].innerText === '{version} 5'")
        assert chat.run("document.activeElement.ariaLabel") == focused and abs(chat.run(place) - top) < 2


@in_chromium
def test_layout_of_a_long_conversation_is_read_rarely(chat):
    """The browser computes the layout of the whole document for each reading between changes."""
    fill_versions(chat)
    readings = chat.script("""
        const root = document.documentElement, {drawAll} = await page("view"), {load} = await page("store");
        const conversation = await load(location.hash.slice(1));
        let readings = 0;
        Object.defineProperty(root, "scrollHeight", {configurable: true, get: () => ++readings});
        drawAll(conversation, () => false, {});
        delete root.scrollHeight;
        return readings;
    """)
    assert 0 < readings <= 2


@in_chromium
def test_draft_returns_after_an_edit_is_cancelled_or_sent(chat):
    ask(chat, "Hi")
    answered(chat)
    chat.type("my draft")
    for end in ("Cancel", "Send"):
        click(chat, "Edit message")
        assert chat.run("document.querySelector('#input').value") == "Hi"
        click(chat, end)
        chat.until("document.querySelector('#input').value === 'my draft'")
    answered(chat)


@in_chromium
def test_conversation_is_renamed_exported_and_deleted(chat, tmp_path):
    chat.allow_downloads(tmp_path)
    set_up(chat, temperature="0", system="Be brief.")
    ask(chat, QUESTION)
    answered(chat)
    click(chat, f"Actions for {QUESTION}")
    click(chat, "Rename")
    chat.until("document.querySelector('dialog[open] input')")
    chat.run("document.querySelector('dialog[open] input').select()")
    chat.type("Sums: a/b")
    chat.press("Enter")
    chat.until("document.querySelector('#list a').innerText === 'Sums: a/b'")
    assert text_of(chat, "#title") == "Sums: a/b"
    for label in ("Export as Markdown", "Export for the terminal chat"):
        click(chat, "Actions for Sums: a/b")
        click(chat, label)
    until(lambda: {path.name for path in tmp_path.iterdir()} == {"Sums-a-b.md", "Sums-a-b.json"})
    text = f"# Conversation\n\n## System\n\nBe brief.\n\n## User\n\n{QUESTION}\n\n## Assistant\n\n{ANSWER}\n"
    assert (tmp_path / "Sums-a-b.md").read_text() == text
    session = loads((tmp_path / "Sums-a-b.json").read_text())
    assert session.turns == ((QUESTION, ANSWER),) and session.system == "Be brief." and session.title == "Sums: a/b"
    assert session.settings == {"temperature": 0} and session.model == "bundled"
    chat.run("document.querySelector('#list details').open = false")
    for choice, left in (("Cancel", ["Sums: a/b"]), ("Delete", [])):
        click(chat, "Actions for Sums: a/b")
        click(chat, "Delete", "#list")
        click(chat, choice, "dialog")
        chat.until(f"document.querySelectorAll('#list a').length === {len(left)}")
        chat.run("for (const menu of document.querySelectorAll('#list details')) menu.open = false")
    chat.reload()
    chat.until("document.querySelector('#model').textContent")
    assert texts_of(chat, ".turn") == texts_of(chat, "#list a") == []


@in_chromium
def test_deleting_a_running_conversation_stops_it(chat, served, slowly):
    ask(chat, STORY)
    partial_answer(chat)
    click(chat, f"Actions for {STORY}")
    click(chat, "Delete", "#list")
    click(chat, "Delete", "dialog")
    chat.until("!document.querySelector('.turn')")
    until(lambda: served.metric("num_requests_running") == 0)
    chat.reload()
    chat.until("document.querySelector('#model').textContent")
    assert texts_of(chat, "#list a") == []


@in_chromium
def test_answer_continues_while_another_conversation_is_shown(chat, slowly):
    set_up(chat, max_tokens="20")
    ask(chat, STORY)
    partial_answer(chat, 5)
    click(chat, "New chat")
    chat.until("!document.querySelector('.turn')")
    ask(chat, "Hi")
    answered(chat)
    click(chat, STORY, "#list")
    chat.until(f"document.querySelector('.user').innerText === {json.dumps(STORY)}")
    assert answered(chat) and "maximum length" in text_of(chat, ".turn .remark")


@in_chromium
def test_titles_split_no_character(chat):
    text = "x" * 59 + "\U0001f600 and more"
    enter(chat, "")
    chat.type(text)
    wait_for_draft(chat, text)
    chat.reload()
    chat.until("document.querySelector('#list a')")
    assert texts_of(chat, "#list a") == [f"Draft: {'x' * 59}"]
    set_up(chat, max_tokens="2")
    ask(chat, "")
    answered(chat)
    assert texts_of(chat, "#list a") == [f"{'x' * 59}\u2026"]


@in_chromium
def test_answer_and_code_are_copied(chat, served):
    chat.allow_clipboard(served.url)
    body = stream({"delta": {"content": "See:\n\n```python\na = 1\n```"}}) + "data: [DONE]\n\n"
    answers(chat, 200, body)
    ask(chat, QUESTION)
    answered(chat)
    for label, text in (("Copy answer", "See:\n\n```python\na = 1\n```"), ("Copy code", "a = 1")):
        click(chat, label)
        chat.until(f"navigator.clipboard.readText().then(text => text === {json.dumps(text)})")
        assert "Copied" in texts_of(chat, "button")


@in_chromium
def test_copy_works_without_the_clipboard_of_the_browser(chat):
    """Browsers provide it only over https and on localhost."""
    chat.run("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    chat.run("document.addEventListener('copy', () => { window.copied = document.activeElement.value })")
    set_up(chat, temperature="0")
    ask(chat, QUESTION)
    answered(chat)
    # A key press, because Chromium copies only within five seconds after a key press or a click of the user.
    chat.run("[...document.querySelectorAll('.actions button')].find(each => each.ariaLabel === 'Copy answer').focus()")
    chat.press("Enter")
    chat.until(f"window.copied === {json.dumps(ANSWER)}")
    chat.until("!document.querySelector('body > textarea')")


@in_chromium
def test_menu_is_shown_whole_and_closes_with_a_click_elsewhere(chat):
    chat.script("""
        const {addTurn, newConversation, newId} = await page("conversation"), {save} = await page("store");
        for (let i = 0; i < 30; i++) {
          const made = newConversation(newId(), {}, "bundled");
          addTurn(made, null, {question: `chat ${i}`, answer: "a", state: "done"});
          made.updated = i + 1;
          await save(made, made.turns);
        }
    """)
    chat.reload()
    chat.until("document.querySelectorAll('#list li').length === 30")
    chat.run("document.querySelector('#list li:last-child summary').click()")
    chat.until("document.querySelector('#list details[open] .menu').getBoundingClientRect().bottom < innerHeight + 1")
    chat.run("document.querySelector('main').click()")
    assert not chat.run("document.querySelector('#list details[open]')")


@in_chromium
def test_menu_stays_open_when_another_tab_changes_the_list(chat):
    ask(chat, "Hi")
    answered(chat)
    chat.run("document.querySelector('#list summary').focus()")
    chat.press("Enter")
    chat.until("document.querySelector('#list details').open")
    chat.run("window.earlier = document.querySelector('#list li')")
    chat.run("new BroadcastChannel('tridecode').postMessage(location.hash.slice(1))")
    chat.until("!window.earlier.isConnected")
    assert chat.run("document.querySelector('#list details').open")
    assert chat.run("document.activeElement.ariaLabel") == "Actions for Hi"
    chat.press("Tab")
    assert chat.run("document.activeElement.innerText") == "Rename"


@in_chromium
def test_focus_stays_in_the_list_after_a_conversation_is_deleted(chat):
    for text in ("Hi", QUESTION):
        ask(chat, text)
        answered(chat)
        click(chat, "New chat")
        chat.until("!document.querySelector('.turn')")
    for button in ("Cancel", "Delete"):
        chat.run("document.querySelector('#list li:last-child summary').focus()")
        chat.press("Enter")
        click(chat, "Delete", "#list")
        chat.run("window.earlier = document.querySelector('#list li')")
        chat.run("new BroadcastChannel('tridecode').postMessage('')")  # Another tab changes the list meanwhile.
        chat.until("!window.earlier.isConnected")
        click(chat, button, "dialog")
        chat.until("!document.querySelector('dialog[open]')")
        if button == "Cancel":
            chat.until("document.activeElement.ariaLabel?.startsWith('Actions for')")
    chat.until("document.querySelectorAll('#list a').length === 1")
    assert chat.run("document.activeElement.id") == "new"


# ---- attached files


@in_chromium
def test_text_files_are_attached_under_their_names(chat, sent, tmp_path):
    (tmp_path / "a b.py").write_text("x = '```'\n")
    (tmp_path / "utf16.txt").write_text("né\n", encoding="utf-16")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    chat.choose_files("#chosen", *sorted(tmp_path.iterdir()))
    chat.until("document.querySelectorAll('#files li').length === 2")
    assert text_of(chat, "#error") == "image.png cannot be attached: it is not a text file"
    assert texts_of(chat, "#files li") == ["a b.py, 10 characters Remove", "utf16.txt, 3 characters Remove"]
    chat.run("document.querySelector('#files button').focus()")
    chat.press("Enter")
    chat.until("document.querySelectorAll('#files li').length === 1")
    chat.choose_files("#chosen", tmp_path / "a b.py")
    chat.until("document.querySelectorAll('#files li').length === 2")
    ask(chat, "Explain:")
    answered(chat)
    files = "utf16.txt:\n```\nné\n```\n\na b.py:\n````\nx = '```'\n````"
    assert sent[-1] == [{"role": "user", "content": f"Explain:\n\n{files}"}]
    assert texts_of(chat, ".user summary") == ["utf16.txt, 3 characters", "a b.py, 10 characters"]
    assert texts_of(chat, "#files li") == []


@in_chromium
def test_many_files_leave_room_for_the_message(chat, tmp_path):
    names = [f"{i}.txt" for i in range(30)] + ["n" * 200 + ".txt"]
    for name in names:
        (tmp_path / name).write_text("text")
    chat.window(320, 500, phone=True)
    chat.choose_files("#chosen", *sorted(tmp_path.iterdir()))
    chat.until("document.querySelectorAll('#files li').length === 31")
    form, header = (f"document.querySelector('{name}').getBoundingClientRect()" for name in ("#form", "header"))
    assert chat.run(f"{form}.top >= {header}.bottom && {form}.bottom <= innerHeight")
    assert chat.run("document.documentElement.scrollWidth") <= 320
    chat.run("document.querySelector('#files li:first-child button').focus()")
    assert chat.run(f"document.activeElement.getBoundingClientRect().top >= {form}.top")


@in_chromium
def test_long_message_scrolls_in_its_own_box(chat):
    answers(chat, 200, stream({"delta": {"content": "ok"}}) + "data: [DONE]\n\n")
    chat.run("document.querySelector('#input').value = 'line\\n'.repeat(100)")
    ask(chat, "end")
    answered(chat)
    box = "document.querySelector('.user .long')"
    assert chat.run(f"{box}.clientHeight < {box}.scrollHeight && {box}.tabIndex === 0")
    assert chat.run("document.documentElement.scrollHeight") < 1500


@in_chromium
def test_dropped_file_is_attached(chat):
    chat.script("""
        const data = new DataTransfer();
        data.items.add(new File(["dropped"], "drop.txt"));
        document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
    """)
    chat.until("document.querySelector('#files li')?.innerText === 'drop.txt, 7 characters Remove'")
    click(chat, "Remove drop.txt")


# ---- accessibility


@in_chromium
def test_theme_is_selected_and_kept(chat):
    background = "getComputedStyle(document.body.parentNode).backgroundColor"
    assert chat.run(background) == "rgb(251, 250, 248)"
    select(chat, "#theme", "dark")
    assert chat.run(background) == "rgb(27, 26, 24)"
    chat.reload()
    assert chat.run(background) == "rgb(27, 26, 24)" and chat.run("document.querySelector('#theme').value") == "dark"
    select(chat, "#theme", "")
    chat.window(1000, 700, "dark")
    assert chat.run(background) == "rgb(27, 26, 24)"


EVERYTHING = (
    "# Title\n\nText with `code`, [a link](https://example.com) and **bold**.\n\n> quote with [link](https://a.example)\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n- [x] done\n\n```python x.py\n@name  # comment\ndef f(x: int) -> str:\n"
    "    return f'a{x}' + str(12) + None\n```\n\n```diff\n-old\n+new\n```\n\n```xml\n<a b='c'>&amp;</a>\n```\n\n"
    "```rust\nfn main() { let x: i32 = 'a'; println!(\"{}\", x); }\n```\n\n```sql\nSELECT 1 FROM t -- all\n```\n\n"
    '```yaml\na: [1, true]\n```\n\n```bash\nx=$(ls "$HOME") # c\n```\n\n$x^2$ and\n\n$$\n\\frac{1}{2}\n$$\n'
)


def fill(chat):
    """Show a conversation with each kind of element."""
    turns = [
        {"question": "a question", "files": [{"name": "a.txt", "text": "text"}], "answer": EVERYTHING, "thought": "Hm",
         "state": "done", "stats": "5 tokens"},
        {"question": "another", "answer": "half", "state": "failed", "remark": "the engine died", "note": "a note"},
        {"question": "third", "answer": "cut", "state": "cut", "remark": "the answer was cut"},
    ]  # fmt: skip
    chat.script(f"""
        const {{addTurn, newConversation, newId}} = await page("conversation"), {{save}} = await page("store");
        const made = newConversation(newId(), {{}}, "bundled");
        for (const turn of {json.dumps(turns)}) addTurn(made, made.leaf, turn);
        addTurn(made, made.turns[1].id, {{question: "third again", answer: "cut"}});
        made.leaf = made.turns[2].id;
        made.updated = 1;
        await save(made, made.turns);
        location.hash = made.id;
    """)
    chat.until("document.querySelectorAll('.turn').length === 3 && document.querySelector('#list a')")
    chat.run("for (const each of document.querySelectorAll('#log details')) each.open = true")
    chat.run("document.querySelector('#editing').hidden = document.querySelector('#failed').hidden = false")
    chat.run("document.querySelector('#keyed').hidden = false")
    chat.run("document.querySelector('#error').textContent = 'an error'")


# Return the texts whose contrast with their background is below 4.5, and the borders of fields and buttons below 3.
LOW_CONTRAST = r"""
const rgb = color => color.match(/[\d.]+/g).map(Number);
const linear = c => c <= .03928 * 255 ? c / 255 / 12.92 : ((c / 255 + .055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
const contrast = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + .05) / (low + .05);
};
const background = node => {
  for (; node; node = node.parentElement) {
    const color = rgb(getComputedStyle(node).backgroundColor);
    if (color[3] !== 0) return color;
  }
};
const low = [];
for (const node of document.querySelectorAll("body *")) {
  if (!node.checkVisibility() || node.matches(".unseen, option")) continue;
  const style = getComputedStyle(node), behind = background(node);
  const hasText = [...node.childNodes].some(child => child.nodeType === Node.TEXT_NODE && child.data.trim());
  if ((hasText || node.matches("input, textarea, select")) && contrast(rgb(style.color), behind) < 4.5) {
    low.push(`${node.outerHTML.slice(0, 80)} ${style.color} ${behind}`);
  }
  if (node.matches("#form button, textarea, select, input:not([type=checkbox])")
      && contrast(rgb(style.borderTopColor), background(node.parentElement)) < 3) low.push(`border ${node.id}`);
}
for (const node of document.querySelectorAll("textarea")) {
  if (contrast(rgb(getComputedStyle(node, "::placeholder").color), background(node)) < 4.5) low.push("placeholder");
}
return low;
"""


@in_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_in_both_themes(chat, scheme):
    chat.window(1000, 700, scheme)
    fill(chat)
    assert chat.script(LOW_CONTRAST) == []
    chat.until("document.querySelectorAll('[class^=syntax-]').length > 20")
    assert chat.run("document.querySelectorAll('math').length") == 2
    chat.run("document.querySelector('#settings').showModal()")
    assert chat.script(LOW_CONTRAST) == []


@in_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_width(chat, scheme):
    chat.window(320, 600, scheme, phone=True)
    fill(chat)
    text = f"{'w' * 300}\n\n```\n{'c' * 300}\n```\n\n|{'|'.join(['cell'] * 30)}|\n|{'-|' * 30}\n\n$${'x+' * 200}y$$"
    chat.script(f"(await page('markdown')).show(document.querySelector('.assistant'), {json.dumps(text)})")
    assert chat.run("document.documentElement.scrollWidth") <= 320
    assert not chat.run("document.querySelector('#side').checkVisibility()")
    click(chat, "Chats")
    assert chat.run("document.querySelector('#side').checkVisibility() && document.activeElement.id") == "new"
    assert chat.run("document.querySelector('#chats').ariaExpanded") == "true"
    chat.press("Escape")
    assert chat.run("document.activeElement.id") == "chats"
    click(chat, "Settings")
    assert chat.run("document.querySelector('#settings').scrollWidth") <= 320
    assert chat.run("document.documentElement.scrollWidth") <= 320


@in_chromium
def test_list_of_a_phone_closes_without_stopping_the_answer(chat, slowly):
    chat.window(360, 640, phone=True)
    ask(chat, STORY)
    partial_answer(chat, 5)
    click(chat, "Chats")
    chat.press("Escape")
    assert not chat.run("document.querySelector('#side').checkVisibility() || document.querySelector('#stop').hidden")
    click(chat, "Chats")
    click(chat, STORY, "#list")
    assert not chat.run("document.querySelector('#side').checkVisibility()")
    click(chat, "Stop")
    answered(chat)
    chat.window(1000, 700)


@in_chromium
def test_title_has_room_on_a_phone_with_several_models(chat):
    chat.window(360, 640, phone=True)
    cards = [{"id": name, "max_model_len": 2048} for name in ("bundled", "a-model-with-a-long-name")]
    answers(chat, 200, json.dumps({"data": cards}), path="v1/models")
    chat.run("document.querySelector('#retry').click()")
    chat.until("!document.querySelector('#models').hidden")
    assert chat.run("document.querySelector('#title').clientWidth") > 100
    assert chat.run("document.documentElement.scrollWidth") <= 360
    chat.window(1000, 700)


@in_chromium
def test_right_to_left_text_has_its_direction(chat):
    hebrew = "\u05e9\u05dc\u05d5\u05dd!"
    markdown = f"## {hebrew}\n\n{hebrew} `f(x);`\n\n- {hebrew}\n\n```\nf(x);\n```\n\nEnglish!"
    answers(chat, 200, stream({"delta": {"content": markdown}}) + "data: [DONE]\n\n")
    ask(chat, hebrew)
    answered(chat)
    chat.type(hebrew)
    for selector in (".user", ".assistant", ".assistant ul", "#title", "#list a", "#input"):
        direction = chat.run(f"getComputedStyle(document.querySelector({json.dumps(selector)})).direction")
        assert direction == "rtl", selector
    for selector in (".assistant .block", ".assistant pre", ".assistant p code"):
        direction = chat.run(f"getComputedStyle(document.querySelector({json.dumps(selector)})).direction")
        assert direction == "ltr", selector
    places = chat.run("""[...document.querySelectorAll(".assistant > p")].map(node => {
        const range = document.createRange(), box = node.getBoundingClientRect();
        range.selectNodeContents(node);
        const text = range.getBoundingClientRect();
        return text.left - box.left > box.right - text.right ? "right" : "left";
    })""")
    assert places == ["right", "left"]


@in_chromium
def test_keyboards_of_phones_have_a_minus_sign_where_it_is_needed(chat):
    modes = chat.run("Object.fromEntries([...document.querySelectorAll('#sampling input')]"
                     ".map(each => [each.id, each.inputMode]))")  # fmt: skip
    assert {name for name, mode in modes.items() if mode == "text"} == {
        "presence_penalty", "frequency_penalty", "seed"}  # fmt: skip
    assert modes["temperature"] == "decimal" and modes["top_k"] == "numeric"


@in_chromium
def test_everything_is_reachable_by_keyboard_and_labeled(chat):
    fill(chat)
    chat.run("document.querySelector('#new').focus()")
    reached = []
    for _ in range(80):
        reached.append(chat.run("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
        chat.press("Tab")
        if chat.run("document.activeElement === document.body"):
            break
    interactive = ":is(button, summary, a[href], input, textarea, select, [tabindex]):not(:disabled)"
    expected = chat.run(f"""[...document.querySelectorAll("*")].flatMap((node, i) =>
        node.matches({json.dumps(interactive)}) && node.checkVisibility() ? [i] : [])""")
    assert sorted(reached) == expected and reached == expected, "the order of the focus differs from that of the page"
    chat.run("document.querySelector('#settings').showModal()")
    unlabeled = chat.run("""[...document.querySelectorAll("button, input, textarea, select, summary, a")]
        .filter(node => node.checkVisibility())
        .filter(node => !(node.textContent.trim() || node.ariaLabel || node.labels?.length))
        .map(node => node.outerHTML)""")
    assert unlabeled == []


@in_chromium
def test_dialogs_keep_the_focus_and_return_it(chat):
    ask(chat, "Hi")
    answered(chat)
    chat.run("document.querySelector('#open-settings').focus()")
    chat.press("Enter")
    assert chat.run("document.querySelector('#settings').contains(document.activeElement)")
    chat.press("Escape")
    assert chat.run("document.activeElement.id") == "open-settings"
    chat.run("document.querySelector('#list summary').focus()")
    chat.press("Enter")
    assert chat.run("document.querySelector('#list details').open")
    chat.press("Escape")
    assert chat.run("!document.querySelector('#list details').open && document.activeElement.localName") == "summary"


@in_chromium
def test_window_follows_the_answer_unless_the_user_scrolls(chat, slowly):
    answers(chat, 200, stream({"delta": {"content": "paragraph\n\n" * 40}}) + "data: [DONE]\n\n")
    ask(chat, QUESTION)
    answered(chat)
    set_up(chat, max_tokens="30")
    for number, (top, is_at_end) in enumerate([("scrollY", True), ("0", False)], 2):
        ask(chat, STORY)
        partial_answer(chat, 5)
        chat.run(f"scrollTo(0, {top})")
        answered(chat, number)
        end = chat.run("document.documentElement.scrollHeight - scrollY - innerHeight")
        assert (end < 60) == is_at_end and (chat.run("scrollY") > 0) == is_at_end


# ---- injection beyond Markdown, which test_page_markdown.py covers


@in_chromium
def test_titles_file_names_and_errors_are_text(chat, tmp_path):
    evil = "<img src=x onerror='window.hit=1'>\u202e"
    name = "<svg onload='window.hit=1'>.txt"
    (tmp_path / name).write_text("<script>window.hit=1</script>")
    chat.choose_files("#chosen", tmp_path / name)
    chat.until("document.querySelector('#files li')")
    answers(chat, 400, json.dumps({"error": {"message": evil}}))
    ask(chat, evil)
    answered(chat)
    click(chat, f"Actions for {evil.replace(chr(0x202E), chr(0xFFFD))}")
    click(chat, "Rename")
    chat.run(f"document.querySelector('dialog[open] input').value = {json.dumps(evil * 2)}")
    chat.press("Enter")
    chat.until("document.querySelector('#list a').innerText.length > 50")
    chat.reload()
    answered(chat)
    assert not chat.run("window.hit || document.querySelector('img, svg, #log script')")
    shown = chat.run("document.body.textContent + document.title")
    assert "\u202e" not in shown and shown.count("<img src=x") >= 4 and "<svg" in shown
    errors_of(chat)


@in_chromium
def test_policy_blocks_markup_and_inline_scripts(chat):
    blocked = """
        const tries = [
          () => { document.body.innerHTML = "<img src=x onerror='window.hit=1'>"; },
          () => { document.body.append(Object.assign(document.createElement("script"), {text: "window.hit=1"})); },
          () => { document.body.setAttribute("onclick", "window.hit=1"); document.body.click(); },
          () => { eval("window.hit=1"); },
        ];
        return tries.map(each => { try { each(); return "no error"; } catch (error) { return error.name; } });
    """
    assert set(chat.script(blocked)) <= {"TypeError", "EvalError", "no error"}
    assert not chat.run("window.hit") and errors_of(chat)


def test_documents_name_the_limits():
    text = Path(STATIC.parents[2] / "docs" / "serving.md").read_text()
    assert f"{MAX_BYTES // 1000} KB" in text
