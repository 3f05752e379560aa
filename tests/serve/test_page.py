"""The page at `/`, in a browser without a window."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time

import pytest

from graphmod.serve.app import PAGE
from graphmod.text import ByteCodec
from tests.support.served import Served, alone, chat_model, tokenizer

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


ANSWER = "document.querySelector('.turn.assistant:last-child:not(.busy) .text')?.textContent"
NOTE = "document.querySelector('.turn.assistant:last-child .note')?.textContent"
needs_browser = pytest.mark.skipif(FOUND is None, reason="no chromium")


def test_the_page_loads_nothing_from_elsewhere_and_every_field_has_a_label():
    page = PAGE.read_text()
    assert not any(words in page for words in ("http:", "https:", "src=", "@import", "url("))
    for field in ("temperature", "top_p", "max_tokens", "key"):
        assert f'<label for="{field}">' in page and f'id="{field}"' in page
    assert 'aria-label="Your message"' in page and 'role="log"' in page and "prefers-color-scheme: dark" in page


def ask(page, text):
    page.js("document.getElementById('input').focus()")
    page.type(text)
    page.press("Enter", 13)


@needs_browser
def test_a_chat_streams_goes_on_and_can_be_stopped(tmp_path):
    codec = alone().requests.codec

    def done(count, *messages):
        roles = [("user", "assistant")[number % 2] for number in range(len(messages))]
        said = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=True)]
        return alone().generate([codec.encode_as_is(codec.chat(said))], max_new_tokens=count)[0]

    def answer(*messages):
        return done(12, *messages).text

    with Served(chat_model(), tokenizer(), max_batch_size=4) as one, Browser(tmp_path, one.url) as page:
        page.wait_for("document.getElementById('state')?.textContent === 'ready'")
        assert page.js("document.title") == "tiny"
        page.js("for (const [id, value] of [['temperature', 0], ['top_p', 1], ['max_tokens', 12]]) $(id).value = value")
        ask(page, "why <b>is</b> it")
        page.wait_for(f"({NOTE})?.includes('12 tokens')")
        first = page.js(ANSWER)
        assert first == answer("why <b>is</b> it")
        assert page.js("document.querySelector('.turn.user .text').textContent") == "why <b>is</b> it"
        ask(page, "and then")
        page.wait_for(f"document.querySelectorAll('.turn').length === 4 && ({NOTE})?.includes('12 tokens')")
        second = page.js(ANSWER)
        assert second == answer("why <b>is</b> it", first, "and then")
        page.js("$('max_tokens').value = 400")
        # To most questions this model soon ends its answer.
        told = "why <b>is</b> it", first, "and then", second
        ask(page, next(q for q in map("a long one {}".format, range(200)) if len(done(300, *told, q).tokens) == 300))
        page.wait_for("document.querySelector('.turn.busy .text')?.textContent")
        assert page.js("$('send').textContent") == "Stop"
        page.js("$('send').click()")
        page.wait_for(f"({NOTE}) === 'stopped'")
        one.wait_until_idle()
        page.js("$('clear').click()")
        assert page.js("document.querySelectorAll('.turn').length") == 0
        ask(page, next(q for q in map("long {}".format, range(400)) if len(done(300, q).tokens) == 300))
        page.wait_for("document.querySelector('.turn.busy .text')?.textContent")
        page.js("$('clear').click(); $('max_tokens').value = 12")
        ask(page, told[0])
        page.wait_for(f"({NOTE})?.includes('12 tokens')")
        assert page.js(ANSWER) == first and page.js("messages.length") == 2, "nothing of what was left is told"


@needs_browser
def test_without_a_template_the_page_continues_texts_and_it_asks_for_a_key(tmp_path):
    model = chat_model()
    model.resize_token_embeddings(256)
    with (
        Served(model, ByteCodec(), {"api_key": "secret"}, max_batch_size=2) as one,
        Browser(tmp_path, one.url) as page,
    ):
        page.wait_for("document.getElementById('state')?.textContent === 'needs an API key'")
        page.js("$('key').value = 'secret'; $('key').dispatchEvent(new Event('change'))")
        page.wait_for("document.getElementById('state').textContent === 'ready'")
        assert "no chat template" in page.js("document.body.innerText")
        page.js("$('temperature').value = 0; $('top_p').value = 1; $('max_tokens').value = 5")
        ask(page, "def")
        page.wait_for(f"({NOTE})?.includes('5 tokens')")
        (expected,) = Served.engine_of(model, ByteCodec()).generate(["def"], max_new_tokens=5)
        assert page.js(ANSWER) == expected.text
        page.js("$('top_p').value = 7")
        ask(page, "def")
        assert "top_p" in page.wait_for("document.querySelector('.turn.error .text')?.textContent")
