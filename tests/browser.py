"""Headless Chromium for tests of HTML pages, driven through the DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--mute-audio",
    "--autoplay-policy=no-user-gesture-required",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """The binary, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. `events` holds every protocol event since it was opened."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        binary = find_chromium()
        if binary is None:
            raise FileNotFoundError(f"none of {', '.join(NAMES)} is installed")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        command = ["bash", "-c", shell, "bash", binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        mobile = width < 700
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._session = ""
            self.call("Browser.close")
            self._process.wait(20)
        except (AssertionError, OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def open(self, file: Path, timeout_s: float = 60) -> None:
        """Loads a local file and waits for its load event."""
        self.events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.wait_for(lambda: any(e["method"] == "Page.loadEventFired" for e in self.events), timeout_s)

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def screenshot(self, out: Path, full: bool = False) -> None:
        shot: dict[str, Any] = {"format": "png", "captureBeyondViewport": full}
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            shot["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        out.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **shot)["data"]))

    def requests(self) -> list[str]:
        """Addresses asked for since `open`, but for the file itself and what the page carries inline."""
        sent = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith(("data:", "file:"))]

    def complaints(self) -> list[str]:
        """Console errors and warnings, uncaught exceptions and what the browser itself logged since `open`."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                found.append(f"{params['entry']['level']}: {params['entry']['text']}")
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
        return found

    def wait_for(self, condition: Any, timeout_s: float = 30) -> None:
        """Reads events until `condition()` holds."""
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"not within {timeout_s} s; last events: {self.events[-3:]}")
            self._read(0.1)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One protocol command and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer: dict[str, Any] | None = None
        end = time.monotonic() + 60
        while answer is None:
            if time.monotonic() > end:
                raise TimeoutError(f"no answer to {method} within 60 s")
            for found in self._read(1.0):
                if found.get("id") == self._number:
                    answer = found
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self, timeout_s: float) -> list[dict[str, Any]]:
        """Messages that are complete by now; events are also kept."""
        ready, _, _ = select.select([self._in], [], [], timeout_s)
        if not ready:
            return []
        data = os.read(self._in, 2**20)
        if not data:
            raise AssertionError(f"Chromium ended with {self._process.poll()}")
        *complete, self._buffer = (self._buffer + data).split(b"\0")
        messages = [json.loads(m) for m in complete]
        self.events += [m for m in messages if "method" in m]
        return messages
