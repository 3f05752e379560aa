"""The page at `/`, in a browser without a window."""

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
        self._told = []
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Log.enable")
        self.call("Runtime.enable")

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
        while (answer := self._next()).get("id") != self._number:
            self._told.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        while b"\0" not in self._left:
            self._left += os.read(self._in[0], 65536)
        line, _, self._left = self._left.partition(b"\0")
        return json.loads(line)

    def console(self):
        """What the page has written to the console so far, errors that nothing caught among it."""
        self.js("0")
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [one for one in self._told if one.get("method") in kinds]

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

    def press(self, key, **more):
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "v": 86}[key]
        for kind in ("keyDown", "keyUp"):
            event = {"type": kind, "key": key, "windowsVirtualKeyCode": code, "text": "\r" * (key == "Enter")}
            self.call("Input.dispatchKeyEvent", **event, **more)

    def click(self, element):
        """Clicks with the mouse into the middle of what an expression finds."""
        box = self.js(
            f"(({element}).scrollIntoView({{block: 'nearest'}}), ({element}).getBoundingClientRect().toJSON())"
        )
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **at)

    def size(self, width, height=640):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def is_ready(self):
        return self.wait_for("document.getElementById('state')?.textContent === 'ready'")

    def reload(self):
        self.call("Page.enable")
        before = len(self._told)
        self.call("Page.reload")
        # Asking the page meanwhile would fail: the one that is asked goes away.
        while not any(one.get("method") == "Page.loadEventFired" for one in self._told[before:]):
            self._told.append(self._next())
        self.call("Page.disable")
        self.is_ready()


ANSWER = "document.querySelector('.turn.assistant:last-child:not(.busy) .text')?.textContent"
NOTE = "document.querySelector('.turn.assistant:last-child .note')?.firstChild?.data"
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
    page.press("Enter")


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
        page.is_ready()
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


def settings(page, **values):
    for field, value in values.items():
        page.js(f"$('{field}').value = {json.dumps(value)}")


def keep(page, stored):
    """Puts a text where the page keeps the conversation with this model."""
    page.js(f"localStorage.setItem(place(), {json.dumps(stored)})")


def told(*texts):
    """A conversation as the page keeps it."""
    roles = [("user", "assistant")[number % 2] for number in range(len(texts))]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    return json.dumps({"messages": messages, "settings": {"temperature": "0", "top_p": "", "max_tokens": "12"}})


FOCUS = "document.activeElement.id"
OPEN = "document.querySelector(':popover-open') !== null"


@pytest.fixture(scope="module")
def chat():
    with Served(chat_model(), tokenizer(), max_batch_size=4) as one:
        yield one


@pytest.fixture
def page(chat, tmp_path):
    """The page of a chat model, as someone sees it who comes for the first time."""
    with Browser(tmp_path, chat.url) as page:
        page.is_ready()
        yield page
    chat.wait_until_idle()


@needs_browser
def test_a_conversation_survives_a_reload_also_one_amid_an_answer_until_a_new_one_begins(page):
    settings(page, temperature="0", top_p="1", max_tokens="12")
    ask(page, "why is it")
    page.wait_for(f"({NOTE})?.includes('12 tokens')")
    shown = page.js("log.innerText")
    page.reload()
    assert page.js("log.innerText") == shown and page.js("$('max_tokens').value") == "12"
    assert page.js(FOCUS) == "input"
    settings(page, temperature="5", max_tokens="400")
    ask(page, "a long one")
    page.wait_for("document.querySelector('.turn.busy .text')?.textContent")
    page.reload()
    assert page.js("document.querySelectorAll('.turn').length") == 4
    assert page.js(ANSWER) and page.js(NOTE) == "stopped"
    page.click("$('clear')")
    assert page.js(FOCUS) == "input"
    page.reload()
    assert page.js("messages.length") == 0 and "Ask something" in page.js("log.innerText")
    assert not page.console()


