"""The document: every figure that was measured, and words where none was."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.bandwidth import LARGE_BYTES, SMALL_BYTES, Bandwidth
from benchmarks.comparison import METRICS, Spread
from benchmarks.document import document
from benchmarks.picture import figure_of
from benchmarks.quality import Quality
from benchmarks.results import Results, Sample, read_results, write_results
from benchmarks.wording import number, over_rounds, spread_text

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
            ("W4", "castline", "gap_alone_ratio"): [8.0, 9.0, 12.0],
            ("X1@64", "castline", "output_tok_s"): [1000.0],
            ("X1@256", "castline", "output_tok_s"): [900.0],
            ("X3 HTTP", "castline", "serving_percent"): [3.0, 4.0],
            ("X3 gRPC", "castline", "serving_percent"): [6.0],
            ("X5@1 greedy", "castline", "outside_percent"): [4.5, 4.9],
            ("X5@32 greedy", "castline", "outside_percent"): [3.1],
            ("X5@32 sampled", "castline", "outside_percent"): [2.5],
        },
    )


def read_beside(results: Results, rates: list[tuple[float, float]]) -> None:
    """GB/s of the small and of the large buffer, beside each round's W1 of castline."""
    for index, sample in enumerate(results.samples):
        if (sample.system, sample.cell) == ("castline", "W1"):
            small, large = rates[sample.round]
            measured = (Bandwidth(2, SMALL_BYTES, small), Bandwidth(2, LARGE_BYTES, large))
            results.samples[index] = replace(sample, bandwidths=measured)


def test_ratio_to_both_peers(results: Results) -> None:
    """The best peer, and beside it the best of equal quality, which is what must hold."""
    row = next(line for line in document(results).splitlines() if line.startswith("| W1 decode"))
    assert "coarse's label (KL 0.2000): 250 (250…250)" in row
    assert "**1.20**" in row
    assert "fine's label (KL 0.0060): 150 (1 round)" in row
    assert row.endswith("| **2.00** | ≥ 1.5 | held |")


def test_no_peer_is_said(results: Results) -> None:
    """A target without a rival is neither held nor missed."""
    row = next(line for line in document(results).splitlines() if line.startswith("| W3@8 output"))
    assert row.endswith("| – | – | – | – | ≥ 2 | – |")


def test_own_targets(results: Results) -> None:
    """The queue's cost against its limit; the worst gap against both medians, of which the limit is set for one."""
    text = document(results)
    assert "| castline alone (KL 0.0060, perplexity 14.00) |  | must be |  |" in text
    assert "throughput lost (1,000 → 900 tok/s) | 10.0% | ≤ 5% | short |" in text
    assert "is computed ÷ the median gap meanwhile | 2.5 (2…2.6) | ≤ 3 | held |" in text
    assert "is computed ÷ the median gap before and after | 9 (8…12) | – | shown, not judged |" in text
    assert "over HTTP: CPU time of the serving process ÷ the engine's, % | 3.5 (3…4, 2 rounds) | ≤ 5 | held |" in text
    assert (
        "| greedy, 1 at a time: time of the engine outside the executor, % | 4.7 (4.5…4.9, 2 rounds) | ≤ 5 | held"
        in text
    )
    assert "| greedy, 32 at a time: time of the engine outside the executor, % | 3.1 (1 round) | ≤ 3 | short |" in text
    assert "| sampled, 32 at a time: time of the engine outside the executor, % | 2.5 (1 round) | ≤ 3 | held |" in text
    assert "sampled, 1 at a time" not in text
    assert "over gRPC: CPU time of the serving process ÷ the engine's, % | 6 (1 round) | ≤ 5 | short |" in text


def test_each_round_has_its_own_roof(results: Results) -> None:
    """Prevents a median over rounds from being divided by one reading of another minute: 300 tok/s read 30 GB/s."""
    read_beside(results, [(100.0, 29.0), (200.0, 40.0), (100.0, 62.0)])
    text = document(results)
    assert "reading memory right before and after it allows (29.0…62.0 GB/s) | 75% (50%…100%) | ≥ 80% | short |" in text
    assert "may hold right before and after it allows (100.0…200.0 GB/s) | 29% (15%…31%) | ≥ 80% | short |" in text


def test_a_share_without_its_roof_is_not_made_up(results: Results) -> None:
    """The reading from before the rounds must not stand in for those beside them."""
    row = "reading memory right before and after it allows: not measured | – | ≥ 80% | – |"
    assert row in document(results)
    assert "- read bandwidth before the rounds, a buffer of 1,536 MiB, 2 threads: 20.0 GB/s" in document(results)


def test_absence_is_reported_in_words(results: Results) -> None:
    """A system that was left out, or failed in one cell, is in the document with its reason, not missing from it."""
    results.systems[3].unavailable = "pip install failed: no wheel"
    results.samples.append(Sample(0, "fine", "W3@8", {}, 0.0, failure="not done within 150 s"))
    text = document(results)
    assert "- openvino-int8's label: pip install failed: no wheel\n" in text
    assert "| fine's label (KL 0.0060, perplexity 14.00) | not done within 150 s |" in text


