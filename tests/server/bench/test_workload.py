"""Prompts, their calibration, data sets and arrival times."""

from itertools import islice
from pathlib import Path
from random import Random
from statistics import mean, pstdev

import pytest

from castline.server.bench.dataset import Row, read_dataset
from castline.server.bench.errors import BenchError
from castline.server.bench.prompts import WORDS, Calibration, calibrate
from castline.server.bench.schedule import schedule
from castline.server.bench.settings import Point, Settings
from castline.server.bench.workload import Workload


def test_calibration_inverts_the_server() -> None:
    """A tokenizer with 1.5 tokens a word and 20 tokens of chat template: the length asked for is the length counted."""
    calibration = calibrate((16, 44), (128, 212))
    assert calibration == Calibration(1.5, 20.0, measured=True)
    assert calibration.words_for(170) == 100
    assert calibration.words_in(150) == 100
    assert calibration.words_for(5) == 1, "a prompt shorter than the template still has a word"


def test_calibration_of_a_server_that_counts_nothing() -> None:
    """Equal counts make no line; dividing by the slope would crash or ask for endless prompts."""
    assert calibrate((16, 7), (128, 7)) == Calibration()


def test_words_are_distinct() -> None:
    """A word listed twice would be drawn twice as often."""
    assert len(set(WORDS)) == len(WORDS) > 400


def test_same_seed_same_requests() -> None:
    """Two servers are compared on the same prompts, lengths included."""
    settings = Settings(prompt_tokens=20, prompt_spread=10, output_tokens=8, output_spread=7, seed=3)
    one, two = (Workload(settings, Calibration()).requests("concurrency 4") for _ in range(2))
    requests = list(islice(one, 50))
    assert requests == list(islice(two, 50))
    lengths = [len(request.prompt.split()) for request in requests]
    assert (min(lengths) >= 10, max(lengths) <= 30, len(set(lengths)) > 5) == (True, True, True)
    assert {request.max_tokens for request in requests} <= set(range(1, 16))


def test_points_share_no_prompt() -> None:
    """A point that repeats another's prompts measures the prefix cache."""
    workload = Workload(Settings(prompt_tokens=12), Calibration())
    seen = [{request.prompt for request in islice(workload.requests(name), 50)} for name in ("a", "b", "warmup")]
    assert len(set.union(*seen)) == 150


def test_shared_prefix() -> None:
    """Every prompt of every point begins with one text of the length asked, and goes on with its own."""
    workload = Workload(Settings(prompt_tokens=16, shared_prefix_tokens=40), Calibration(2.0, 4.0, measured=True))
    prompts = [r.prompt.split() for name in ("a", "b") for r in islice(workload.requests(name), 20)]
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 40
    assert {len(prompt) for prompt in prompts} == {20 + 6}


def test_dataset_rows_cycle_in_order(tmp_path: Path) -> None:
    """More requests than rows read the file again; a row's own max_tokens wins."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "a", "extra": 1}\n\n{"messages": [{"role": "user", "content": "b"}], "max_tokens": 3}\n'
    )
    rows = read_dataset(path, "chat")
    assert rows == [Row("a"), Row(None, ({"role": "user", "content": "b"},), 3)]
    requests = list(islice(Workload(Settings(output_tokens=9), Calibration(), rows).requests("x"), 3))
    assert [(r.prompt, len(r.messages), r.max_tokens) for r in requests] == [("a", 0, 9), ("", 1, 3), ("a", 0, 9)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        ("{}", "either `prompt` or `messages`"),
        ('{"prompt": "a", "messages": [{}]}', "either"),
        ('{"prompt": ""}', "empty"),
        ('{"prompt": 3}', "Expected `str"),
        ('{"prompt": "a", "max_tokens": 0}', "at least 1"),
        ('{"messages": [{"role": "user"}]}', "--endpoint chat"),
    ],
)
def test_dataset_errors_name_the_line(tmp_path: Path, line: str, says: str) -> None:
    """A bad row is found before the run, with its line number."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(BenchError, match="line 2") as caught:
        read_dataset(path, "completions")
    assert says in str(caught.value)


def test_empty_dataset(tmp_path: Path) -> None:
    """No rows is an error, not an endless wait for the first."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n")
    with pytest.raises(BenchError, match="no rows"):
        read_dataset(path, "chat")


def test_poisson_arrivals() -> None:
    """Gaps of a Poisson process have the mean asked for and a deviation equal to it; times never go back."""
    times = schedule(5.0, 1.0, Random(1), num_requests=4000, duration_s=None)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert min(gaps) >= 0
    assert mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert pstdev(gaps) == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize(("burstiness", "deviation"), [(0.25, 0.4), (4.0, 0.1), (100.0, 0.02)])
def test_burstiness(burstiness: float, deviation: float) -> None:
    """The deviation of gamma gaps is mean / sqrt(shape): the option changes how uneven arrivals are, not how many."""
    times = schedule(5.0, burstiness, Random(1), num_requests=4000, duration_s=None)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert pstdev(gaps) == pytest.approx(deviation, rel=0.1)


def test_schedule_of_a_duration() -> None:
    """All arrivals before the end, and the same process as with a count."""
    timed = schedule(10.0, 1.0, Random(2), num_requests=None, duration_s=5.0)
    counted = schedule(10.0, 1.0, Random(2), num_requests=len(timed) + 1, duration_s=None)
    assert timed == counted[:-1]
    assert timed[-1] < 5.0 <= counted[-1]


def test_schedule_is_never_empty() -> None:
    """A rate too low for the duration still measures one request, rather than report a server that answered none."""
    assert len(schedule(0.01, 1.0, Random(2), num_requests=None, duration_s=0.1)) == 1


def test_points_of_a_run() -> None:
    """Defaults scale with the load; an explicit count or duration goes for every point."""
    assert [p.load for p in Settings().points()] == [1, 4, 8, 16]
    assert Settings(rates=(0.1, 4.0)).points() == [Point("open", 0.1, 16, None), Point("open", 4.0, 120, None)]
    both = Settings(concurrencies=(1, 32), rates=(2.0,), num_requests=5).points()
    assert [(p.mode, p.num_requests) for p in both] == [("closed", 5), ("closed", 5), ("open", 5)]
    assert Settings(concurrencies=(2,), duration_s=9.0).points() == [Point("closed", 2, None, 9.0)]
    assert [p.num_requests for p in Settings(concurrencies=(1, 32)).points()] == [16, 256]
