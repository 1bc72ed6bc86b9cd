"""A headless Chromium, controlled over its DevTools pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (  # Chromium cannot create its sandbox as root or in a container.
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--remote-debugging-pipe",
)  # fmt: skip
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}


class Browser:
    """One page of a browser. Every wait has a timeout."""

    def __init__(self, process, to, back):
        self._process, self._to, self._back = process, to, back
        self._rest, self._number, self._session = b"", 0, None
        self.errors: list[str] = []  # Messages of the browser's console, and uncaught errors.
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 30
        while (message := self._read(end)).get("id") != self._number:
            self._event(message)
        assert "error" not in message, (method, message)
        return message["result"]

    def _read(self, end: float) -> dict:
        while b"\0" not in self._rest:
            assert select.select([self._back], [], [], max(0, end - time.monotonic()))[0], (
                "the browser did not answer in time"
            )
            data = os.read(self._back, 1 << 16)
            assert data, "the browser exited"
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _event(self, message: dict) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            details = message["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif message.get("method") == "Log.entryAdded":
            self.errors.append(message["params"]["entry"]["text"])

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def reload(self) -> None:
        self.run("window.before = true")
        self._call("Page.reload")
        self.until("document.readyState === 'complete' && !window.before")

    def run(self, code: str):
        """Return the value of an expression in the page, or of the promise that it returns."""
        done = self._call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, code: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not self.run(code):
            assert time.monotonic() < end, (code, self.run("document.body.innerText"), self.errors)
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Insert text into the focused element."""
        self._call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        code, text = KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def window(self, width: int, height: int, scheme: str = "light", phone: bool = False, scale: float = 1) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media="screen", features=scheme)

    def picture(self) -> bytes:
        """Return a screenshot of the window as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def allow_clipboard(self, url: str) -> None:
        granted = ["clipboardReadWrite", "clipboardSanitizedWrite"]
        self._call("Browser.grantPermissions", origin=url, permissions=granted)


@contextmanager
def browser(directory):
    """Run a browser whose profile is in `directory`."""
    to_child, from_child = os.pipe(), os.pipe()  # Chromium reads file descriptor 3 and writes 4
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={directory}"]
    # The shell assigns the pipes to the file descriptors that Chromium uses.
    shell = f'exec "$0" "$@" 3<&{to_child[0]} 4>&{from_child[1]}'
    process = subprocess.Popen(
        ["bash", "-c", shell, *command], pass_fds=(to_child[0], from_child[1]), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.close(to_child[0])
    os.close(from_child[1])
    try:
        yield Browser(process, to_child[1], from_child[0])
    finally:
        os.close(to_child[1])  # Chromium exits when its pipe closes
        os.close(from_child[0])
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
