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
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " "), "ArrowDown": (40, "")}


class Pipe:
    """The DevTools connection of a browser. Every wait has a timeout."""

    def __init__(self, to, back):
        self._to, self._back, self._rest, self._number = to, back, b"", 0
        self.handlers = {}  # Session of a tab -> function that receives its events.

    def call(self, method: str, session: str | None = None, **params) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 30
        while (message := self._read(end)).get("id") != self._number:
            self.handlers.get(message.get("sessionId"), lambda message: None)(message)
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


class Browser:
    """One tab of a browser."""

    def __init__(self, pipe: Pipe):
        self._pipe = pipe
        self.errors: list[str] = []  # Messages of the browser's console, and uncaught errors.
        self._target = pipe.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = pipe.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        pipe.handlers[self._session] = self._event
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params) -> dict:
        return self._pipe.call(method, self._session, **params)

    def _event(self, message: dict) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            details = message["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif message.get("method") == "Log.entryAdded":
            self.errors.append(message["params"]["entry"]["text"])

    def tab(self) -> "Browser":
        """Open another tab."""
        return Browser(self._pipe)

    def close(self) -> None:
        """Close the tab, as a user does."""
        self._pipe.call("Target.closeTarget", targetId=self._target)

    def clear(self, url: str) -> None:
        """Delete what pages of this origin have stored, and show an empty page."""
        self._call("Page.navigate", url="about:blank")
        self._call("Storage.clearDataForOrigin", origin=url, storageTypes="all")

    def choose_files(self, selector: str, *files) -> None:
        """Choose files in a file field, as a user does in the dialog of the system."""
        node = self._call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")["result"]
        self._call("DOM.setFileInputFiles", files=[str(each) for each in files], objectId=node["objectId"])

    def allow_downloads(self, directory) -> None:
        """Save downloads in a directory without a question."""
        self._pipe.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(directory))

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def reload(self) -> None:
        self.run("window.before = true")
        self._call("Page.reload")
        self.until("document.readyState === 'complete' && !window.before")

    def run(self, code: str):
        """Return the value of an expression in the page, or of the promise that it returns."""
        done = self._call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True,
                          allowUnsafeEvalBlockedByCSP=False)  # fmt: skip
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def script(self, code: str):
        """Return the value of the body of an async function. In it, `page(name)` imports a module of the page."""
        page = "name => import(document.querySelector('script[type=module]').src.replace(/\\w+.js$/, `${name}.js`))"
        return self.run(f"(async () => {{ const page = {page}; {code} }})()")

    def until(self, code: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not self.run(f"Promise.resolve({code}).then(Boolean)"):
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
        yield Browser(Pipe(to_child[1], from_child[0]))
    finally:
        os.close(to_child[1])  # Chromium exits when its pipe closes
        os.close(from_child[0])
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
