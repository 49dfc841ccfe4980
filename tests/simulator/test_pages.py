"""The pages of the commands: their content, their independence of any network, and how they look in a reader's browser."""

from __future__ import annotations

import hashlib
import html
import operator
import re
from collections.abc import Callable
from functools import cache, reduce
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from odb_sim.cli.main import main
from odb_sim.engine.fill import MOST_CELLS
from odb_sim.reports.document import PageSource, compute_digest
from odb_sim.reports.page import Page

from odb_ref import __version__
from tests.helpers.browser import Tab
from tests.helpers.commands import get_figures
from tests.simulator.test_view import read_data
from tests.simulator_answers.helpers import make_lengths, record

SMALL = "--ranks 6 --samples 700 --token-budget 4096"
COMMANDS = {
    "simulate": f"simulate mm_mix_real {SMALL} --window 64",
    "uneven": f"simulate sgd_dialogues {SMALL} --shards uneven --policy standard",
    "kill": f"simulate gsm8k {SMALL} --window 32 --fault kill:4:2",
    "stop": f"simulate gsm8k {SMALL} --window 32 --fault stop:4:2",
    "collate": f"simulate gsm8k {SMALL} --window 32 --fault collate:4:1",
    "read": "simulate gsm8k --ranks 6 --samples 6000 --token-budget 4096 --fault read:2:700",
    "nothing": "simulate gsm8k --ranks 2 --samples 50 --token-budget 2048 --fault read:0:0",
    "compare": f"compare mm_mix_real {SMALL} --policy odb,standard,packing",
    "traces": "compare gsm8k sgd_dialogues --ranks 2 --samples 100",
    "sweep": "sweep gsm8k --samples 300 --ranks 2,4 --token-budget 1024,2048 --window 16,32,64 --policy odb,standard "
    "--processes 1",
    "tune": "tune gsm8k --samples 120 --ranks 2 --memory-tokens 2048 --window-max 32 --processes 1",
    "replay": "replay TRACE",
    "plan": "plan LENGTHS --model qwen2.5-0.5b --gpu rtx4090 --gpus 4 --strategy ddp --global-batch 32 --processes 1",
}
SIZE = 2_500_000
"""The largest size of a page in bytes."""


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("pages")

    @cache
    def write(name: str) -> Path:
        page, trace, lengths = (folder / file for file in (f"{name}.html", "trace.ndjson", "lengths.csv"))
        if "TRACE" in COMMANDS[name]:
            record(trace, samples=500)
        if "LENGTHS" in COMMANDS[name]:
            lengths.write_text("total_tokens\n" + "".join(f"{length}\n" for length in make_lengths(300).tokens))
        asked = COMMANDS[name].replace("TRACE", str(trace)).replace("LENGTHS", str(lengths))
        assert main([*asked.split(), "--html", str(page)]) == 0
        return page

    return write


def read_charts(page: Path) -> list[dict[str, Any]]:
    charts: list[dict[str, Any]] = read_data(page)["charts"]
    return charts


def read_words(page: Path) -> str:
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", page.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", text)).split())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_begins_with_its_answer_ends_with_where_it_comes_from_and_is_of_bounded_size(
    name: str, write: Callable[[str], Path]
) -> None:
    page = write(name)
    text = page.read_text()
    headline = re.search(r"<h1>.*?<strong>(.*?)</strong>.*?</h1>", text)
    assert re.search(r"\d", headline[1])
    assert text.index("<h1>") < text.index("<h2>") < text.index("<footer>")
    foot = html.unescape(text[text.index("<footer>") : text.index("</footer>")])
    assert f"odb-ref {COMMANDS[name].split()[0]}" in foot
    assert f"odb-ref {__version__}, " in foot
    assert re.search(r": sha256 [0-9a-f]{16}<", foot)
    for part in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL), text[: text.index("<script")]:
        assert not re.search(r'<(link|img|iframe)\b|(src|href)="(?!#)|url\((?!#)|@import', part), "nothing to fetch"
    assert len(text.encode()) < SIZE


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("total_tokens\n" + "5\n" * 40)
    assert compute_digest(str(lengths)) == ": sha256 " + hashlib.sha256(lengths.read_bytes()).hexdigest()[:16]
    bundled = resources.files("odb_sim") / "data" / "gsm8k.csv.gz"
    assert compute_digest("gsm8k").endswith(hashlib.sha256(bundled.read_bytes()).hexdigest()[:16])
    assert compute_digest("nothing:of_that_name") == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "maps"), [("simulate", 2), ("uneven", 1), ("compare", 2), ("sweep", 2), ("replay", 2), ("plan", 2)]
)
def test_the_fill_of_each_step_on_each_rank_stands_beside_that_of_fixed_batches(
    name: str, maps: int, write: Callable[[str], Path]
) -> None:
    (group,) = [chart for chart in read_charts(write(name)) if chart["kind"] == "Maps"]
    assert len(group["maps"]) == maps
    assert group["maps"][-1]["label"].startswith("fixed batches of " if maps == 2 else "standard")
    totals = set()
    for drawn in group["maps"]:
        cells = list(
            zip(
                *(reduce(operator.iadd, drawn[key], []) for key in ("samples", "real", "padded", "lengths")),
                strict=True,
            )
        )
        assert len(cells) == len(drawn["ranks"]) * len(drawn["steps"])
        totals.add((sum(cell[0] for cell in cells), sum(cell[1] for cell in cells)))
        assert all(real <= padded and (len(lengths) > 0) == (samples > 0) for samples, real, padded, lengths in cells)
    assert len(totals) == 1, "the same samples"