@needs_browser
@pytest.mark.parametrize(
    "stored",
    [
        *("{", "null", '{"messages": [null, 1]}', told("asked", 3)),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("7", '{"messages": 3}', told("asked"))),
    ],
)
def test_what_the_browser_keeps_may_be_wrong(page, stored):
    keep(page, stored)
    page.reload()
    assert page.js("messages.length") == 0
    settings(page, max_tokens="3")
    ask(page, "why is it")
    page.wait_for(f"({NOTE})?.includes('3 tokens')")
    assert not page.console()


@needs_browser
def test_a_page_that_may_keep_nothing_answers(chat, tmp_path):
    with Browser(tmp_path, "about:blank") as page:
        page.call("Page.enable")
        denied = "{get() { throw new DOMException('denied', 'SecurityError') }}"
        for kind in ("localStorage", "sessionStorage"):
            page.call(
                "Page.addScriptToEvaluateOnNewDocument", source=f"Object.defineProperty(window, '{kind}', {denied})"
            )
        page.call("Page.navigate", url=chat.url)
        page.is_ready()
        settings(page, max_tokens="3")
        ask(page, "why is it")
        page.wait_for(f"({NOTE})?.includes('3 tokens')")
        assert not page.console()


@needs_browser
def test_keys_and_focus(page):
    assert page.js(FOCUS) == "input"
    page.type("one")
    page.press("Enter", modifiers=8)  # Shift
    page.type("two")
    assert page.js("input.value") == "one\ntwo" and page.js("messages.length") == 0
    assert page.js("input.clientHeight") > 60, "it grows with its lines"
    settings(page, temperature="5", max_tokens="400")
    page.press("Enter")
    page.wait_for("document.querySelector('.turn.busy .text')?.textContent")
    assert page.js("document.querySelector('.busy').ariaBusy") == "true"
    page.click("document.querySelector('[popovertarget]')")
    assert page.js(OPEN) and page.js(FOCUS) == "temperature"
    page.press("Escape")
    page.wait_for(f"!({OPEN}) && {FOCUS} === 'input'")
    assert page.js("running !== null"), "the panel alone was closed"
    page.press("Escape")
    page.wait_for(f"({NOTE})?.includes('stopped')")
    assert page.js(FOCUS) == "input" and page.js("document.querySelector('.assistant').ariaBusy") == "false"
    for way in (
        lambda: page.click("panel.querySelector('button')"),
        lambda: page.click("log"),
        lambda: page.press("Enter"),
    ):
        page.click("document.querySelector('[popovertarget]')")
        assert page.js(OPEN)
        way()
        page.wait_for(f"!({OPEN}) && {FOCUS} === 'input'")
    assert not page.console()


@needs_browser
def test_a_screen_reader_has_a_name_for_all_that_takes_the_focus(page):
    keep(page, told("why", "```\nx\n```").replace('"}]', '", "note": "gone", "state": "error"}]'))
    page.reload()
    page.js("panel.showPopover()")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = {}
    for node in nodes:
        named.setdefault(node.get("role", {}).get("value"), []).append(node.get("name", {}).get("value"))
    for role in ("button", "textbox", "spinbutton", "log", "article"):
        assert named.get(role) and all(named[role]), (role, named.get(role))
    assert (
        "Settings" in named["form"]
        and named["article"] == ["You", "Model"]
        and {"Copy", "Retry", "Send"} <= {*named["button"]}
    )


