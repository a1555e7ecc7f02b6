"""What the document says of the run itself, and of how each system was set."""

import pytest

from benchmarks.__main__ import command_line, main, not_asked
from benchmarks.systems.castline import serving
from benchmarks.systems.catalogue import DEFAULT_PEERS, NAMES, systems_of_peers
from benchmarks.systems.llamacpp import KV_TEXT, SLOT_TOKENS, SLOTS
from castline.runtime.load_options import LoadOptions
from castline.runtime.stream_interval import AdaptiveInterval
from castline.server.options import ServerOptions


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "python -m benchmarks"),
        (["--rounds", "3"], "python -m benchmarks --rounds 3"),
        (["--rounds=2", "--repeat-all", "--docs", "/some/place"], "python -m benchmarks --rounds 2 --repeat-all"),
        (["--work", "/some/place", "--peers", "openvino, vllm"], "python -m benchmarks --peers 'openvino, vllm'"),
    ],
)
def test_command_line_is_what_was_given(given: list[str], said: str) -> None:
    """It repeats the run elsewhere: all that figures depend on, as it can be pasted, and no folder of this machine."""
    assert command_line(main.make_context("benchmarks", given)) == said


def test_all_others_of_the_catalogue_are_named() -> None:
    """Those that the default run has are told from those that nobody runs unless asked."""
    reasons = {report.name: report.unavailable for report in not_asked(("castline", "openvino-int8"))}
    assert reasons.keys() == set(NAMES) - {"castline", "openvino-int8"}
    assert reasons["llama.cpp-q4_1"] == "not asked for, though the default run has it"
    assert reasons["llama.cpp-q8_0"] == "not asked for"
    assert {report.unavailable for report in not_asked(systems_of_peers(DEFAULT_PEERS))} == {"not asked for"}


def test_castline_names_what_its_figures_follow_from() -> None:
    """Message counts and gaps are those of an interval that the server chooses; guesses and huge pages count, too."""
    off, on = serving("off"), serving("auto")
    assert off["speculation"] == "off"
    assert on["speculation"].startswith("on (auto")
    assert (
        "a token a message until serving more than 4 requests takes 4 % of the CPU time, then up to 8"
        in (off["stream interval"])
    )
    assert off["huge pages"].startswith("auto")


def test_castline_is_served_with_the_defaults_it_names() -> None:
    """The adapter gives neither option: another default would make the words untrue."""
    assert ServerOptions().stream_interval is None
    assert AdaptiveInterval(1).tokens == 1
    assert LoadOptions().huge_pages == "auto"


def test_llamacpp_names_its_resident_pool() -> None:
    """Its memory is mostly a pool that this benchmark asked for: a reader must be sent to the figure without it."""
    assert f"{SLOTS * SLOT_TOKENS:,} cells are reserved at the start and resident" in KV_TEXT
    assert f"{SLOTS} slots of {SLOT_TOKENS:,} tokens" in KV_TEXT
    assert "W8's “less the KV pool”" in KV_TEXT
