"""Markdown in the chat page: the same structure as in the terminal chat, and no way from text to markup."""

import json
import random
import re
from pathlib import Path

import pytest
from browser import CHROMIUM, browser
from page_structure import STRUCTURE_OF_NODE, joined, terminal_structure
from servers import Running

from tridecode import Engine

DOCUMENTS = sorted((Path(__file__).parent / "markdown").glob("*.md"))
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian's package chromium)")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with (
        Engine.load(device="cpu", slots=1) as engine,
        Running(engine) as served,
        browser(tmp_path_factory.mktemp("chromium")) as chromium,
    ):
        chromium.open(served.url)
        chromium.until("document.querySelector('#model').textContent")
        yield chromium


@pytest.fixture(autouse=True)
def no_errors(page):
    page.errors.clear()
    yield
    page.run("0")
    assert page.errors == [], "the browser reported script errors or blocked requests"


def shown(page, texts, work, before=""):
    """Show each text in a new element `node`, and return the values of `work`."""
    return page.script(f"""
        const {{show}} = await page("markdown");
        {before}
        return {json.dumps(texts)}.map(text => {{
          const node = document.createElement("div");
          node.className = "assistant";
          show(node, text);
          return {work};
        }});
    """)


def structures(page, texts):
    return [joined(each) for each in shown(page, texts, "[...node.childNodes].map(structure)", STRUCTURE_OF_NODE)]


# ---- the same structure as in the terminal


def test_there_are_ten_documents():
    assert len(DOCUMENTS) == 10


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_document_has_the_structure_of_the_terminal(page, path):
    text = path.read_text(encoding="utf-8")
    [structure] = structures(page, [text])
    assert structure == terminal_structure(text) and len(structure) > 3


def kinds(structure):
    return {node[0].split()[0] for node in structure if isinstance(node, list)}.union(
        *(kinds(node[1:]) for node in structure if isinstance(node, list))
    )


def test_documents_contain_each_kind_of_node():
    all_kinds = set().union(*(kinds(terminal_structure(path.read_text(encoding="utf-8"))) for path in DOCUMENTS))
    assert all_kinds == {
        "p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "code", "tex", "table", "thead",
        "tbody", "tr", "th", "td", "strong", "em", "s", "link",
    }  # fmt: skip


FRAGMENTS = [
    *"*_~`#>-+|:=$[](){}<>!/.,;'\"%^@ax \n\n ",
    "**",
    "***",
    "__",
    "~~",
    "``",
    "- ",
    "* ",
    "+ ",
    "1. ",
    "7) ",
    "> ",
    "# ",
    "\n\n",
    "\n- ",
    "\n> ",
    "\n    ",
    "```\n",
    "\n```\n",
    "~~~\n",
    "---\n",
    "| a | b |\n|---|:-:|\n",
    "| x | y |\n",
    "\\(",
    "\\)",
    "\\[",
    "\\]\n",
    "$$",
    "\n$$\n",
    "$x$",
    "\\*",
    "\\|",
    "\\begin{align}\n",
    "\n\\end{align}\n",
    "![",
    "[b]: c\n",
    "<b>",
    "a*b*c",
    "two words",
    "snake_case",
    "**bold**",
    "*it is*",
    "`code`",
    "é",
    "漢字",
    "😀",
    "[x] ",
    "- [ ] ",
    "\t",
    "&amp;",
    "&#27;",
    "\u202e",
    "\r\n",
    "[a](b)",
    "[a](http://b.example)",
]


def test_random_texts_have_the_structure_of_the_terminal(page):
    choose = random.Random(3)
    texts = ["".join(choose.choices(FRAGMENTS, k=choose.randrange(1, 30))) + "." for _ in range(400)]
    for text, structure in zip(texts, structures(page, texts)):
        assert structure == terminal_structure(text), text


