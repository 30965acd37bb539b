"""`raceme report`: a self-contained page, escaped and reproducible."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from runs_here import run_all
from typer.testing import CliRunner

from raceme.cli import app
from raceme.cli.report import plan
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.records.similarity import MOST_CLIENTS, Similarity, read_similarity
from raceme.runs.experiment import simulate

pytestmark = pytest.mark.pictures

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
HOSTILE = '<script>alert("1")</script>&"\''
_VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Content of a page; fails on unbalanced tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.scripts: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            named = {name: str(value) for name, value in attrs}
            self.scripts.append((named.pop("type", ""), named.pop("id", "")))
            assert not named, "scripts are in the page, not elsewhere"
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("href", "src"):
                self.links.append(str(value))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def report_output(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def page_of(folder: Path) -> str:
    ((_, _, make),) = plan([folder], None)
    return make(folder, "")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "panicle"
    keys = {"strategy": "panicle", "clients": 8, "groups": "0.5,0.5", "model": "mclr"}
    simulate(RunConfig.from_mapping({**keys, "max-updates": 48, "workers": 0, "out": str(out)}))
    return out


@pytest.fixture(scope="module")
def comparison_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("comparison")
    arguments = ["compare", "casa", "fedavg", "--max-updates", "16", "--clients", "4"]
    arguments += ["--set", "model=mclr"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raceme.experiments.jobs.run_jobs", run_all)
        CliRunner().invoke(app, [*arguments, "--out", str(out)], catch_exceptions=False)
    return out


@pytest.fixture
def copy(run_folder: Path, tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("report.html")
    return Path(shutil.copytree(run_folder, tmp_path / "copy", ignore=ignored))


def test_a_run_has_a_page_with_everything_on_it(run_folder: Path) -> None:
    assert str(run_folder / "report.html") in report_output(run_folder).replace("\n", "")
    page = Page((run_folder / "report.html").read_text(encoding="utf-8"))
    sections = ["result", "accuracy", "clusters", "devices", "similarity", "configuration", "again"]
    assert [name for name in page.ids if name not in ("dashboard", "run-data")] == sections
    # Images of what the dashboard draws are only for browsers without JavaScript.
    assert (page.tags.count("noscript"), page.tags.count("img")) == (3, 4)
    summary = json.loads((run_folder / "summary.json").read_text())
    assert f"{summary['accuracy']:.3f}" in page.text
    assert summary["versions"]["torch"] in page.text
    assert "panicle.level" in page.text
    assert "raceme run --strategy panicle --dataset digits" in page.text


def test_the_command_on_the_page_repeats_the_run(run_folder: Path, tmp_path: Path) -> None:
    text = Page(page_of(run_folder)).text
    command = next(line for line in text.splitlines() if line.startswith("raceme run --strategy"))
    arguments = [*shlex.split(command)[1:], "--out", str(tmp_path / "again")]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    models = [f"clusters/{path.name}" for path in (run_folder / "clusters").iterdir()]
    assert models
    for name in ("similarity.npz", *models):
        assert (tmp_path / "again" / name).read_bytes() == (run_folder / name).read_bytes()


def test_a_comparison_has_a_page_with_its_table_and_plots(comparison_folder: Path) -> None:
    report_output(comparison_folder)
    page = Page((comparison_folder / "report.html").read_text(encoding="utf-8"))
    assert {"result", "accuracy", "plots", "configuration"} <= set(page.ids)
    assert (page.tags.count("noscript"), page.tags.count("img")) == (1, 3)
    content = json.loads((comparison_folder / "compare.json").read_text())
    for entry in content["methods"]:
        assert f"{100 * entry['accuracy']['mean']:.2f}" in page.text
        folder = entry["runs"][0]["folder"]
        assert f"{folder}/" in page.links
        assert (comparison_folder / folder).is_dir()


def test_a_comparison_without_its_runs_still_has_a_page(
    comparison_folder: Path, tmp_path: Path
) -> None:
    shutil.copy(comparison_folder / "compare.json", tmp_path)
    report_output(tmp_path)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "The runs of casa, fedavg are missing from the folder" in page.text
    assert (page.tags.count("noscript"), page.tags.count("img")) == (0, 1)


def test_pages_need_no_network_and_have_no_double_ids(
    run_folder: Path, comparison_folder: Path
) -> None:
    for folder in (run_folder, comparison_folder):
        report_output(folder)
        text = (folder / "report.html").read_text(encoding="utf-8")
        page = Page(text)
        assert len(page.ids) == len(set(page.ids))
        # A comment of the plotting library contains its address.
        of_others = text.replace("https://github.com/leeoniya/uPlot", "")
        assert not re.search(r"(?:https?:)?//(?!\w*\.w3\.org)[\w.]+\.\w", of_others)
        assert not {"link", "iframe", "object"} & set(page.tags)
        assert "default-src 'none'; script-src 'sha256-" in unescape(text)
        assert page.scripts == [("application/json", "run-data"), ("", "")]
        for link in page.links:
            if link.startswith("#"):
                assert link[1:] in page.ids
            elif not link.startswith("data:image/png;base64,"):
                assert (folder / link).exists()


def test_two_pages_of_one_folder_are_the_same(run_folder: Path, tmp_path: Path) -> None:
    report_output(run_folder)
    first = (run_folder / "report.html").read_bytes()
    report_output(run_folder)
    assert (run_folder / "report.html").read_bytes() == first
    report_output(run_folder, "--output", tmp_path / "elsewhere.html")
    links = Page((tmp_path / "elsewhere.html").read_text(encoding="utf-8")).links
    assert all((tmp_path / link).exists() for link in links if link[0] not in "#d")


def test_names_of_clients_are_escaped(copy: Path) -> None:
    with sqlite3.connect(copy / "run.sqlite") as connection:
        renamed = "UPDATE events SET body = replace(body, '\"client-0\"', ?) WHERE kind = ?"
        for kind in ("ClientJoined", "UpdateApplied", "Evaluated", "ClustersChanged"):
            assert connection.execute(renamed, (json.dumps(HOSTILE), kind)).rowcount
        left = "SELECT count(*) FROM events WHERE instr(body, '\"client-0\"')"
        assert connection.execute(left).fetchone() == (0,)
    similarity = read_similarity(copy)
    assert similarity is not None
    replace(similarity, clients=(HOSTILE, *similarity.clients[1:])).save(copy)
    report_output(copy)
    text = (copy / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.scripts == [("application/json", "run-data"), ("", "")]
    assert text.count("<script") == 2
    (data,) = re.findall(r'<script type="application/json" id="run-data">(.*)</script>', text)
    names = [piece["clients"]["name"] for piece in json.loads(data) if "clients" in piece]
    assert HOSTILE in names[0]


def test_a_large_fleet_keeps_a_part_of_its_similarities(tmp_path: Path) -> None:
    n = MOST_CLIENTS + 500
    names = [f"c{index}" for index in range(n)]
    matrix = np.arange(n, dtype=np.float32)[:, None] + np.zeros((1, n), np.float32)
    Similarity.thinned(names, matrix).save(tmp_path)
    kept = read_similarity(tmp_path)
    assert kept is not None
    assert (len(kept.clients), kept.of) == (MOST_CLIENTS, n)
    assert (kept.clients[0], kept.clients[-1]) == ("c0", f"c{n - 1}")
    assert [f"c{value:.0f}" for value in kept.matrix[:, 0]] == list(kept.clients)


def test_damage_is_said_and_other_folders_have_their_pages(
    copy: Path, run_folder: Path, tmp_path: Path
) -> None:
    (copy / "summary.json").write_text('{"strategy": "casa"}')
    result = CliRunner().invoke(app, ["report", str(copy), str(run_folder)])
    assert result.exit_code == 2
    assert "is not what `raceme run` writes" in result.stderr
    assert (run_folder / "report.html").is_file()
    assert not (copy / "report.html").exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "does not exist"),
        (lambda folder: (folder / "summary.json").unlink(), "no summary.json: the run was killed"),
        (lambda folder: (folder / "summary.json").write_text("{"), "is damaged"),
        (lambda folder: (folder / "config.toml").write_text("="), "config.toml"),
        (lambda folder: (folder / "run.sqlite").write_bytes(b"x" * 5000), "run.sqlite"),
        (lambda folder: (folder / "report.html").write_text("my own"), "is not a report of Raceme"),
        (lambda folder: (folder / "report.html").mkdir(), "is a folder"),
    ],
)
def test_a_folder_that_cannot_be_reported_is_an_error(
    copy: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(copy)
    with pytest.raises(UserError, match=message):
        page_of(copy)


def test_one_output_cannot_take_two_pages(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 folders"):
        CliRunner().invoke(
            app,
            ["report", str(run_folder), str(run_folder), "--output", str(tmp_path / "a.html")],
            catch_exceptions=False,
        )


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on the PATH")
def test_a_browser_shows_the_page_as_it_is_meant(run_folder: Path, tmp_path: Path) -> None:
    report_output(run_folder)
    done = subprocess.run(
        [
            CHROMIUM,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            f"--user-data-dir={tmp_path / 'profile'}",
            (run_folder / "report.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    page = Page(done.stdout)
    assert "noscript" in page.tags
    assert {"panel-clusters", "result", "again"} <= set(page.ids)