def test_what_was_not_run_is_named(results: Results) -> None:
    """A reader must see which rivals a run was spared, and be able to repeat it."""
    results.command = "python -m benchmarks --systems castline,fine"
    for report in results.systems[1:3]:
        report.unavailable = "not asked for"
    text = document(results)
    assert "by `python -m benchmarks --systems castline,fine` in" in text
    assert "Known to the benchmark and not run:\n\n- coarse's label; fine's label: not asked for\n" in text
    assert "**coarse's label**" not in text


def test_a_rival_without_logits_is_named_with_its_perplexity(results: Results) -> None:
    """Prevents "KL not measured" in the column of equal quality, without a word on what it is judged by."""
    results.system("fine").quality = Quality(perplexity=14.0)
    row = next(line for line in document(results).splitlines() if line.startswith("| W1 decode"))
    assert "fine's label (KL not measured, perplexity 14.00): 150" in row


def test_quality_stands_beside_every_speed(results: Results) -> None:
    """In each table with figures; a system without logits is not passed over in silence."""
    results.samples.append(Sample(0, "openvino-int8", "W1", {"decode_tok_s": 50.0}, 1.0))
    text = document(results)
    assert "|  | castline's label (KL 0.0060, perplexity 14.00) | best peer |" in text
    cells = text[text.index("## Every figure") : text.index("## Machine")]
    labels = [line.split(" | ")[0] for line in cells.splitlines() if line.startswith("| ") and "label" in line]
    assert "| openvino-int8's label (KL not measured, perplexity 14.00)" in labels
    assert len(labels) > len(results.cells)
    assert all("(KL " in label for label in labels)


def test_guessing_ahead_is_never_the_best(make_results: MakeResults) -> None:
    """Its rows stand beside, as they are asked for, and bold is for the fastest of those that do not guess."""
    figures = {
        ("W1", name, "decode_tok_s"): [rate] * 3
        for name, rate in (("castline", 300.0), ("castline-speculation", 600.0), ("peer", 250.0))
    }
    results = make_results({"castline": 0.006, "castline-speculation": 0.006, "peer": 0.006}, figures)
    text = document(results)
    assert "| castline's label (KL 0.0060, perplexity 14.00) | **300 (300…300)** |" in text
    assert "| castline-speculation's label (KL 0.0060, perplexity 14.00) | 600 (600…600) |" in text
    assert "All figures above are without it" not in text
    assert "it is on only in the rows of “castline-speculation's label”" in text
    assert "|  | castline's label (KL 0.0060) | castline-speculation's label (KL 0.0060) | ratio |" in text


def test_no_guessing_no_section(results: Results) -> None:
    """A run that did not take the variant says nothing of it, though it names it among what was not run."""
    assert "## Guessing ahead" not in document(results)


def test_gaps_name_their_denominators() -> None:
    """A ratio to "its median" reads as whichever median the reader thinks of."""
    labels = {metric.key: metric.label for metric in METRICS["W4"]}
    assert labels["gap_ratio"].endswith("median gap meanwhile")
    assert labels["gap_alone_ratio"].endswith("median gap before and after")
    assert "between messages" in labels["gap_max_ms"]


@pytest.mark.parametrize(
    ("rounds", "words"), [(1, "of 1 round"), (2, "the mean of 2 rounds"), (3, "the median of 3 rounds")]
)
def test_two_rounds_have_no_median(results: Results, rounds: int, words: str) -> None:
    """What is halfway between two figures must not be called the middle one of many."""
    results.rounds = rounds
    assert over_rounds(rounds).startswith(words)
    assert f"Each figure is {words}" in document(results)


def test_machine_in_plain_words(results: Results) -> None:
    """What makes a processor fast here, and whether huge pages are to be had, without knowing the names of flags."""
    assert "- has no matrix units (AMX), 8-bit dot products (VNNI), bf16" in document(results)
    assert "huge pages:" not in document(results)
    features = ("avx2", "amx_int8", "avx_vnni")
    results.machine = replace(results.machine, features=features, huge_pages="madvise")
    text = document(results)
    assert "- has matrix units (AMX), 8-bit dot products (VNNI); has no bf16 dot products (AVX512_BF16), half" in text
    assert "- transparent huge pages: madvise, for those who ask" in text


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
    results.command = "python -m benchmarks"
    read_beside(results, [(100.0, 30.0)] * 3)
    write_results(tmp_path / "performance.json", results)
    assert document(read_results(tmp_path / "performance.json")) == document(results)


def test_the_former_schema_is_read(results: Results, tmp_path: Path) -> None:
    """The committed document can be made again, and says what it does not know."""
    path = tmp_path / "performance.json"
    write_results(path, results)
    former = msgspec.json.decode(path.read_bytes())
    del former["command"], former["machine"]["huge_pages"]
    for sample in former["samples"]:
        del sample["bandwidths"]
    path.write_bytes(msgspec.json.encode({**former, "schema_version": 1}))
    assert "`python -m benchmarks`, its options are not known," in document(read_results(path))


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
    legend = [text for axis in figure.axes for text in axis.texts if "(KL " in text.get_text()]
    assert len(legend) >= 2
    for text in legend:
        assert text.get_window_extent().x1 < figure.bbox.x1, text.get_text()
