"""The report page, the inspect command, and the lines a build prints."""

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from castline.builder.parts import SHARED, bytes_by_part, part_of
from castline.builder.passes.pipeline import PassReport
from castline.builder.progress import STAGES_WITH_BARS, BuildLog, StageRecord
from castline.builder.report import ReportFacts, render_report, timing_rows
from castline.commands.inspect import command as inspect_command
from castline.engines.bundle import write_bundle
from castline.engines.errors import EngineError
from castline.engines.manifest import Host, Limits, Manifest, ModelFacts, Parity, Plugin, Precision, StepParity, Tuning

PARITY = Parity(True, 812, 0.0123, 0.8, 0.961, 12.5, 12.25, 0.02, 0.94, 0.81)
MANIFEST = Manifest(
    schema_version=1,
    castline_version="0.1.0",
    created="2026-01-01T00:00:00Z",
    rebuild_command="castline build demo --output 'my engines'",
    model=ModelFacts("tiny", "llama", "demo", 2, 64, 4, 2, 16, 256, 128, 123_000, (2,), 1, windows=(0, 64)),
    precision=Precision("int8", "int8"),
    limits=Limits(128, 32),
    host=Host("cpu", "x86_64", "a <cpu>", ("avx2",), 2),
    tuning=Tuning(
        True,
        2,
        {"64x128": "nbits8-b64-a4"},
        {"block_size": 32, "query_tile": 0},
        {
            "threads, 1": {"2": 10.0, "1": 15.0},
            "matmul 64x128, 1": {"nbits8-b128-a4": 5.0, "nbits8-b64-a4": 4.0},
            "attention block_size, decode 1 x 1024": {"16": 9.0, "32": 8.0},
        },
    ),
    parity=PARITY,
    plugin=Plugin("castline_cpu", "1", "ab" * 32),
    graph_file="model.onnx",
    tool_versions={"onnxruntime": "1.32.0"},
    files={},
)
FACTS = ReportFacts(
    stages=[StageRecord("export", "100 nodes", 1.5), StageRecord("fuse", "100 → 40 nodes", 0.1)],
    fusions=[PassReport("merge-qkv", 100, 80, 2), PassReport("fuse-norm", 80, 40, 4)],
    operators={"MatMul": (14, 0), "MatMulNBits": (0, 9)},
    sizes={"embedding": (65536, 16384), "mlp": (400_000, 110_000)},
    kl=(0.01, 0.0, 0.5),
)


