"""A Chromium without a window, told what to do over a pipe."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page in a browser. Use as a context.

    Args:
        folder: for what the browser stores.
        url: of the page.
    """

    def __init__(self, folder, url):
        # Above four, so that neither takes the place of the other.
        self._out, self._in = ([fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in os.pipe()] for _ in range(2))

        def at_three_and_four():
            os.dup2(self._out[0], 3)
            os.dup2(self._in[1], 4)

        command = [FOUND, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={folder}", "--window-size=900,720", "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=at_three_and_four,
            stderr=subprocess.DEVNULL,
        )
        os.close(self._out[0])
        os.close(self._in[1])
        self._number, self._left, self._session = 0, b"", None
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._out[1])
        os.close(self._in[0])

    def call(self, method, **params):
        """What the browser answers to a command of its protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out[1], json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._left:
                self._left += os.read(self._in[0], 65536)
            line, _, self._left = self._left.partition(b"\0")
            if (answer := json.loads(line)).get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def js(self, code):
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, code, seconds=30):
        until = time.monotonic() + seconds
        while not (found := self.js(code)):
            assert time.monotonic() < until, f"{code} never came; the page says: {self.js('document.body.innerText')}"
            time.sleep(0.02)
        return found

    def type(self, text):
        """Types into the field that has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key, code):
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text="\r" * (code == 13)
            )

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
