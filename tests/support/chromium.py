"""Debian's headless chromium, asked through the pipe of its DevTools protocol: what a page has
requested and said, how wide it is, and its picture."""

import base64
import contextlib
import json
import os
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

CHROMIUM = pathlib.Path("/usr/bin/chromium")


class Browser:
    """A tab. events: all that the browser has told, in order"""

    def __init__(self, writes: int, reads: int):
        self._writes, self._reads = writes, os.fdopen(reads, "rb")
        self._number, self._session = 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **values: Any) -> Any:
        """The result of a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._reads.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        return json.loads(text)

    def open(self, url: str, width: int, height: int = 900, dark: bool = False) -> None:
        """Opens a page in a window of this size, and waits until it is loaded."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **sizes)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def requests(self) -> list[str]:
        """The addresses that the page has asked for, its own first."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[dict[str, Any]]:
        """What the page has written to its console, and its errors."""
        methods = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self.events if event.get("method") in methods]

    def picture(self, whole: bool = True) -> bytes:
        """The page as PNG. whole: beyond the window's end, too"""
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        return base64.b64decode(data)


@contextlib.contextmanager
def browser(profile: pathlib.Path) -> Iterator[Browser]:
    """A context with chromium. profile: its folder, which need not exist"""
    reads, to_browser = os.pipe()
    from_browser, writes = os.pipe()

    def pipes() -> None:  # chromium's ends are 3 and 4
        for end, number in ((os.dup(reads), 3), (os.dup(writes), 4)):
            os.dup2(end, number)

    words = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, preexec_fn=pipes, pass_fds=(3, 4), **silent)
    os.close(reads)
    os.close(writes)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        process.kill()
        process.wait()