class Page(HTMLParser):
    """Collects tags, ids and references, and checks that the tags nest."""

    VOID = frozenset({"meta", "br", "link", "img", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data"):
                self.references.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_wide_kernels_are_told_row_by_row() -> None:
    """The choice is a number of rows: at each size timed, the kind that the engine runs there is the chosen one."""
    times = {"narrow": 10.0, "wide": 8.0}
    tuning = Tuning(
        True, 2, {"64x128": "linear-w8-g32"}, {}, {f"wide rows 64x128, {rows}": times for rows in (8, 16, 32)},
        {"64x128": 16},
    )  # fmt: skip
    manifest = replace(MANIFEST, tuning=tuning)
    chosen = {step: [name for name, _, is_it in rows if is_it] for _, step, rows in timing_rows(manifest)}
    assert chosen == {"8": ["narrow"], "16": ["wide"], "32": ["wide"]}
    page = render_report(manifest, FACTS)
    assert "wide from 16 rows" in page
    never = replace(manifest, tuning=replace(tuning, wide_rows={"64x128": -1}))
    assert "never wide" in render_report(never, FACTS)
    assert {name for _, _, rows in timing_rows(never) for name, _, is_it in rows if is_it} == {"narrow"}


def test_both_kinds_of_step_are_shown() -> None:
    """The figures above are those of the worse kind; a reader must be able to see which, and by how much."""
    steps = {"prefill": StepParity(0.0045, 0.3, 0.9712, 12.4), "decode": StepParity(0.0123, 0.8, 0.961, 12.5)}
    page = render_report(replace(MANIFEST, parity=replace(PARITY, by_step=steps)), FACTS)
    assert "prefill steps" in page
    assert "0.0045, 97.12 %" in page


def test_page_is_self_contained() -> None:
    """A report opened years later, offline, must not want a script, a font or an image from elsewhere."""
    text = render_report(MANIFEST, FACTS)
    page = Page(text)
    assert all(reference.startswith("#") for reference in page.references)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"@import|url\((?!#)", text)


def test_plots_do_not_share_ids() -> None:
    """Two inline drawings with one id clip each other."""
    text = render_report(MANIFEST, FACTS)
    ids = Page(text).ids
    referenced = set(re.findall(r'(?:href="#|url\(#)([\w-]+)', text))
    assert referenced
    assert all(ids.count(name) == 1 for name in referenced)


def test_page_follows_the_theme() -> None:
    """Black text on a dark page cannot be read: ink is the page's own colour."""
    text = render_report(MANIFEST, FACTS)
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    assert "#010203" not in text
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 6
    assert not any(re.search(r"(fill|stroke): #(000000|ffffff)", drawing) for drawing in drawings)


def test_page_shows_the_figures_and_escapes() -> None:
    """The numbers are the manifest's, and a processor's name is no markup."""
    text = render_report(MANIFEST, FACTS)
    for figure in ("0.0123", "96.10 %", "12.500 (12.250)", "merge-qkv", "nbits8-b64-a4", "a &lt;cpu&gt;", "verified"):
        assert figure in text


def test_page_of_a_failed_parity_says_so() -> None:
    """An unverified bundle's page must not look like a good one."""
    failed = replace(MANIFEST, parity=replace(PARITY, verified=False, mean_kl=0.9))
    text = render_report(failed, FACTS)
    assert "unverified" in text
    assert ">over<" in text


def test_page_without_verification_or_tuning() -> None:
    """--no-verify --no-tune leave sections that say so, not an error."""
    plain = replace(MANIFEST, parity=None, tuning=Tuning(False, 2, {"64x128": "fp32"}, {"block_size": 32}))
    text = render_report(plain, replace(FACTS, kl=(), fusions=()))
    assert "--no-verify" in text
    assert "Documented defaults" in text
    assert len(re.findall("<svg", text)) == 2


def test_timing_rows_mark_the_choice() -> None:
    """The filled dot must be the manifest's choice, of every kind of thing tuned."""
    chosen = {(thing, candidate) for thing, _, times in timing_rows(MANIFEST) for candidate, _, is_it in times if is_it}
    assert chosen == {("threads", "2"), ("matmul 64x128", "nbits8-b64-a4"), ("attention block_size", "32")}


def test_stage_lines() -> None:
    """One line a stage with its summary and time; details only when asked for."""
    ticks = iter([10.0, 12.5])
    stream = io.StringIO()
    log = BuildLog(False, Console(file=stream, highlight=False, soft_wrap=True), clock=lambda: next(ticks))
    with log.stage("export") as stage:
        log.detail("not shown")
        stage.summary = "[100] nodes"
    assert stream.getvalue() == "export      [100] nodes  (2.5 s)\n"
    assert log.stages == [StageRecord("export", "[100] nodes", 2.5)]


def test_verbose_shows_details_and_failure_prints_no_summary() -> None:
    """A stage that raised has not done what its line would say."""
    stream = io.StringIO()
    log = BuildLog(True, Console(file=stream, highlight=False, soft_wrap=True))

    def fail() -> None:
        with log.stage("export"):
            log.detail("shown")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert stream.getvalue().strip() == "shown"
    assert not log.stages


def test_bars_are_silent_off_a_terminal() -> None:
    """A build's log in a file holds no control characters."""
    stream = io.StringIO()
    log = BuildLog(False, Console(file=stream))
    with log.bar("timing", 3) as advance:
        advance()
    assert stream.getvalue() == ""


def test_terminal_shows_spinner_and_bars() -> None:
    """rich draws one live display at a time: a bar inside a stage that spins would raise in the middle of a build."""
    stream = io.StringIO()
    log = BuildLog(True, Console(file=stream, force_terminal=True, soft_wrap=True, width=100))
    with log.stage("export") as stage:
        log.detail("a detail")
        stage.summary = "done"
    for name in STAGES_WITH_BARS:
        with log.stage(name), log.bar("steps", 2) as advance:
            advance()
            advance()
    assert "a detail" in stream.getvalue()
    assert "2/2" in stream.getvalue()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    with write_bundle(tmp_path, "tiny") as draft:
        (draft.directory / "model.onnx").write_bytes(b"a graph")
        draft.seal(MANIFEST)
    assert draft.path is not None
    return draft.path


def run_inspect(*arguments: object) -> str:
    result = CliRunner().invoke(inspect_command, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_inspect_prints_what_a_reader_asks(bundle: Path) -> None:
    """Limits, host, parity, tuning, sizes: each is there with its value."""
    text = run_inspect(bundle)
    for value in ("128 tokens a sequence", "a <cpu>", "mean 0.0123", "96.10%", "nbits8-b64-a4", "model.onnx", "avx2"):
        assert value in text
    assert "64 tokens in 1 of 2 layers" in text
    assert MANIFEST.rebuild_command in text


def test_inspect_json_is_the_manifest(bundle: Path) -> None:
    """--json is for programs: nothing before or after the document."""
    assert json.loads(run_inspect(bundle, "--json")) == json.loads((bundle / "engine.json").read_text())


@pytest.mark.parametrize("place", ["bundle", "model", "repository"])
def test_inspect_finds_the_bundle(bundle: Path, place: str) -> None:
    """What `build` printed, what `run` takes, and what a person sees in between all work."""
    path = {"bundle": bundle, "model": bundle.parent, "repository": bundle.parent.parent}[place]
    assert run_inspect(path).startswith(str(bundle))


def test_inspect_tells_a_changed_file(bundle: Path) -> None:
    """--verify-files reads every byte, of files that a start would not hash too."""
    assert "all 1 files are as they were built" in run_inspect(bundle, "--verify-files")
    (bundle / "model.onnx").write_bytes(b"A graph")
    with pytest.raises(EngineError, match=r"model\.onnx"):
        run_inspect(bundle, "--verify-files")


def test_inspect_of_nothing_says_what_to_give(tmp_path: Path) -> None:
    """A wrong path gives one sentence, not a traceback."""
    with pytest.raises(EngineError, match="castline build"):
        run_inspect(tmp_path)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight.q8", "head"),
        ("model.layers.0.self_attn.qkv.weight.T.q8.scales", "attention"),
        ("model.layers.0.self_attn.q_norm.weight", "norms"),
        ("model.layers.0.post_attention_layernorm.weight", "norms"),
        ("model.layers.0.mlp.gate_up.weight.T", "mlp"),
        ("transformer.h.0.ln_1.weight", "norms"),
        ("split.1536", "other"),
    ],
)
def test_parts_by_name(name: str, part: str) -> None:
    """The sizes of the report are by part: a norm in the attention must not count as attention."""
    assert part_of(name) == part


def test_tied_head_is_one_part() -> None:
    """The shared matrix is counted once, under a name that says it is shared; parts without weights are left out."""
    assert bytes_by_part([("lm_head.weight", 100), ("model.norm.weight", 4)]) == {SHARED: 100, "norms": 4}
    assert bytes_by_part([("lm_head.weight", 100), ("embed.weight", 90)]) == {"embedding": 90, "head": 100}