def test_growing_text_is_drawn_like_whole_text(page):
    """While an answer streams, blocks that have not changed are kept."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        code = f"""
            const {{show}} = await page("markdown"), grown = document.createElement("div"), whole = grown.cloneNode();
            const text = {json.dumps(text)};
            for (let i = 0; i <= text.length; i += 3) show(grown, text.slice(0, i));
            show(grown, text);
            show(whole, text);
            await new Promise(resolve => setTimeout(resolve, 300));  // languages are loaded
            return [grown.innerHTML, whole.innerHTML];
        """
        grown, whole = page.script(code)
        assert grown == whole, path


def test_unchanged_blocks_are_kept(page):
    assert page.script("""
        const {show} = await page("markdown"), node = document.createElement("div");
        show(node, "one\\n\\ntwo");
        const first = node.firstChild;
        show(node, "one\\n\\ntwo and more\\n\\nthree");
        return node.firstChild === first && node.textContent === "onetwo and morethree";
    """)


HTML = {
    "1. a\n2. b\n\n7. c": '<ol><li value="1"><p>a</p></li><li value="2"><p>b</p></li><li value="7"><p>c</p></li></ol>',
    "|a|b|\n|-:|:-:|\n|1|2|": '<div class="table" tabindex="0"><table><thead><tr><th class="right">a</th>'
    '<th class="center">b</th></tr></thead><tbody><tr><td class="right">1</td><td class="center">2</td></tr></tbody>'
    "</table></div>",
    "- [x] a": '<ul><li class="task"><input type="checkbox" disabled="" aria-label="done"> a</li></ul>',
    "# A\n\n##### B": '<h3>A</h3><h6 aria-level="7">B</h6>',
    "one\ntwo": "<p>one<br>two</p>",
    "[a](b.md)": '<p><span class="link"><span>a</span> (b.md)</span></p>',
    "`__init__`": "<p><code>__init__</code></p>",
}


@pytest.mark.parametrize("text", HTML)
def test_elements(page, text):
    [html] = shown(page, [text], "node.innerHTML")
    assert html == HTML[text]


def test_links_show_their_address_and_send_no_referrer(page):
    href = "https://example.com/a_b_c"
    link = f'<a href="{href}" title="{href}" target="_blank" rel="noopener noreferrer nofollow">'
    [html] = shown(page, [f"[x]({href}) and {href}."], "node.innerHTML")
    assert html == f"<p>{link}x</a> and {link}{href}</a>.</p>"


# ---- code and TeX


@pytest.mark.parametrize(
    "fence, language, keyword",
    [
        ("python", "py", "def"),
        ("c++", "c", "return"),
        ("js", "js", "const"),
        ("Rust", "rs", "fn"),
        ("sql", "sql", "SELECT"),
    ],
)
def test_code_is_colored(page, fence, language, keyword):
    text = f"```{fence}\n{keyword} x = '<b>' // 12\n```"
    code = f"""
        const {{show}} = await page("markdown"), node = document.createElement("div");
        show(node, {json.dumps(text)});
        const pause = () => new Promise(done => setTimeout(done, 20));
        for (let i = 0; i < 100 && !node.querySelector("code span"); i++) await pause();
        return [node.querySelector("code").textContent, node.querySelector("code .syntax-kwd").textContent];
    """
    assert page.script(code) == [f"{keyword} x = '<b>' // 12", keyword]


@pytest.mark.parametrize("language", ["../chat", "constructor", "__proto__", "toString", "x/y", "", "unknown"])
def test_unknown_language_has_no_colors_and_loads_nothing(page, language):
    before = page.run("performance.getEntriesByType('resource').length")
    [html] = shown(page, [f"```{language}\nlet x = 1\n```"], "node.querySelector('code').innerHTML")
    assert html == "let x = 1" and page.run("performance.getEntriesByType('resource').length") == before


@pytest.mark.parametrize("text", ["$x^2$", "\\(x^2\\)", "$$\nx^2\n$$", "\\[\nx^2\n\\]", "a $$x^2$$ b"])
def test_tex_becomes_mathml(page, text):
    [html] = shown(page, [text], "node.querySelector('.tex').innerHTML")
    assert "<msup><mi>x</mi><mn" in html and html.startswith("<math")
    [title] = shown(page, [text], "node.querySelector('.tex').title")
    assert title in text


@pytest.mark.parametrize(
    "tex",
    [
        "\\unknowncommand{x}", "\\frac{1", "\\href{javascript:alert(1)}{x}", "\\url{https://example.com}",
        "\\includegraphics{https://example.com/x.png}", "\\class{error}{x}", "\\id{input}{x}", "\\style{color:red}{x}",
        "\\data{a=b}{x}", "\\def\\a{\\a\\a}\\a", "x" * 5000, "{" * 3000, "\\ref{x}", "\\eqref{x}", "\\label{x}",
    ],
)  # fmt: skip
def test_tex_that_is_unknown_or_not_harmless_is_text(page, tex):
    """Commands of links, images, classes and styles, and TeX that needs too much time or memory, have no effect."""
    names = '[...node.querySelectorAll("*")].map(each => each.localName)'
    attributes = '[...node.querySelectorAll("math *")].flatMap(each => each.getAttributeNames())'
    [(text, names, attributes)] = shown(page, [f"a ${tex}$ b"], f"[node.textContent, {names}, {attributes}]")
    assert not {"a", "img", "script", "annotation-xml", "maction"} & set(names)
    assert not {"href", "src", "id", "onclick", "data-a"} & set(attributes)
    assert text == f"a ${tex}$ b" or "math" in names


def test_tex_cannot_cover_the_page(page):
    """Sizes in TeX are limited, and an answer draws only inside its own box."""
    for tex in ("\\rule{9999em}{9999em}", "\\kern{-9999em}x", "\\raisebox{9999em}{x}", "\\hspace{-9999em}x"):
        width = page.script(f"""
            const {{show}} = await page("markdown"), node = document.createElement("div");
            node.className = "assistant";
            document.querySelector("#log").append(node);
            show(node, "$" + {json.dumps(tex)} + "$");
            const contain = getComputedStyle(node).contain, width = document.documentElement.scrollWidth;
            node.remove();
            return contain === "paint" && width <= innerWidth;
        """)
        assert width, tex


# ---- injection: the classes of attacks in the test suites of markdown-it and of HTML sanitizers

URLS = [
    "javascript:window.hit=1",
    "JaVaScRiPt:window.hit=1",
    " javascript:window.hit=1",
    "java\tscript:window.hit=1",
    "java&#10;script:window.hit=1",
    "&#74;avascript:window.hit=1",
    "&#x6A;avascript&colon;window.hit=1",
    "javascript&#x3A;window.hit=1",
    "\\&#74;avascript:window.hit=1",
    "&#x26;#74;avascript:window.hit=1",
    "\u2028javascript:window.hit=1",
    "\u00a0javascript:window.hit=1",
    "\u200bjavascript:window.hit=1",
    "\u0001javascript:window.hit=1",
    "javascript\u0000:window.hit=1",
    "vbscript:msgbox(1)",
    "VBSCRIPT:msgbox(1)",
    "data:text/html,<script>window.hit=1</script>",
    "data:text/html;base64,PHNjcmlwdD4=",
    "data:image/svg+xml,<svg/>",
    "data:image/png;base64,AAAA",
    "file:///etc/passwd",
    "blob:http://127.0.0.1/x",
    "filesystem:http://127.0.0.1/x",
    "ftp://example.com",
    "//example.com/x",
    "/javascript:x",
    "#location",
    "?q",
    "javascript://example.com/%0awindow.hit=1",
    "https:javascript:1",
    "view-source:https://example.com",
    "intent://example.com",
    "about:blank",
    "chrome://settings",
    'https://example.com/"onclick="window.hit=1',
    "https://example.com/'onmouseover='window.hit=1",
    "https://example.com/><script>window.hit=1</script>",
    "https://user:password@example.com/",
    "https://example.com\\@a.b",
    "mailto:a@example.com?body=<script>",
    "http://[::1",
    "https://exa%20mple.com",
    "https://example.com/%zz",
]
MARKUP = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload='window.hit = 1'>",
    "<svg><script>window.hit=1</script></svg>",
    "<svg><a xlink:href='javascript:window.hit=1'><text>x</text></a></svg>",
    "<svg><animate onbegin=window.hit=1 attributeName=x></svg>",
    "<svg><use href='data:image/svg+xml,x'/></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hit=1>",
    "<math href='javascript:window.hit=1'>x</math>",
    "<math><annotation-xml encoding='text/html'><img src=x onerror=window.hit=1></annotation-xml></math>",
    "<iframe src='javascript:window.hit=1'></iframe>",
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "<object data='data:text/html,x'></object>",
    "<embed src='javascript:window.hit=1'>",
    "<base href='//example.com/'>",
    "<link rel=stylesheet href='//example.com'>",
    "<meta http-equiv=refresh content='0;javascript:window.hit=1'>",
    "<style>*{background:url(//example.com)}</style>",
    "<body onload=window.hit=1>",
    "<form action='javascript:1'><button>",
    "<input autofocus onfocus=window.hit=1>",
    "<details open ontoggle=window.hit=1>",
    "<video><source onerror=window.hit=1>",
    "<marquee onstart=window.hit=1>",
    "<a href='javascript:window.hit=1'>x</a>",
    "<template><img src=x></template>",
    "<noscript><p title='</noscript><img src=x onerror=window.hit=1>'>",
    "<textarea></textarea><img src=x>",
    '<!--<img src="--><img src=x onerror=window.hit=1//">',
    "<![CDATA[<img src=x>]]>",
    "<?php <img src=x> ?>",
    "<img name=body id=cookie>",
    "<form id=attributes><input name=nodeName>",
    "<a id=location href='#x'>clobber</a>",
    "<p style='position:fixed;inset:0'>cover</p>",
    "<div is=x-y>custom</div>",
    "<x onclick=window.hit=1 tabindex=1>x</x>",
    "\u0000<script>window.hit=1</script>",
    "<scr\u0000ipt>window.hit=1</scr\u0000ipt>",
    "<\u0073cript>window.hit=1</script>",
    "&lt;script&gt;window.hit=1&lt;/script&gt;",
    "&#60;img src=x onerror=window.hit=1&#62;",
    "<b>bold</b> &lt; &amp;",
    "<listing>&lt;img onerror=window.hit=1 src=x&gt;</listing>",
    "<option><style></option></select><img src=x></style>",
    "<xmp><p title='</xmp><img src=x onerror=window.hit=1>'>",
    "<plaintext><img src=x>",
    "</div></section></body><img src=x>",
    "{{constructor.constructor('window.hit=1')()}}",
    "${window.hit=1}",
    "a\u202egnp.exe",
    "__proto__",
    "constructor",
]
PLACES = [
    "{}",
    "a **{}** b",
    "- {}\n- b",
    "> {}",
    "# {}",
    "| {} |\n|---|\n| {} |",
    "`{}`",
    "```{}\n{}\n```",
    "$${}$$",
    "\\({}\\)",
    "[{}](https://example.com)",
    "[a](https://example.com '{}')",
    "![{}](x)",
    "```html\n{}\n```",
    "[x] {}",
    "1. [x] {}",
    "\\begin{{align}}\n{}\n\\end{{align}}",
]
TAGS = set(
    "p h3 h4 h5 h6 ul ol li blockquote hr br table thead tbody tr th td strong em s a code pre div span button "
    "input".split()
)
ATTRIBUTES = set("class href title target rel type tabindex value disabled aria-label aria-level".split())
# The elements in answers, other than MathML, their attributes, the addresses of links, and whether a script ran.
FOUND = """(() => {
  document.querySelector("#log").append(node);
  const all = [...node.querySelectorAll("*")].filter(each => each.namespaceURI === "http://www.w3.org/1999/xhtml");
  const mathml = [...node.querySelectorAll("*")].filter(each => !all.includes(each));
  const result = [all.map(each => each.localName), all.flatMap(each => each.getAttributeNames()),
    [...node.querySelectorAll("[href]")].map(each => each.href), node.textContent,
    mathml.map(each => each.localName), mathml.flatMap(each => each.getAttributeNames())];
  node.remove();
  return result;
})()"""


def check(page, texts):
    for text, found in zip(texts, shown(page, texts, FOUND)):
        tags, attributes, links, content, mathml, math_attributes = found
        assert set(tags) <= TAGS and set(attributes) <= ATTRIBUTES, text
        assert all(re.match("(https?://|mailto:)", link) for link in links), text
        assert not {"href", "src", "id", "xlink:href"} & set(math_attributes), text
        assert not any(name.startswith("on") for name in [*attributes, *math_attributes]), text
        assert not {"a", "img", "svg", "script", "annotation-xml", "maction", "mglyph"} & set(mathml), text
        assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x08\x7f-\x9f]", content), text
    assert not page.run("window.hit")


@pytest.mark.parametrize(
    "form", ["[a]({})", "[a](<{}>)", "![a]({})", "<{}>", "{}", "[a]: {}\n\n[a]", "[a]({} 'title')"]
)
def test_addresses_are_safe(page, form):
    check(page, [form.format(url) for url in URLS])


@pytest.mark.parametrize("place", PLACES)
def test_markup_stays_text(page, place):
    check(page, [place.format(*[text] * place.count("{}")) for text in MARKUP])


def test_all_text_of_markup_is_shown(page):
    """HTML that a sanitizer would remove is shown, as in the terminal."""
    texts = [text for text in MARKUP if not re.search(r"[\u0000\u202e*$&]|__|\[", text)]
    for text, content in zip(texts, shown(page, texts, "node.textContent")):
        assert content == text
    assert len(texts) > 30


def test_random_mixtures_of_markup_are_safe(page):
    choose = random.Random(5)
    parts = [*MARKUP, *URLS, *FRAGMENTS, "[a](", ")", "<", ">", "'", '"', "=", "\\", "\n", "```", "$$"]
    check(page, ["".join(choose.choices(parts, k=choose.randrange(2, 12))) for _ in range(400)])


# ---- time

LONG = {
    "stars": "*a " * 20_000,
    "backticks": "`a``" * 20_000,
    "brackets": "[" * 50_000,
    "quotes": ">" * 20_000,
    "nested lists": "".join(" " * i + "- a\n" for i in range(500)),
    "dashes": "|" + "-" * 50_000 + "x\n" * 2,
    "rule": "- " * 30_000 + "x",
    "one word": "a" * 200_000,
    "links": "https://" * 20_000,
    "table": "|" * 20_000 + "\n|-|",
    "tildes": "~~a " * 20_000,
    "dollars": "$a " * 20_000,
    "double dollars": "$$a " * 20_000,
    "fences": "```\n" * 10_001,
    "underscores": "_" * 50_000,
    "headings": "# " + " #" * 30_000 + "x",
    "TeX marks": "\\(" * 20_000,
    "TeX lines": "\\[\n" * 5_000,
    "environments": "\\begin{align}\n" * 3_000,
    "blank lines": "a\n" + "\n" * 50_000 + "b",
    "link texts": "[a](" * 10_000,
    "images": "![" * 20_000,
    "addresses": "http://a.b/" * 5_000,
    "python": "```py\n" + "f'''{" * 5_000,
    "css": "```css\n" + "a-b:" * 7_000,
    "comment": "```c\n/*" + "a" * 29_000,
    "javascript": "```js\n" + "`${" * 9_000,
    "html": "```html\n" + "<a b=" * 5_000,
    "cells": "|a|\n|-|\n" + "|b" * 20_000,
}


@pytest.mark.parametrize("name", LONG)
def test_pathological_text_renders_quickly(page, name):
    milliseconds = page.script(f"""
        const {{show}} = await page("markdown"), text = {json.dumps(LONG[name])};
        show(document.createElement("div"), text.slice(0, 300));  // loads the language
        await new Promise(resolve => setTimeout(resolve, 100));
        const start = performance.now();
        show(document.createElement("div"), text);
        return performance.now() - start;
    """)
    assert milliseconds < 3000