@needs_browser
def test_code_is_set_apart_and_can_be_copied(page):
    said = "Use `f(x)`:\n```python\ndef f(x):\n    return `x` < 3\n```\n<b>and</b> then\n  ```\nmore\n```` ```x` "
    keep(page, told("`why`", said))
    page.reload()
    kinds = "[...document.querySelectorAll('.assistant .text > *')].map(one => one.className || one.tagName)"
    assert page.js(kinds) == ["SPAN", "fence", "SPAN", "fence", "SPAN"]
    assert page.js("document.querySelector('.user code').textContent") == "why"
    assert page.js("document.querySelector('.assistant span code').textContent") == "f(x)"
    code = "def f(x):\n    return `x` < 3"
    assert page.js("document.querySelector('.fence code').textContent") == code
    assert "mono" in page.js("getComputedStyle(document.querySelector('.fence code')).fontFamily").lower()
    assert page.js("document.querySelectorAll('.assistant b').length") == 0
    page.click("document.querySelector('.fence button')")
    assert page.js("document.querySelector('.fence button').textContent") == "Copied"
    page.js("input.focus()")
    page.press("v", commands=["paste"])
    assert page.js("input.value") == code
    page.js(f"all = {json.dumps(said)}; grown = document.createElement('div')")
    grows = """[...all].findIndex((_, i) => {
        const fresh = document.createElement('div');
        show(grown, all.slice(0, i + 1));
        show(fresh, all.slice(0, i + 1));
        return grown.innerHTML !== fresh.innerHTML;
    })"""
    assert page.js(grows) == -1, "a text that comes in pieces is shown like one that is there at once"
    assert not page.console()


@needs_browser
def test_errors_are_told_in_words_and_can_be_tried_again(page):
    settings(page, temperature="0", top_p="7", max_tokens="5")
    ask(page, "why is it")
    assert "top_p" in page.wait_for("document.querySelector('.turn.error .note')?.textContent")
    settings(page, top_p="")
    page.click("document.querySelector('.note button')")
    page.wait_for(f"({NOTE})?.includes('5 tokens')")
    expected = page.js(ANSWER)
    assert page.js("document.querySelectorAll('.turn').length") == 2 and page.js(FOCUS) == "input"

    page.click("$('clear')")
    assert page.call("Network.enable") == {}
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", offline=True, **offline)
    ask(page, "why is it")
    assert "cannot be reached" in page.wait_for("document.querySelector('.turn.error .note')?.textContent")
    page.wait_for("$('state').textContent.includes('cannot be reached')")
    page.call("Network.emulateNetworkConditions", offline=False, **offline)
    page.is_ready()
    page.click("document.querySelector('.note button')")
    page.wait_for(f"({NOTE})?.includes('5 tokens')")
    assert page.js(ANSWER) == expected and page.js("messages.length") == 2

    page.js("$('key').value = 'ключ'")  # which no header can hold
    ask(page, "and this")
    assert "ISO-8859-1" in page.wait_for("document.querySelector('.turn.error .note')?.textContent")
    page.js("$('key').value = ''")
    page.click("document.querySelector('.note button')")
    page.wait_for(f"document.querySelector('.turn.error') === null && ({NOTE})?.includes('tokens')")
    page.click("$('clear')")
    ask(page, "why is it")
    page.wait_for(f"({NOTE})?.includes('5 tokens')")

    # What was not answered is shown, and left out of what the model is told.
    settings(page, top_p="7")
    ask(page, "and this")
    page.wait_for("document.querySelector('.turn.error') !== null")
    settings(page, top_p="")
    page.js("sent = []; before = fetch; fetch = (path, more) => (sent.push(more), before(path, more))")
    ask(page, "or that")
    page.wait_for(f"document.querySelectorAll('.turn').length === 6 && ({NOTE})?.includes('tokens')")
    sent = page.js("JSON.parse(sent[0].body).messages.map(one => one.content)")
    assert sent == ["why is it", expected, "or that"]

    # An answer that ends before it said so.
    cut = """'data: {"choices": [{"delta": {"content": "half"}, "finish_reason": null}]}\\n\\n'"""
    for body, status, words in ((cut, 200, "broke off"), ("'<html>'", 502, "the server answers 502")):
        page.js(f"fetch = async () => new Response({body}, {{status: {status}}})")
        ask(page, "why is it")
        page.wait_for(f"({NOTE})?.includes('{words}')")