@pytest.mark.parametrize(
    "command",
    [
        "simulate POLICY gmt --token-budget 4096 --global-batch 40",
        "sweep POLICY gmt,standard --token-budget 4096 --global-batch 40 --processes 1",
        "sweep POLICY odb,standard --token-budget 4096 --global-tokens 9000 --processes 1",
        "compare POLICY hfg,standard --global-batch 16",
    ],
)
def test_a_map_shows_the_run_of_the_figures_beside_fixed_batches_in_its_memory(command: str, tmp_path: Path) -> None:
    asked = command.replace("POLICY", "gsm8k --samples 300 --ranks 4 --policy")
    found = get_figures(asked, "--html", str(tmp_path / "page.html"))
    best, fixed = found if isinstance(found, list) else (found, get_figures(asked.replace(" gmt ", " standard ")))
    (group,) = [chart for chart in read_charts(tmp_path / "page.html") if chart["kind"] == "Maps"]
    drawn, beside = group["maps"]
    assert (len(drawn["steps"]), drawn["budget"]) == (best["steps"], best["token_budget"])
    assert (len(beside["steps"]), beside["label"]) == (fixed["steps"], f"fixed batches of {fixed['batch_size']}")
    assert sum(rank is not None for rank in drawn["slow"]) == best["updates"], "ranks wait where an update ends"


def test_a_headline_says_what_the_tiles_and_the_band_say(tmp_path: Path) -> None:
    page, ones = tmp_path / "page.html", tmp_path / "ones.csv"
    asked = "compare gsm8k --samples 300 --ranks 4 --policy standard --global-batch 60"
    (figures,) = get_figures(asked, "--html", str(page))
    assert read_words(page).count(f"{figures['accumulated_samples_per_s']:,.1f} samples") == 2
    ones.write_text("total_tokens\n" + "1\n" * 40)
    get_figures(f"compare {ones} gsm8k --ranks 4 --policy odb,standard --global-batch 200", "--html", str(page))
    assert "Nine times of ten" not in read_words(page), "one trace has no band"


@pytest.mark.parametrize("name", ["kill", "stop", "collate", "read", "nothing"])
def test_a_page_says_which_rank_a_fault_befalls_when_and_why_and_draws_it(
    name: str, write: Callable[[str], Path]
) -> None:
    page, summary = write(name), get_figures(COMMANDS[name])
    words = read_words(page)
    rank, fault_s = summary["outcome_rank"], summary["fault_s"]
    assert (
        f"Rank {rank}, {fault_s:,.3f} s into the epoch, after {summary['steps']:,} steps: {summary['outcome_cause']}"
        in words
    )
    assert f"{summary['samples_emitted']:,} of {summary['samples_total']:,} samples" in words
    charts = read_charts(page)
    spans = next(chart for chart in charts if chart["kind"] == "SpanChart")
    mark = spans["mark"]
    assert mark["at_s"] == fault_s
    assert spans["begin_s"] <= fault_s < spans["end_s"]
    assert spans["lanes"][mark["lane"]].startswith(f"rank {rank} ")
    note = next(chart for chart in charts if chart["kind"] == "Maps")["maps"][0]["note"]
    assert (note["rank"], note["text"]) == (rank, summary["outcome_cause"])
    if name == "nothing":
        assert "0 steps; 0% of the budget of 2,048 is filled, 0% of the batches is padding" in words
        return
    shown = [spans["lanes"][lane] for lane, _, begin, _ in spans["spans"] if begin < fault_s]
    assert f"rank {rank} trainer" in shown, "what it did before"
    if name == "kill":
        longest = dict.fromkeys(spans["lanes"], 0.0)
        for lane, kind, begin, end in spans["spans"]:
            name = spans["lanes"][lane]
            longest[name] = max(longest[name], end - begin) if kind.startswith("wait") else longest[name]
        waiting = {lane for lane, seconds in longest.items() if seconds > 55}
        trainers = {lane for lane in spans["lanes"] if lane.endswith("trainer")}
        assert waiting == trainers - {f"rank {rank} trainer"}, "the wait for the dead rank is drawn"
        low, high = spans["gap_s"]
        assert fault_s < low < high < spans["end_s"]
        assert high - low > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulate", "compare", "sweep", "tune"])
