"""The chat page at /: its headers and content, and its behavior in a headless Chromium."""

import json
import re

import pytest
from browser import CHROMIUM, browser
from servers import ANSWER, CHAT, Running, slow_passes, until

from tridecode import Engine
from tridecode.server.page import PARTS, STATIC, page

QUESTION = CHAT[0]["content"]
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


@pytest.fixture
def chat(chromium, served):
    """The page with an empty conversation, after it has received the model's name."""
    chromium.window(900, 700)
    chromium.open(served.url)
    chromium.run("sessionStorage.clear(); turns = []; for (const name of OPTIONS) $(name).value = ''")
    chromium.reload()
    chromium.until("model")
    chromium.errors.clear()
    yield chromium
    assert chromium.errors == [], "the browser reported script errors or blocked requests"


def ask(chat, text):
    """Type a message and send it."""
    chat.until("document.activeElement.id === 'input'")
    chat.type(text)
    chat.press("Enter")


def answered(chat, number=1):
    """Wait for the end of the answer with this number and return its text."""
    chat.until(f"!running && document.querySelectorAll('.stats').length === {number}")
    return chat.run("[...document.querySelectorAll('.answer, .assistant')].at(-1).innerText")


def shown(chat, text):
    """Return the HTML of the nodes that the page creates for a Markdown text."""
    code = f"(() => {{ const node = document.createElement('div'); show(node, {json.dumps(text)}); return node"
    return chat.run(f"{code}.innerHTML }})()")


# ---- the document


def test_page_is_one_document_without_external_resources():
    html, headers = page()
    text = html.decode()
    assert not re.search(r"<(img|iframe|object|embed|base)\b|\bsrc=|@import|\burl\(|\bon\w+=", text)
    assert re.findall(r'href="([^"]*)"', text) == ["data:,"], "the document refers to another file"
    assert text.count("<script>") == text.count("</script>") == 2 and text.count("<style>") == 1
    assert all(reference in (STATIC / "page.html").read_text() for reference in PARTS)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and policy.count("'sha256-") == 3


