"""A real Chromium for tests of pages, driven through its DevTools protocol over a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 120.0  # a loaded machine starts Chromium slowly


def browser() -> str:
    """Its path; the test is skipped where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on this machine")
    return found


class Tab:
    """One page in headless Chromium. Use it in a `with` block.

    requested: URLs of all requests. complaints: what the browser logged: errors, and what a policy blocked.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        ends, wires = zip(*(os.pipe() for _ in range(2)), strict=True)
        # Chromium reads from 3 and writes to 4; numbers from 10 on collide with neither.
        read, write = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (ends[0], wires[1]))
        command = [browser(), "--headless", "--disable-gpu", "--no-sandbox", "--remote-debugging-pipe"]
        command += [f"--user-data-dir={folder / 'profile'}", "--window-size=900,700", *options]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", *command],
            pass_fds=(read, write),
            env=os.environ | {"HOME": str(folder)},
            stderr=subprocess.DEVNULL,
        )
        for fd in (read, write, ends[0], wires[1]):
            os.close(fd)
        self._write, self._read, self._rest, self._count = wires[0], ends[1], b"", 0
        self._session: str | None = None
        self.requested: list[str] = []
        self.complaints: list[str] = []

    def __enter__(self) -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (told := self._next()).get("id") != self._count:
            pass
        assert "error" not in told, told
        found: dict[str, Any] = told["result"]
        return found

    def _next(self) -> dict[str, Any]:
        """The next message; events are noted."""
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            self._rest += (data := os.read(self._read, 1 << 16))
            assert data, "Chromium has ended"
        line, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        event = told.get("params", {})
        if told.get("method") == "Network.requestWillBeSent":
            self.requested.append(event["request"]["url"])
        elif told.get("method") == "Log.entryAdded":
            self.complaints.append(event["entry"]["text"])
        elif told.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(event["exceptionDetails"]))
        return told

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def value(self, code: str) -> Any:
        """What an expression of JavaScript gives in the page, as JSON."""
        told = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, code: str) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + SECONDS
        while not self.value(code):
            assert time.monotonic() < deadline, f"{code}: {self.value('document.body.innerText')}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, **more: Any) -> None:
        """A key goes down and up. more: `text` that it writes, `modifiers`."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code} | more
        self.call("Input.dispatchKeyEvent", type="keyDown", **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector: str) -> None:
        """The mouse's button goes down and up in the middle of an element."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.value(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
