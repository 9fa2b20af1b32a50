"""A real browser for tests: headless Chromium, driven over its DevTools protocol through a pair of pipes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--no-first-run", "--no-default-browser-check", "--disable-extensions", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--mute-audio", "--force-color-profile=srgb",
    "--font-render-hinting=none",
)  # fmt: skip
# The browser reads commands from its descriptor 3 and answers on 4, a zero byte after each message.
CONNECT = """
import os, sys
reading, writing = os.dup(int(sys.argv[1])), os.dup(int(sys.argv[2]))
while min(reading, writing) < 5:
    reading, writing = os.dup(reading), os.dup(writing)
os.dup2(reading, 3)
os.dup2(writing, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 60.0

PHONE, DESKTOP = (360, 740), (1280, 900)


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class BrowserError(AssertionError):
    """What the browser, or a script inside it, complained about."""


@contextlib.contextmanager
def start():
    """A browser that is gone afterwards, with its profile."""
    program = find_chromium()
    assert program is not None
    its_input, our_output = os.pipe()
    our_input, its_output = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", CONNECT, str(its_input), str(its_output), program, *OPTIONS,
             "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(its_input, its_output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(its_input)
        os.close(its_output)
        try:
            yield Connection(our_input, our_output)
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(our_input)
            os.close(our_output)


class Connection:
    """Commands and their answers, one at a time; events are kept."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._number = 0
        self._buffer = b""
        self.events: list[dict] = []

    def call(self, method: str, session: str | None = None, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writing, data) :]
        end = time.monotonic() + PATIENCE
        while True:
            answer = self._receive(end, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def _receive(self, end: float, method: str) -> dict:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise BrowserError(f"{method}: no answer within {PATIENCE:.0f} s")
            piece = os.read(self._reading, 1 << 20)
            if not piece:
                raise BrowserError(f"{method}: the browser has gone away")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, *, size=DESKTOP, dark: bool = False, touch: bool = False, scale: float = 1.0) -> Page:
        """A file in a new tab of this size, loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        width, height = size
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=touch
        )
        page.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=path.resolve().as_uri())
        page.wait_for("document.readyState === 'complete'")
        return page


class Page:
    """A tab."""

    def __init__(self, connection: Connection, session: str) -> None:
        self._connection, self._session = connection, session

    def call(self, method: str, **params):
        return self._connection.call(method, self._session, **params)

    def evaluate(self, expression: str):
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise BrowserError(f"never true: {expression}")
            time.sleep(0.02)

    def place(self, selector: str, index: int = 0) -> tuple[float, float]:
        """Middle of an element, scrolled into sight."""
        found = self.evaluate(
            f"(() => {{ const node = document.querySelectorAll({json.dumps(selector)})[{index}];"
            "if (!node) return null; node.scrollIntoView({ block: 'center', behavior: 'instant' });"
            "const box = node.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        if found is None:
            raise BrowserError(f"nothing on the page is {selector} number {index}")
        return found[0], found[1]

    def hover(self, selector: str, index: int = 0) -> None:
        x, y = self.place(selector, index)
        self.hover_at(x, y)

    def hover_at(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str, index: int = 0) -> None:
        x, y = self.place(selector, index)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def tap(self, selector: str, index: int = 0) -> None:
        x, y = self.place(selector, index)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def choose(self, select: str, value) -> None:
        """An option of a select, as the keyboard would do it."""
        self.evaluate(
            f"(() => {{ const node = document.querySelector({json.dumps(select)});"
            f"node.value = {json.dumps(str(value))};"
            "if (node.selectedIndex < 0) throw new Error('no such option');"
            "node.dispatchEvent(new Event('change', { bubbles: true })); })()"
        )

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        options = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))
        return path

    @property
    def complaints(self) -> list[str]:
        """Exceptions of scripts, and what the browser logged: a refused resource, say."""
        self.evaluate("0")
        own = [event for event in self._connection.events if event.get("sessionId") == self._session]
        thrown = [event["params"]["exceptionDetails"] for event in own if event["method"] == "Runtime.exceptionThrown"]
        logged = [event["params"]["entry"]["text"] for event in own if event["method"] == "Log.entryAdded"]
        return [details.get("exception", {}).get("description", details["text"]) for details in thrown] + logged

    @property
    def requests(self) -> list[str]:
        """Every address that was asked for."""
        self.evaluate("0")
        own = [event for event in self._connection.events if event.get("sessionId") == self._session]
        return [event["params"]["request"]["url"] for event in own if event["method"] == "Network.requestWillBeSent"]