def test_scripts_never_assign_markup():
    for script in STATIC.glob("*.js"):
        ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\("
        assert not re.search(ways, script.read_text())


def test_page_needs_no_key_but_its_requests_do(engine):
    with Running(engine, api_keys=("right",)) as running:
        got = running.get("/")
        assert got.status_code == 200 and got.headers["content-type"] == "text/html; charset=utf-8"
        assert got.headers["x-content-type-options"] == "nosniff" and got.content == page()[0]
        assert running.get("/v1/models").status_code == running.get("/page.css").status_code == 401
        assert running.post("/", {}).status_code == 405


# ---- in a browser


@in_chromium
def test_chat_streams_and_shows_statistics(chat, served):
    chat.run("$('temperature').value = '0'")
    ask(chat, QUESTION)
    assert answered(chat) == ANSWER
    parts = chat.run("document.querySelector('.stats').textContent").split(" · ")
    assert parts[0] == "12 tokens" and parts[1].endswith(" tok/s") and parts[2].startswith("first token 0.")
    assert parts[3].endswith(" of 18 reused") and parts[4] == "context 30 / 2,048"
    ask(chat, "and plus 10?")
    assert answered(chat, 2) == "42 + 10 = 52."
    assert not chat.run("document.querySelector('.stats:last-child').textContent").startswith("0 of")


@in_chromium
def test_shift_enter_inserts_newline_and_system_message_is_sent(chat, served, monkeypatch):
    sent, encode = [], served.engine.tokenizer.prepare_chat
    spy = lambda messages, *rest, **more: (sent.append(messages), encode(messages, *rest, **more))[1]  # noqa: E731
    monkeypatch.setattr(served.engine.tokenizer, "prepare_chat", spy)
    chat.run("$('system').value = 'Be brief.'; $('max_tokens').value = '3'; $('input').focus()")
    chat.type("Hello")
    chat.press("Enter", shift=True)
    ask(chat, "there")
    answered(chat)
    assert sent == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello\nthere"}]]
    assert chat.run("document.querySelector('.stats').textContent").endswith("or the end of the context")


@in_chromium
@pytest.mark.parametrize("stop", ["Escape", "button"])
def test_stopped_answer_is_kept(chat, served, monkeypatch, stop):
    with monkeypatch.context() as slowly:
        slow_passes(served.engine, slowly, 0.05)
        ask(chat, "Tell me a short story about a snail.")
        chat.until("turns[0]?.answer.length > 20")
        assert chat.run("$('send').hidden && !$('stop').hidden")
        chat.press("Escape") if stop == "Escape" else chat.run("$('stop').click()")
        answered(chat)
        until(lambda: served.metric("num_requests_running") == 0)
    assert chat.run("document.querySelector('.stats').textContent").startswith("stopped · first token ")
    half = chat.run("turns[0].answer")
    ask(chat, "Hi")
    answered(chat, 2)
    assert chat.run("turns.length") == 2 and chat.run("turns[0].answer") == half


@in_chromium
def test_conversation_survives_reload_until_new_chat(chat):
    chat.run("$('temperature').value = '0'")
    ask(chat, "Hi, I'm Nora!")
    first = answered(chat)
    chat.reload()
    assert answered(chat) == first and chat.run("$('temperature').value") == "0"
    ask(chat, "What's my name?")
    assert "Nora" in answered(chat, 2)
    chat.run("$('new').click()")
    assert chat.run("$('log').innerText") == ""
    chat.reload()
    chat.until("model")
    assert chat.run("$('log').innerText") == "" and chat.run("turns.length") == 0


@in_chromium
def test_error_is_one_line_with_retry(chat):
    chat.run("$('temperature').value = 'warm'")
    ask(chat, QUESTION)
    chat.until("!$('failed').hidden && !running")
    assert chat.run("$('error').textContent").startswith("temperature: expected a number") and chat.errors.pop()
    assert chat.run("$('input').value") == QUESTION and chat.run("$('log').innerText") == ""
    chat.run("$('temperature').value = '0'; $('retry').click()")
    assert answered(chat) == ANSWER
    assert chat.run("$('failed').hidden && $('input').value === ''")


@in_chromium
def test_conversation_survives_server_stop(chromium, engine):
    with Running(engine) as running:
        chromium.open(running.url)
        chromium.until("model")
        ask(chromium, "Hi")
        answered(chromium)
    ask(chromium, QUESTION)
    chromium.until("!$('failed').hidden && !running")
    assert chromium.run("$('error').textContent") == "the server is not reachable, or the connection was lost"
    assert chromium.run("turns.length") == 1 and chromium.run("$('input').value") == QUESTION
    chromium.errors.clear()


@in_chromium
def test_page_requests_key_and_stores_it_for_the_tab(chromium, engine):
    with Running(engine, api_keys=("right",)) as running:
        chromium.open(running.url)
        chromium.until("!$('keyed').hidden && document.activeElement.id === 'key'")
        assert "the API key is missing or wrong" in chromium.run("$('error').textContent")
        chromium.type("right")
        chromium.press("Enter")
        chromium.until("model && $('failed').hidden")
        chromium.reload()
        chromium.until("model")
        ask(chromium, "Hi")
        assert answered(chromium)
        assert chromium.run("localStorage.length") == 0 and chromium.run("document.cookie") == ""
    chromium.errors.clear()


def answers(chat, status, body, headers=None):
    """Make the page receive this response to its next request, with the body in parts of a few bytes."""
    chat.run(f"""
        window.originalRequest ??= request;
        request = async () => {{
          request = window.originalRequest;
          const bytes = new TextEncoder().encode({json.dumps(body)}), body = new ReadableStream({{start(to) {{
            for (let i = 0; i < bytes.length; i += 7) to.enqueue(bytes.slice(i, i + 7));
            to.close();
          }}}});
          return new Response(body, {{status: {status}, headers: {json.dumps(headers or {})}}});
        }};
    """)


def stream(*choices, **last):
    """Return the events of chunks with these choices, and of a last chunk with these fields."""
    lines = [json.dumps({"choices": [choice]}) for choice in choices] + ([json.dumps(last)] if last else [])
    return "".join(f"data: {line}\n\n: keep-alive\n\n" for line in lines)


@in_chromium
def test_thinking_is_collapsed_above_the_answer(chat):
    thoughts = [{"reasoning_content": text} for text in ("Hm, ", "42\u00e9?")]
    deltas = [*thoughts, {"content": "It is"}, {"content": " **42**."}]
    usage = {"prompt_tokens": 9, "completion_tokens": 5}
    body = stream(*({"delta": delta} for delta in deltas), {"delta": {}, "finish_reason": "stop"})
    answers(chat, 200, body + stream(choices=[], usage=usage) + "data: [DONE]\n\n")
    ask(chat, QUESTION)
    assert answered(chat) == "It is 42."
    assert chat.run("document.querySelector('.thought').textContent") == "Hm, 42\u00e9?"
    assert not chat.run("document.querySelector('#log details').open || document.querySelector('#log details').hidden")
    assert chat.run("document.querySelector('.stats').textContent").startswith("5 tokens · ")
    assert chat.run("requestOf('x').messages[1].content") == "It is **42**.", "the page sent the model's thinking back"


@in_chromium
@pytest.mark.parametrize("status, body, headers, message", [
    (503, json.dumps({"error": {"message": "the queue is full"}}), {"Retry-After": "2"},
     "the queue is full; retry after 2 s (503)"),
    (502, "<html>Bad gateway</html>", {}, "an error (502)"),
    (200, stream({"delta": {"content": "Half"}}, error={"message": "the engine died"}), {}, "the engine died"),
    (200, stream({"delta": {"content": "Half"}}), {}, "the answer is incomplete: its stream ended early"),
    (200, "data: {\n\n", {}, "the answer of the server is not valid"),
])  # fmt: skip
def test_failed_answer_is_dropped_and_can_be_retried(chat, status, body, headers, message):
    answers(chat, status, body, headers)
    ask(chat, QUESTION)
    chat.until("!$('failed').hidden && !running")
    assert chat.run("$('error').textContent") == message
    assert chat.run("turns.length") == 0 and chat.run("$('input').value") == QUESTION
    chat.run("$('temperature').value = '0'; $('retry').click()")
    assert answered(chat) == ANSWER


MARKDOWN = {
    "*a* **b** `c*d*` ~~e~~": "<p><em>a</em> <strong>b</strong> <code>c*d*</code> <s>e</s></p>",
    "***a***": "<p><strong><em>a</em></strong></p>",
    "2 * 3 * 4, 2*3*4, a_b_c, /usr/*/bin/*": "<p>2 * 3 * 4, 2*3*4, a_b_c, /usr/*/bin/*</p>",
    "**open and `open": "<p>**open and `open</p>",
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "# A\n###### B ##\ntext": "<h2>A</h2><h4>B</h4><p>text</p>",
    "---": "<hr>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "- a\n  - b\n- c": "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>",
    "- a\n\t- b": "<ul><li>a<ul><li>b</li></ul></li></ul>",
    "3. a\n4. b\n\ntext": '<ol start="3"><li>a</li><li>b</li></ol><p>text</p>',
    "1. a\n\n   more\n\n2. b": '<ol start="1"><li>a<p>more</p></li><li>b</li></ol>',
    "|a|b|\n|-|:-:|\n|1|*2*|": '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr>'
    "<td>1</td><td><em>2</em></td></tr></tbody></table></div>",
    "a | b": "<p>a | b</p>",
    "\\*a\\* \\q": "<p>*a* \\q</p>",
}  # fmt: skip


@in_chromium
@pytest.mark.parametrize("text", MARKDOWN)
def test_markdown(chat, text):
    assert shown(chat, text) == MARKDOWN[text]


@in_chromium
@pytest.mark.parametrize("text", ["```python\na = '<b>'\n```\nafter", "```python\na = '<b>'", "~~~\na = '<b>'\n~~~"])
def test_code_block_has_copy_button(chat, served, text):
    html = shown(chat, text)
    block = '<div class="block"><pre><code>a = \'&lt;b&gt;\'</code></pre><button type="button">Copy</button></div>'
    assert html == block + ("<p>after</p>" if text.endswith("after") else "")
    chat.allow_clipboard(served.url)
    chat.run(f"(() => {{ const node = make('div'); $('log').append(node); show(node, {json.dumps(text)}) }})()")
    chat.run("document.querySelector('.block button').click()")
    chat.until("document.querySelector('.block button').textContent !== 'Copy'")
    assert chat.run("document.querySelector('.block button').textContent") == "Copied"


UNTRUSTED = [
    "<script>window.hit = 1</script>", "<img src=x onerror='window.hit = 1'>", "<b>bold</b> &lt; &amp;",
    "[a](javascript:window.hit=1)", "[a](JaVaScRiPt:window.hit=1)", "[a](data:text/html,<script>1</script>)",
    "[a]( javascript:1)", "[a](vbscript:1)", "![a](https://example.com/x.png)", "<a href='https://example.com'>x</a>",
    "```<img src=x onerror='window.hit = 1'>\nx\n```", "|<svg onload='window.hit = 1'>|\n|-|\n|<iframe>|",
    "[a](https://example.com/\"onclick=\"window.hit=1)", "a\u202egnp.exe",
]  # fmt: skip


@in_chromium
@pytest.mark.parametrize("text", UNTRUSTED)
def test_model_output_never_becomes_markup(chat, text):
    html = shown(chat, text)
    tags = set(re.findall(r"<(\w+)", html))
    assert tags <= {"p", "a", "div", "pre", "code", "button", "table", "thead", "tbody", "tr", "th", "td"}
    code = f"(() => {{ const node = make('div'); show(node, {json.dumps(text)});"
    code += " return [...node.querySelectorAll('*')].flatMap(each => each.getAttributeNames()) })()"
    assert set(chat.run(code)) <= {"class", "href", "title", "target", "rel", "type"}
    assert "\u202e" not in html and not chat.run("window.hit")
    assert all(href.startswith("https://example.com/") for href in re.findall(r'href="([^"]*)"', html))


@in_chromium
def test_links_show_target_and_send_no_referrer(chat):
    href = "https://example.com/a_b_c"
    link = f'<a href="{href}" title="{href}" target="_blank" rel="noopener noreferrer nofollow">'
    assert shown(chat, f"[x]({href}) and {href}.") == f"<p>{link}x</a> and {link}{href}</a>.</p>"


LONG = {
    "stars": "*a " * 20_000, "backticks": "`a``" * 20_000, "brackets": "[" * 50_000, "quotes": ">" * 20_000,
    "nested lists": "".join(" " * i + "- a\n" for i in range(500)), "dashes": "|" + "-" * 50_000 + "x\n" * 2,
    "rule": "- " * 30_000 + "x", "one word": "a" * 200_000, "links": "https://" * 20_000,
    "table": "|" * 20_000 + "\n|-|", "tildes": "~~a " * 20_000,
    "fences": "```\n" * 10_001, "underscores": "_" * 50_000, "headings": "# " + " #" * 30_000 + "x",
}  # fmt: skip


@in_chromium
@pytest.mark.parametrize("name", LONG)
def test_pathological_text_renders_quickly(chat, name):
    code = f"(() => {{ const start = performance.now(); show(make('div'), {json.dumps(LONG[name])});"
    assert chat.run(f"{code} return performance.now() - start }})()") < 3000


@in_chromium
def test_incremental_rendering_equals_whole_rendering(chat):
    text = "# A\n\n- a\n  - b\n\n```py\nx\n```\n\n|a|b|\n|-|-|\n|1|2|\n\nend **b**\n"
    code = f"(() => {{ const node = make('div'), text = {json.dumps(text)};"
    code += " for (let i = 0; i <= text.length; i++) show(node, text.slice(0, i)); return node.innerHTML })()"
    assert chat.run(code) == shown(chat, text)


@in_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_layout_in_both_color_schemes(chat, scheme):
    chat.window(320, 600, scheme, phone=True)
    text = f"{'w' * 300}\n\n```\n{'c' * 300}\n```\n\n|{'|'.join(['cell'] * 30)}|\n|{'-|' * 30}"
    chat.run(f"draw({{question: 'a', thought: '', answer: {json.dumps(text)}, stats: ''}})")
    assert chat.run("document.documentElement.scrollWidth") <= 320
    light = chat.run("getComputedStyle(document.documentElement).backgroundColor") == "rgb(251, 250, 248)"
    assert light == (scheme == "light")


@in_chromium
def test_keyboard_navigation_and_labels(chat):
    focused = []
    chat.run("$('new').focus()")
    for _ in range(3):
        chat.press("Tab")
        focused.append(chat.run("document.activeElement.id || document.activeElement.tagName"))
    assert focused == ["SUMMARY", "input", "send"]
    labeled = "Array.from(document.querySelectorAll('button, input, textarea')).every(node => node.textContent.trim()"
    assert chat.run(f"{labeled} || node.ariaLabel || node.labels?.length)")
