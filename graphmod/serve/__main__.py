"""The process of a front, which `FrontProcess` starts with the numbers of its sockets."""

import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path


def main(numbers: list[str]) -> None:
    """Answers until the other process has ended."""
    if len(numbers) != 3:
        sys.exit("error: this is a part of graphmod serve, which starts it")
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C goes to both, and the other one sees to it
        signal.signal(number, signal.SIG_IGN)
    # Tokenizers need no PyTorch, which takes seconds and hundreds of megabytes. transformers does without what it does
    # not find, but says so.
    sys.modules["torch"] = None  # pyrefly: ignore[unsupported-operation] Python's way to say that there is none
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

    from graphmod.serve.app import Front
    from graphmod.serve.settings import ServeSettings
    from graphmod.text import Codec, codec_for

    work, control, listening = (socket.socket(fileno=int(number)) for number in numbers)
    given = json.load(sys.stdin.buffer)

    def load() -> Codec:
        codec = codec_for(Path(given["folder"]), given["tokenizer"])
        gc.collect()
        gc.freeze()  # to look through all of it takes the collector a tenth of a second each time
        return codec

    front = Front(ServeSettings(**given["settings"]), given["name"], load, listening, work, control)
    front.start()
    front.join()
    sys.stderr.flush()
    os._exit(0)  # a thread may still be at work for a client that is gone


if __name__ == "__main__":
    main(sys.argv[1:])
