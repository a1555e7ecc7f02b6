"""The document: every figure that was measured, and words where none was."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.comparison import Spread
from benchmarks.document import document, number, spread_text
from benchmarks.picture import figure_of
from benchmarks.results import Results, Sample, read_results, write_results

MakeResults = Callable[..., Results]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def results(make_results: MakeResults) -> Results:
    return make_results(
        {"castline": 0.006, "coarse": 0.2, "fine": 0.006, "openvino-int8": None},
        {
            ("W1", "castline", "decode_tok_s"): [290.0, 300.0, 310.0],
            ("W1", "coarse", "decode_tok_s"): [250.0, 250.0, 250.0],
            ("W1", "fine", "decode_tok_s"): [150.0],
            ("W3@8", "castline", "output_tok_s"): [900.0, 950.0, 1000.0],
            ("W3@8", "castline", "ttft_ms"): [50.0, 51.0, 52.0],
            ("W4", "castline", "gap_ratio"): [2.0, 2.5, 2.6],
            ("X1@64", "castline", "output_tok_s"): [1000.0],
            ("X1@256", "castline", "output_tok_s"): [900.0],
        },
    )


def test_ratio_to_both_peers(results: Results) -> None:
    """The best peer, and beside it the best of equal quality, which is what must hold."""
    row = next(line for line in document(results).splitlines() if line.startswith("| W1 decode"))
    assert "coarse's label: 250 (250…250)" in row
    assert "**1.20**" in row
    assert "fine's label: 150 (1 round)" in row
    assert row.endswith("| **2.00** | ≥ 1.5 | held |")


def test_no_peer_is_said(results: Results) -> None:
    """A target without a rival is neither held nor missed."""
    row = next(line for line in document(results).splitlines() if line.startswith("| W3@8 output"))
    assert row.endswith("| – | – | – | – | ≥ 2 | – |")


def test_own_targets(results: Results) -> None:
    """The queue's cost, the worst gap, and the share of the bandwidth, each against its limit."""
    text = document(results)
    assert "throughput lost (1,000 → 900 tok/s) | 10.0% | ≤ 5% | short |" in text
    assert "| W4 a stream's worst gap ÷ its median gap | 2.5 (2…2.6) | ≤ 3 | held |" in text
    assert "at 20.0 GB/s allows | 150% | ≥ 80% | held |" in text  # 300 tok/s × 100 MB
    assert "at 100.0 GB/s allows | 30% | ≥ 80% | short |" in text


def test_absence_is_reported_in_words(results: Results) -> None:
    """A system that was left out, or failed in one cell, is in the document with its reason, not missing from it."""
    results.systems[3].unavailable = "pip install failed: no wheel"
    results.samples.append(Sample(0, "fine", "W3@8", {}, 0.0, failure="not done within 150 s"))
    text = document(results)
    assert "Left out: openvino-int8's label (pip install failed: no wheel)." in text
    assert "| fine's label | not done within 150 s |" in text


def test_a_failure_in_one_round_hides_no_figure(results: Results) -> None:
    """Two good rounds are figures, whatever became of the third."""
    results.samples.append(Sample(1, "fine", "W1", {}, 0.0, failure="the process ended"))
    assert results.failure("W1", "fine") is None


def test_a_busy_machine_is_named(results: Results) -> None:
    """Figures taken beside other work must not look like figures of a quiet machine."""
    assert "not quiet" not in document(results)
    results.samples.append(Sample(0, "castline", "W6", {"prompt_tok_s": 1.0}, 5.0, others_share=0.3))
    assert "others took up to 30% of its processors" in document(results)


def test_a_wrong_answer_is_marked(results: Results) -> None:
    """A fast system that says nonsense is no rival, and the reader must see it."""
    results.systems[1].answer, results.systems[1].sane = "Lyon Lyon Lyon", False
    assert "**wrong:** “Lyon Lyon Lyon”" in document(results)


def test_results_survive_the_file(results: Results, tmp_path: Path) -> None:
    """The document can be made again from the JSON alone, and is then the same."""
    write_results(tmp_path / "performance.json", results)
    assert document(read_results(tmp_path / "performance.json")) == document(results)


def test_another_schema_is_refused(results: Results, tmp_path: Path) -> None:
    results.schema_version = 99
    write_results(tmp_path / "performance.json", results)
    with pytest.raises(ValueError, match="schema 99"):
        read_results(tmp_path / "performance.json")


@pytest.mark.parametrize(
    ("value", "text"), [(0.12345, "0.123"), (9.876, "9.88"), (99.96, "100"), (1234.5, "1,234"), (0.0, "0")]
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_fewer_rounds_are_said() -> None:
    """A figure of one round beside figures of three must not look as certain."""
    assert spread_text(Spread.of([2.0]), 3) == "2 (1 round)"
    assert spread_text(Spread.of([2.0, 4.0]), 3) == "3 (2…4, 2 rounds)"
    assert spread_text(Spread.of([2.0]), 1) == "2"
    assert spread_text(None, 3) == "–"


def test_picture_draws_what_was_measured(results: Results) -> None:
    """A panel for each workload with figures, none for the others, none that crashes on a missing system."""
    titles = [axis.get_title() for axis in figure_of(results).axes]
    assert any(title.startswith("W1 one stream: decode") for title in titles)
    assert not any(title.startswith("W6") for title in titles)


def test_picture_holds_all_its_words() -> None:
    """Prevents a legend that is cut off at the edge: the quality of a system's numbers stands at its end."""
    figure = figure_of(read_results(DOCS / "performance.json"))
    figure.canvas.draw()
    legend = [text for axis in figure.axes for text in axis.texts if "mean KL" in text.get_text()]
    assert len(legend) >= 2
    for text in legend:
        assert text.get_window_extent().x1 < figure.bbox.x1, text.get_text()
