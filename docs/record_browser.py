"""Take docs/page.png, a picture of a chat in the server's page: python docs/record_browser.py.

It needs Chromium (Debian's package chromium) and the package's extra `serve`.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "server")]

from browser import CHROMIUM, browser  # noqa: E402
from servers import Running  # noqa: E402

from tridecode import Engine  # noqa: E402

MESSAGES = ("Hi, I'm Nora!", "What is 17 + 25?", "What's my name?")


def main() -> None:
    if not CHROMIUM:
        sys.exit("Chromium is not installed; apt-get install chromium")
    engine = Engine.load(device="cpu")
    with engine, Running(engine) as server, tempfile.TemporaryDirectory() as profile, browser(profile) as chromium:
        chromium.window(820, 600)
        chromium.open(server.url)
        chromium.until("model")
        chromium.run("$('temperature').value = '0'")
        for number, message in enumerate(MESSAGES, 1):
            chromium.until("document.activeElement.id === 'input'")
            chromium.type(message)
            chromium.press("Enter")
            chromium.until(f"!running && document.querySelectorAll('.stats').length === {number}")
        (ROOT / "docs" / "page.png").write_bytes(chromium.picture())


if __name__ == "__main__":
    main()
