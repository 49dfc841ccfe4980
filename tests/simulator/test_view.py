"""The page that plays an epoch shows what the trace records, and a browser plays it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from odb_sim.cli.main import main
from odb_sim.inputs.workload import Sharding
from odb_sim.recorded.runs import load_runs
from odb_sim.recorded.story import read_story
from odb_sim.reports import lens
from odb_sim.studies.runs import run

from odb_ref.core.batching.cost import Cost
from odb_ref.core.batching.layouts import Layout
from odb_ref.core.batching.order import StepOrder
from odb_ref.core.errors import UsageError
from odb_ref.core.types import Mode
from odb_ref.trace.check import check_traces
from tests.helpers.browser import Tab
from tests.helpers.commands import refuse
from tests.helpers.simulated import make_run

BASE = make_run("gsm8k", 4, 600, budget_tokens=2048, window_samples=48, sharding=Sharding.UNEVEN)
EVEN = make_run("mm_mix_real", 3, 400, budget_tokens=2048, window_samples=48)


@dataclass(frozen=True)
class MyCost(Cost):
    pass


RUNS = {
    "join": BASE,
    "paper": replace(BASE, policy="paper"),
    "packed": replace(BASE, layout=Layout.PACKED),
    "sampler": replace(BASE, order=StepOrder.SAMPLER),
    "quota": replace(EVEN, mode=Mode.QUOTA, quota_samples=300),
    "shared": replace(EVEN, sharding=Sharding.SHARED),
    "updates": replace(EVEN, update_samples=60),
}
FAULTS = ("kill:1:3", "stop:1:3", "read:1:100", "collate:1:2")


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("traces")

    @cache
    def write(name: str) -> Path:
        trace = folder / f"{name.replace(':', '-')}.ndjson"
        if name in RUNS:
            with RUNS[name].open_trace(trace) as writer:
                run(RUNS[name], observer=writer.record)
        else:
            arguments = "simulate gsm8k --ranks 3 --samples 600 --token-budget 2048 --window 32 --fault"
            assert main([*arguments.split(), name, "--trace", str(trace)]) == 0
        return trace

    return write


def view(trace: Path, *options: str) -> Path:
    page = trace.with_suffix(".html")
    assert main(["view", str(trace), "--html", str(page), *options]) == 0
    return page


def read_data(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), flags=re.DOTALL)
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.mark.parametrize("name", RUNS)
def test_the_page_holds_every_batch_of_the_trace_and_every_sample_that_is_carried(
    name: str, write: Callable[[str], Path]
) -> None:
    trace = write(name)
    page = view(trace)
    data, (recorded,) = read_data(page), load_runs([trace])
    if told := re.search(r"([\d,]+) steps in ([\d,]+) rounds", page.read_text()):
        (job,) = check_traces([trace]).jobs
        assert [int(number.replace(",", "")) for number in told.groups()] == [job.steps, job.rounds]
    for index, rank in enumerate(data["ranks"]):
        parts = [entry["parts"][index] for entry in data["rounds"] if entry["parts"][index] is not None]
        record = recorded.ranks[rank]
        planned = [part for part in parts if part["count"]]
        assert [part["count"] for part in planned] == [len(steps) for steps in record.rounds if steps]
        for part, steps in zip(planned, [steps for steps in record.rounds if steps], strict=True):
            for place, step in enumerate(steps):
                shown = [length for length, own in zip(part["lengths"], part["steps"], strict=True) if own == place]
                assert sorted(shown) == sorted(record.samples[position].length for position in step.positions)
        for before, after in pairwise(parts):
            carried = [length for length, own in zip(before["lengths"], before["steps"], strict=True) if own < 0]
            assert after["lengths"][: after["carriedIn"]] == carried, "what is carried comes first in the next window"
        assert sum(len(part["lengths"]) - part["carriedIn"] for part in parts) == len(record.samples)


@pytest.mark.parametrize("name", RUNS)
def test_groups_are_those_that_the_rank_offered_and_steps_as_many_as_were_agreed_on(
    name: str, write: Callable[[str], Path]
) -> None:
    data = read_data(view(write(name)))
    for entry in data["rounds"]:
        for part in filter(None, entry["parts"]):
            assert part["groups"] is not None
            assert len(set(part["groups"])) == part["formed"]
        assert len({part["count"] for part in filter(None, entry["parts"])}) == 1
    summary = [sum(part["count"] for part in filter(None, entry["parts"])) for entry in data["rounds"]]
    assert [entry["steps"] * len(data["ranks"]) for entry in data["strip"]] == summary


def test_the_reason_for_the_number_of_steps_is_what_of_the_agreement_equals_it(write: Callable[[str], Path]) -> None:
    story = read_story([write("join")])
    texts = [story.explain_target(number) for number in range(story.rounds)]
    for number, text in enumerate(texts):
        parts = dict(story.list_parts(number))
        if found := re.match(r"rank (\d+) (would emit|has|holds only) (\d+) (groups?|samples?)", text):
            offer = parts[int(found[1])].offer
            value = {"would emit": offer.groups_min, "holds only": offer.samples_min}.get(found[2], offer.groups_max)
            assert int(found[3]) in (value, offer.due_max)
            assert int(found[3]) == parts[0].target
    assert any("would emit" in text for text in texts)
    assert texts[-1] == "nobody holds a sample, so the epoch ends"
    assert "has" in " ".join(read_story([write("paper")]).explain_target(3).split()[2:3])


def test_an_idle_batch_is_explained(write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    trace = write("join")
    (recorded,) = load_runs([trace])
    idle = [
        (step.number, record.rank)
        for record in recorded.ranks
        for steps in record.rounds
        for step in steps
        if not step.positions
    ]
    assert len(idle) > 3
    view(trace)
    text = capsys.readouterr().out
    assert f"{len(idle)} idle because its input has ended" in text
    step, rank = idle[-1]
    page = view(trace, "--step", str(step))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"rank {rank}: ")]
    assert re.search(
        r"idle; its input had ended, and it held \d+ samples?; the round has \d+ steps, since rank \d", line
    )
    assert read_data(page)["step"] == step


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_is_told_where_it_strikes(
    fault: str, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(fault)
    data = read_data(view(trace))
    text = capsys.readouterr().out
    kind, _, _ = fault.partition(":")
    told = {"kill": "its trace ends here", "stop": "its consumer leaves after 3 steps"}.get(kind, "fails: ")
    (mine,) = [item for item in data["incidents"] if item["rank"] == 1]
    assert told in mine["text"]
    assert f"rank 1, round {mine['round']}: {mine['text']}" in text
    ends = {"kill": "lost by rank 1", "stop": "stopped by rank 1"}.get(kind, "failed by rank 1")
    assert f"The epoch ends {ends}" in data["ending"]
    if fault.startswith("kill"):
        assert all("has lost rank 1" in item["text"] for item in data["incidents"] if item["rank"] != 1)
    if fault.startswith(("read", "collate")):
        why = [entry["why"] for entry in data["rounds"]]
        assert why[mine["round"]] == "rank 1 has failed, so the epoch ends here"


def test_a_rank_that_dies_when_all_loaders_are_done_is_told_by_the_steps_it_has_taken(tmp_path: Path) -> None:
    trace = tmp_path / "t.ndjson"
    arguments = ["simulate", "gsm8k", "--ranks", "2", "--samples", "200", "--token-budget", "8192"]
    assert main([*arguments, "--fault", "kill:1:1", "--trace", str(trace)]) == 0
    data = read_data(view(trace))
    taken = {item["rank"]: item["text"].split()[4] for item in data["incidents"] if "has taken" in item["text"]}
    assert taken == {0: "2", 1: "1"}


def test_the_headline_says_how_far_a_rank_came_whose_trace_breaks_off(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    lines = write("join").read_text().splitlines(keepends=True)
    (trace := tmp_path / "half.ndjson").write_text("".join(lines[: len(lines) // 2]))
    found = re.search(r"its trace ends here</strong>, after (\d+) of (\d+) planned steps</h1>", view(trace).read_text())
    assert 0 < int(found[1]) < int(found[2])


def test_a_trace_of_training_is_played_likewise(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from odb_ref import ODBDataLoader

    data = [{"input_ids": torch.arange(1 + index % 17)} for index in range(60)]
    trace = tmp_path / "run.ndjson"
    loader = ODBDataLoader(data, token_budget=64, collate_fn=list, trace=str(trace))
    batches = sum(1 for _ in loader.steps())
    loader.close()
    (file,) = tmp_path.glob("*.ndjson")
    page = read_data(view(file))
    assert sum(entry["steps"] for entry in page["strip"]) == batches
    assert sum(len(entry["parts"][0]["lengths"]) - entry["parts"][0]["carriedIn"] for entry in page["rounds"]) == 60
    assert "read" in page["rounds"][0]["parts"][0]["times"]


def test_of_many_ranks_and_rounds_some_are_played_and_the_page_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "many.ndjson"
    what = make_run("gsm8k", 40, 2400, budget_tokens=1024, window_samples=16, sharding=Sharding.UNEVEN)
    with what.open_trace(trace) as writer:
        run(what, observer=writer.record)
    monkeypatch.setattr(lens, "MOST_SAMPLES", 400)
    story = read_story([trace])
    step = 20
    page = view(trace, "--step", str(step), "--ranks", "39,7")
    data = read_data(page)
    first, stop = data["played"]
    assert {7, 39} < set(data["ranks"])
    assert len(data["ranks"]) == lens.MOST_RANKS
    assert stop - first < story.rounds == len(data["strip"])
    assert first <= story.find_round(step) < stop
    samples = sum(len(part["lengths"]) for entry in data["rounds"] for part in filter(None, entry["parts"]))
    assert samples <= 400
    text = page.read_text()
    assert "16 of 40 ranks are played" in text
    assert f"rounds {first} to {stop - 1} of {story.rounds} are played" in text


def test_a_cost_of_ones_own_hides_no_more_than_the_groups(write: Callable[[str], Path], tmp_path: Path) -> None:
    lines = write("join").read_text().splitlines()
    header = json.loads(lines[0])
    header["config"]["cost"] = "my/cost"
    header["config"]["rule"] = "my_rule"
    trace = tmp_path / "mine.ndjson"
    trace.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    data = read_data(view(trace))
    assert all(part["groups"] is None for entry in data["rounds"] for part in filter(None, entry["parts"]))
    assert sum(entry["steps"] for entry in data["strip"]) > 10


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--step", "99999"], "step 99999 is not in the trace"),
        (["--ranks", "x"], "not a list of ranks"),
        (["--ranks", "77"], "no rank 77"),
        (["--epoch", "3"], "no epoch 3"),
        (["--html", "none/x.html"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    options: list[str], expected: str, write: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = [] if "--html" in options else ["--html", str(tmp_path / "x.html")]
    assert expected in refuse(capsys, ["view", str(write("join")), *page, *options])


def test_files_of_several_epochs_and_files_that_are_no_traces_are_refused(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    for epoch in (None, 0):  # which epoch does not tell one run from another
        with pytest.raises(UsageError, match=r"are of 2 runs, .*join.* and .*paper.* of two: give the files of one"):
            read_story([write("join"), write("paper")], epoch=epoch)
    later = write("join").read_text().replace('"epoch":0', '"epoch":1')
    (tmp_path / "later.ndjson").write_text(later)
    with pytest.raises(UsageError, match="are of epochs 0, 1: choose one with --epoch"):
        read_story([write("join"), tmp_path / "later.ndjson"])
    (tmp_path / "later.ndjson").unlink()
    (tmp_path / "a.ndjson").write_text("{}\n")
    with pytest.raises(UsageError, match=r"a\.ndjson"):
        read_story([tmp_path])
    lines = write("join").read_text().splitlines()
    held = next(number for number, line in enumerate(lines) if '"kind":"collate"' in line)
    for wrong in (r'"positions":[590,\2', r'"positions":[\1,\1'):  # a sample that is not there, or one twice
        damaged = re.sub(r'"positions":\[(\d+),(\d+)', wrong, lines[held], count=1)
        (tmp_path / "a.ndjson").write_text("\n".join([*lines[:held], damaged, *lines[held + 1 :]]) + "\n")
        with pytest.raises(UsageError, match=rf"a\.ndjson:{held + 1}: rank \d collates samples that it does not hold"):
            read_story([tmp_path])
    (tmp_path / "a.ndjson").write_text(lines[0] + "\n")
    with pytest.raises(UsageError, match=r"a\.ndjson: holds a header, and no record of any rank"):
        read_story([tmp_path])


# In a browser ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["join", "packed", "updates", *FAULTS])
def test_every_stage_is_legible_without_network_and_without_complaints(
    name: str, width: int, dark: bool, write: Callable[[str], Path], tab: Tab
) -> None:
    tab.open(view(write(name)), width=width, dark=dark)
    for _ in range(min(60, 5 * len(read_data(write(name).with_suffix(".html"))["rounds"]))):
        tab.page.keyboard.press("ArrowRight")
    tab.wait("moved", lambda moved: moved == 1)
    assert tab.run("document.documentElement.scrollWidth") <= width
    fonts = tab.measure_fonts()
    assert min(fonts) >= 11, fonts[min(fonts)]
    assert tab.run("get('head').textContent.length") > 10


def test_an_epoch_plays_to_its_end_and_the_keys_go_where_they_say(write: Callable[[str], Path], tab: Tab) -> None:
    tab.open(view(write("join")), height=1600)
    last = tab.run("last")
    assert tab.run("at") == 0
    tab.run("get('speed').value = '4'")
    tab.page.keyboard.press(" ")
    assert tab.run("document.querySelector('[data-do=play]').textContent") == "Pause"
    tab.wait("at", lambda at: at >= 3)
    tab.page.keyboard.press(" ")
    paused = tab.run("at")
    for key, expected in (
        ("ArrowRight", paused + 1),
        ("ArrowLeft", paused),
        ("End", last),
        ("Home", 0),
        ("ArrowLeft", 0),
    ):
        tab.page.keyboard.press(key)
        assert tab.run("at") == expected
    tab.run("go(last - 2)")
    tab.page.keyboard.press(" ")
    tab.wait("at", lambda at: at == last)
    tab.wait("document.querySelector('[data-do=play]').textContent", "Play")
    assert "The epoch ends complete" in tab.run("get('said').textContent")


def test_the_step_asked_for_says_why_a_rank_idles_and_a_tap_chooses_another(
    write: Callable[[str], Path], tab: Tab
) -> None:
    trace = write("join")
    story = read_story([trace])
    number, rank, step = next(
        (number, rank, part.idle_steps[0])
        for number in range(story.rounds)
        for rank, part in story.list_parts(number)
        if part.idle_steps
    )
    page = view(trace, "--step", str(step))
    tab.open(page)
    lane = f"document.querySelectorAll('#lanes p')[{rank}].innerText"
    assert f"idle in step {step}: {story.explain_idle(number, rank)}" in tab.run(lane)
    assert tab.run("get('step').value") == str(step)
    assert tab.run("location.hash").endswith(f"step={step}")
    tab.page.keyboard.press("]")
    assert tab.run("step") == step + 1
    tab.wait("moved", lambda moved: moved == 1)
    tab.run("document.querySelector('#lanes canvas').scrollIntoView({block: 'center'})")
    x, y = tab.run(
        "(() => { const c = document.querySelectorAll('#lanes canvas')[0], b = c.getBoundingClientRect(); "
        "return [b.x + c.now.start + c.now.cell / 2, b.y + 20]; })()"
    )
    tab.page.mouse.click(x, y)
    first = dict(story.list_parts(story.find_round(step + 1)))[rank].steps[0].number
    assert tab.run("step") == first
    tab.run("get('step').value = 3; get('step').dispatchEvent(new Event('change'))")
    assert (tab.run("step"), tab.run("stage()")) == (3, 3)
    assert tab.run("number()") == story.find_round(3)
    tab.open("about:blank")
    tab.open(f"{page.resolve().as_uri()}#round=1&stage=2")
    assert (tab.run("number()"), tab.run("stage()")) == (1, 2)
    assert "this round has" in tab.run("get('said').textContent")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_is_shown_in_its_round_only(fault: str, write: Callable[[str], Path], tab: Tab) -> None:
    page = view(write(fault))
    data = read_data(page)
    struck = {item["round"] for item in data["incidents"]}
    tab.open(page)
    for number in range(len(data["rounds"])):
        tab.run(f"go({number} * STAGES.length)")
        assert tab.run("get('strike').hidden") == (number not in struck)
    tab.run(f"go({min(struck)} * STAGES.length)")
    assert "Rank 1 " in tab.run("get('strike').textContent")