def test_a_page_says_the_cautions_that_the_terminal_says(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    arguments = re.sub(r"(budget|memory-tokens) [0-9,]+", r"\1 700", COMMANDS[name]).replace("--window-max 32", "")
    assert main([*arguments.split(), "--html", str(page)]) == 0
    cautions = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Caution: ")]
    assert cautions
    assert all(" ".join(caution.split()) in read_words(page) for caution in cautions)


def test_a_large_run_has_a_page_of_the_same_bounded_size(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = "simulate azure_llm_2023_conv --ranks 512 --samples 250000 --token-budget 12288"
    assert main([*arguments.split(), "--html", str(page)]) == 0
    assert page.stat().st_size < SIZE
    charts = read_charts(page)
    for drawn in next(chart for chart in charts if chart["kind"] == "Maps")["maps"]:
        assert len(drawn["ranks"]) == 64
        assert 64 * sum(step is not None for step in drawn["steps"]) <= MOST_CELLS
    assert "64 of 512 ranks" in read_words(page)
    assert not any(chart["kind"] == "SpanChart" for chart in charts), "the machine of every rank would take too long"


def test_a_page_escapes_what_it_is_given(tmp_path: Path) -> None:
    page = Page("<i>&", "<b>**</script>**", band="<", lead="<", cautions=["<"])
    page.add_heading("<")
    page.add_table(["<x>"], [["</td>"]])
    page.write(tmp_path / "page.html", PageSource(command="<script>", data=["<u>"]))
    text = (tmp_path / "page.html").read_text()
    assert "<h1>&lt;b&gt;<strong>&lt;/script&gt;</strong></h1>" in text
    assert not re.search(r"<(i|b|u|x|script)>", text)


def test_the_library_is_that_of_its_package_unchanged() -> None:
    """`npm pack echarts@6.1.0`, then `sha256sum package/dist/echarts.min.js`."""
    assets = resources.files("odb_sim.reports") / "assets"
    digest = hashlib.sha256((assets / "echarts.min.js").read_bytes()).hexdigest()
    assert digest == "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
    assert b'"6.1.0"' in (assets / "echarts.min.js").read_bytes()
    for name in ("ECHARTS-LICENSE", "ECHARTS-LICENSE-d3", "ECHARTS-NOTICE"):
        assert (assets / name).is_file()
    # Included once: the licence of the project is that of the library.
    assert "Apache License" in (Path(__file__).parents[2] / "LICENSE").read_text()


SLIDE = """(() => {
  const slider = document.querySelector('[data-dim="DIM"]');
  slider.value = PLACE;
  slider.dispatchEvent(new Event("input", {bubbles: true}));
})()"""
CHOOSE = """(() => {
  const choice = document.querySelector("select");
  choice.selectedIndex = 1;
  choice.dispatchEvent(new Event("change", {bubbles: true}));
})()"""
FIND_CELL = """(() => {
  const map = document.querySelector("[data-map]");
  map.scrollIntoView({block: "center"});
  const box = map.getBoundingClientRect(), [x, y] = echarts.getInstanceByDom(map).convertToPixel({seriesIndex: 0}, [X, Y]);
  return [box.x + x, box.y + y];
})()"""

# In a browser ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_is_legible_without_network_and_without_complaints(
    name: str, width: int, dark: bool, write: Callable[[str], Path], tab: Tab
) -> None:
    tab.open(write(name), width=width, dark=dark)
    assert tab.run("document.documentElement.scrollWidth") <= width, "only tables scroll sideways"
    fonts = tab.measure_fonts()
    assert min(fonts) >= 11, fonts[min(fonts)]
    assert any(tab.run("Object.keys(window.drawnFonts)")), "charts are drawn"
    background = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == dark


def test_a_batch_tells_its_lengths_its_padding_and_who_is_waited_for(write: Callable[[str], Path], tab: Tab) -> None:
    page = write("simulate")
    for width in (1280, 400):
        tab.open(page, width=width)
        drawn = next(chart for chart in read_charts(page) if chart["kind"] == "Maps")["maps"][0]
        for x, y in ((0, 0), (3, 5)):
            tab.page.mouse.move(*tab.run(FIND_CELL.replace("X, Y", f"{x}, {y}")))
            said = tab.wait("document.querySelector('.tip')?.innerText", f"Rank {y}, step {x}")
            assert ", ".join(map(str, drawn["lengths"][y][x])) in said
            assert f"{drawn['real'][y][x]:,} of {drawn['budget']:,} tokens" in said
            padding = drawn["padded"][y][x] - drawn["real"][y][x]
            assert (f"{padding:,} of padding" if padding else "no padding") in said
            slow = drawn["slow"][x]
            assert ("others wait for this rank" if slow == y else f"ms for rank {slow}") in said


def test_sliders_show_what_came_of_the_values_chosen(write: Callable[[str], Path], tab: Tab) -> None:
    page = write("sweep")
    spec = next(chart for chart in read_charts(page) if chart["kind"] == "Sliders")
    names = [dimension["name"] for dimension in spec["dimensions"]]
    assert names == ["ranks", "window", "token budget"]
    tab.open(page)
    assert tab.run("[0.02512, 0.0252].map(value => tick(value))") == ["0.02512", "0.0252"]
    for at in ((0, 0, 0), (1, 2, 0), (0, 1, 1)):
        for dim, place in enumerate(at):
            tab.run(SLIDE.replace("DIM", str(dim)).replace("PLACE", str(place)))
        shown = tab.run(
            "[...document.querySelectorAll('[data-chart] tbody tr')].map(row => [...row.cells].map(c => c.innerText))"
        )
        expected = {
            row["policy"]: row["values"]
            for row in spec["tried"]
            if all(mine is None or mine == asked for mine, asked in zip(row["at"], at, strict=True))
        }
        assert {row[0] for row in shown} == set(expected) == {"odb", "standard"}
        for row in shown:
            assert row[1] == f"{expected[row[0]][0]:,.0f}", "tokens/s"
        flags = tab.run("document.querySelector('figure code').innerText")
        values = [str(dim["values"][place]) for dim, place in zip(spec["dimensions"], at, strict=True)]
        assert [word for word in flags.split() if not word.startswith("--")] == values
    tab.run("document.querySelector('[data-across=\"1\"]').click()")
    assert tab.run("document.querySelector('[data-across=\"1\"]').getAttribute('aria-pressed')") == "true"
    tab.run("document.querySelector('[data-dim=\"2\"]').focus()")
    before = tab.run("document.querySelector('[data-dim=\"2\"]').value")
    tab.page.keyboard.press("ArrowLeft" if int(before) else "ArrowRight")
    assert tab.run("document.querySelector('[data-dim=\"2\"]').value") != before


def test_of_settings_that_were_not_all_tried_the_nearest_that_was_is_shown(
    write: Callable[[str], Path], tab: Tab
) -> None:
    page = write("tune")
    spec = next(chart for chart in read_charts(page) if chart["kind"] == "Sliders")
    tried = {tuple(row["at"]) for row in spec["tried"]}
    tab.open(page)
    for dim, dimension in enumerate(spec["dimensions"]):
        for place in range(len(dimension["values"])):
            tab.run(SLIDE.replace("DIM", str(dim)).replace("PLACE", str(place)))
            at = tuple(map(int, tab.run("[...document.querySelectorAll('[data-dim]')].map(slider => slider.value)")))
            assert at[dim] == place
            assert at in tried
            assert tab.run("document.querySelectorAll('[data-chart] tbody tr').length") == 1


def test_of_several_traces_a_reader_chooses_one_and_a_link_opens_the_glossary(
    write: Callable[[str], Path], tab: Tab
) -> None:
    tab.open(write("traces"))
    shown = "[...document.querySelectorAll('[data-group]')].map(group => !group.hidden)"
    assert tab.run(shown) == [True, False]
    tab.run(CHOOSE)
    assert tab.run(shown) == [False, True]
    assert tab.run("document.querySelector('[data-group]:not([hidden]) canvas').width") > 0
    assert not tab.run("document.querySelector('details').open")
    tab.run("document.querySelector('a[href^=\"#g-\"]').click()")
    assert tab.run("document.querySelector('details').open")


def test_a_change_of_scheme_draws_anew(write: Callable[[str], Path], tab: Tab) -> None:
    tab.open(write("simulate"))
    picture = "document.querySelector('[data-map] canvas').toDataURL()"
    light = tab.run(picture)
    tab.page.emulate_media(color_scheme="dark")
    assert tab.wait(picture, lambda dark: dark != light)


def test_a_complaint_of_a_page_is_heard(tmp_path: Path, shared_tab: Tab) -> None:
    (tmp_path / "x.html").write_text(
        "<script>console.warn('careful'); fetch('http://127.0.0.1:9/x').catch(() => 0); missing()</script>"
    )
    shared_tab.open(tmp_path / "x.html")
    said = "\n".join(shared_tab.complaints)
    assert all(part in said for part in ("careful", "asks for http://127.0.0.1:9/x", "missing is not defined"))
