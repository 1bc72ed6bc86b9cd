"""Take the pictures of the server's page in docs/serving.md: python docs/record_browser.py.

It needs Chromium (Debian's package chromium) and the package's extra `serve`.
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "server")]

from browser import CHROMIUM, browser  # noqa: E402
from servers import Running  # noqa: E402

from tridecode import Engine  # noqa: E402

CHATS = (("Name three rivers.",), ("Hi, I'm Nora!", "What is 17 + 25?", "What's my name?"))
MARKDOWN = ROOT / "tests" / "server" / "markdown" / "answer.md"
QUESTION = "How do I sort a list in Python?"
DESKTOP, PHONE = {"width": 1000, "height": 680}, {"width": 390, "height": 700, "phone": True}


def ask(chromium, messages) -> None:
    """Ask the bundled model in a new chat."""
    chromium.run("document.querySelector('#new').click()")
    chromium.until("!document.querySelector('.turn')")
    for number, message in enumerate(messages, 1):
        chromium.run("document.querySelector('#input').focus()")
        chromium.type(message)
        chromium.press("Enter")
        chromium.until(f"document.querySelectorAll('.actions button').length >= {3 * number}")


def show_example(chromium) -> None:
    """Show a conversation with an example of Markdown, which the bundled model cannot write."""
    chromium.script(f"""
        const {{addTurn, newConversation, newId}} = await page("conversation"), {{save}} = await page("store");
        const made = newConversation(newId(), {{}}, "bundled");
        const answer = {json.dumps(MARKDOWN.read_text())};
        addTurn(made, null, {{question: {json.dumps(QUESTION)}, answer, state: "done"}});
        made.updated = Date.now();
        await save(made, made.turns);
        location.hash = made.id;
    """)
    chromium.until("document.querySelector('code span') && document.querySelector('math')")


def main() -> None:
    if not CHROMIUM:
        sys.exit("Chromium is not installed; apt-get install chromium")
    engine = Engine.load(device="cpu")
    with engine, Running(engine) as server, tempfile.TemporaryDirectory() as profile, browser(profile) as chromium:

        def picture(name: str, scheme: str, size: dict, top: int) -> None:
            chromium.window(**size, scheme=scheme)
            chromium.run(f"document.activeElement.blur(); scrollTo(0, {top})")
            chromium.run("new Promise(done => setTimeout(done, 300))")
            (ROOT / "docs" / f"page-{name}-{scheme}.png").write_bytes(chromium.picture())

        chromium.window(**DESKTOP)
        chromium.open(server.url)
        chromium.until("document.querySelector('#model').textContent")
        chromium.run("(field => { field.value = '0'; field.dispatchEvent(new Event('input')) })"
                     "(document.querySelector('#temperature'))")  # fmt: skip
        for messages in CHATS:
            ask(chromium, messages)
        picture("desktop", "light", DESKTOP, 0)
        picture("phone", "dark", PHONE, 0)
        chromium.window(**DESKTOP)
        show_example(chromium)
        picture("desktop", "dark", DESKTOP, 0)
        picture("phone", "light", PHONE, 650)


if __name__ == "__main__":
    main()