@needs_browser
def test_an_answer_is_followed_unless_one_reads_further_up(page):
    keep(page, told("why", "a\n" * 60))
    page.reload()
    ends = "pane.scrollHeight - pane.scrollTop - pane.clientHeight < 80"
    assert page.js(ends)
    piece = '{"choices": [{"delta": {"content": "more\\n"}, "finish_reason": null}]}'
    page.js(f"""
        pieces = new ReadableStream({{start(to) {{ stream = to; }}}});
        fetch = async () => new Response(pieces.pipeThrough(new TextEncoderStream()));
        one = 'data: ' + {json.dumps(piece)} + '\\n\\n';
        more = (times) => {{ for (let i = 0; i < times; i++) stream.enqueue(one); }};
    """)
    ask(page, "and then")
    page.js("more(50)")
    page.wait_for("messages.at(-1).content.length === 250")
    assert page.js(ends)
    page.js("pane.scrollTop = 200")
    page.js('more(50); stream.enqueue(\'data: {"choices": [], "usage": {"completion_tokens": 100}}\\n\\n\')')
    page.js("stream.enqueue('data: [DONE]\\n\\n')")
    page.wait_for(f"({NOTE})?.includes('100 tokens')")
    assert page.js("pane.scrollTop") == 200
    page.type("and I")
    page.js("stream = null")
    page.press("Enter")
    assert page.js(ends), "what one has sent oneself is shown"


@needs_browser
@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_is_cut_off(page, width):
    keep(page, told("w" * 300, "`" + "i" * 300 + "`\n```\n" + "c" * 300 + "\n```"))
    page.size(width)
    page.reload()
    page.js("panel.showPopover(); $('name').textContent = 'Some-Model-of-70B-Instruct'")
    assert page.js("document.documentElement.scrollWidth") <= width
    out = """[...document.querySelectorAll('button, input, textarea, .text, .note, #panel')].filter((one) => {
        const box = one.getBoundingClientRect();
        return box.left < 0 || box.right > innerWidth;
    }).map((one) => one.outerHTML)"""
    assert page.js(out) == []


@needs_browser
def test_without_a_template_one_text_goes_on_and_the_page_asks_for_a_key(tmp_path):
    model, same = chat_model(), chat_model()
    for one in (model, same):
        one.resize_token_embeddings(256)
    engine = Served.engine_of(same, ByteCodec(), graphs=False)

    def goes_on(prompt):
        return prompt + engine.generate([prompt], max_new_tokens=5)[0].text

    with (
        Served(model, ByteCodec(), {"api_key": "secret"}, max_batch_size=2) as one,
        Browser(tmp_path, one.url) as page,
    ):
        page.wait_for("document.getElementById('state')?.textContent === 'needs an API key'")
        page.wait_for(f"{FOCUS} === 'key'")
        page.type("secret")
        page.press("Enter")
        page.is_ready()
        page.wait_for(f"!({OPEN}) && {FOCUS} === 'input'")
        assert "no chat template" in page.js("document.body.innerText")
        page.press("Enter")
        assert page.js("messages.length") == 0, "there is nothing to go on from"
        settings(page, temperature="0", top_p="1", max_tokens="5")
        whole = "[...document.querySelectorAll('.text')].map(one => one.textContent).join('')"

        def after(count):
            page.wait_for(f"messages.length === {count} && !running && ({NOTE})?.includes('5 tokens')")
            return page.js(whole)

        ask(page, "def")
        text = goes_on("def")
        assert after(2) == text
        assert page.js("$('send').textContent") == "Go on"
        page.press("Enter")
        text = goes_on(text)
        assert after(4) == text, "nothing is added, and the text goes on"
        ask(page, " `x`")
        text = goes_on(text + " `x`")
        assert after(6) == text
        assert page.js("document.querySelectorAll('code').length") == 0
        page.reload()
        assert page.js(whole) == text, "the key, too, is there after a reload"
        page.js("$('top_p').value = 7")
        page.press("Enter")
        assert "top_p" in page.wait_for("document.querySelector('.turn.error .note')?.textContent")
        assert page.js(whole) == text
