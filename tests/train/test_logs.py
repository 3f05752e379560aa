"""The log of a run says what is news, on lines of its own."""

import io
import logging
import sys

import pytest
from tqdm import tqdm

from graphmod.train.display import beside_bar
from graphmod.train.run import train

log = logging.getLogger("graphmod")


@pytest.mark.parametrize("lengths", [True, False])
def test_expected_messages_are_left_out_and_the_others_are_not(caplog, lengths):
    with beside_bar(lengths):
        log.warning("'a' is called with other inputs:\n  x")
        log.warning("'a' runs eagerly, because forward could not be captured: x")
    said = [] if lengths else ["'a' is called with other inputs:\n  x"]
    assert caplog.messages == [*said, "'a' runs eagerly, because forward could not be captured: x"]
    log.warning("'a' is called with other inputs")
    assert len(caplog.messages) == len(said) + 2, "the filter outlived the bar"


def test_lines_are_not_glued_to_the_bar(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    handler = logging.StreamHandler(shown)
    logging.root.addHandler(handler)
    try:
        with tqdm(total=3, file=shown, mininterval=0), beside_bar(False):
            log.warning("a message")
    finally:
        logging.root.removeHandler(handler)
    assert "a message" in shown.getvalue().replace("\r", "\n").split("\n")


def test_a_run_with_buckets_is_not_warned_about_its_lengths(tiny, text, tmp_path, caplog):
    settings = ["data=text", f"data.path={text}", "data.documents=line", "data.buckets=[8,16,48]"]
    train(tiny(*settings, "train.steps=20", "graph=per_layer"), tmp_path / "run")
    assert {message.split(":")[0] for message in caplog.messages} <= {"graphs are emulated on the CPU"}
