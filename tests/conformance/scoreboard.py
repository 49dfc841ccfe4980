"""The scoreboard: planners of other projects, judged by the kit. ``make conformance`` installs them and writes the page.

    python -m tests.conformance.scoreboard   # installs what is missing, asks all, writes the page
    python -m tests.conformance.scoreboard verl-0.8.0 verl-7553   # asks one the cases whose id holds the text
    python -m tests.conformance.scoreboard --again   # runs the command of each red cell of the page: does it show what is said?

Packages are installed without their dependencies, each into its own folder below ``build/peers``. Torch and numpy are this
environment's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_ref.conformance.judge import RULES
from tests.helpers.capture import capture

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "peers"
RED = re.compile(r"^\| (\S+) \| ([A-Z]+) \| `(python -m tests\S+ \S+ (\S+))` \|", re.MULTILINE)
"""A row of the page that gives a command."""
PAGE = ROOT / "docs" / "explanation" / "scoreboard.md"
VERL_NEEDS = """tensordict==0.10.0 orjson cloudpickle importlib_metadata zipp pyvers codetiming hydra-core omegaconf
antlr4-python3-runtime==4.9.3 torchdata dill pylatexenc"""
TRL_NEEDS = """datasets==4.7.0 pyarrow multiprocess dill xxhash pandas python-dateutil pytz tzdata six httpx httpcore h11
anyio"""
TERMS_ALL = (
    "groups,align,target,agreement,want,shares,run,epoch,rest,weights,"
    "layout,cost,limits,multiple_of,at_least,at_most,pad_to,together,within,oversize,short,order,mean,changes,uses"
)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A planner: its source, how to ask it, and what it does not claim."""

    name: str
    planner: str
    requirements: Sequence[str] = ()
    has_ranks: bool = False
    without: str = TERMS_ALL
    note: str = ""


def _verl(number: str, planner: str = "plan_verl", name: str = "", note: str = "") -> Peer:
    return Peer(
        name=name or f"verl-{number}",
        planner=f"tests.conformance.peers:{planner}",
        requirements=(f"verl=={number}", *VERL_NEEDS.split()),
        has_ranks=True,
        without=f"{TERMS_ALL.replace('multiple_of,at_least,', '')},plan_all,{NONSENSE},{EMPTY}",
        note=note,
    )


def _packer(name: str, planner: str, note: str, requirements: str) -> Peer:
    """Returns a packer of all lengths in one place."""
    return Peer(
        name=name,
        planner=f"tests.conformance.peers:{planner}",
        requirements=requirements.split(),
        without=f"{TERMS_ALL},plan_ranks,{NONSENSE}",
        note=note,
    )


NONSENSE = "length-0,length-negative,beyond-64-bits"
"""Lengths that no trainer has."""
EMPTY = "no-samples,one-rank-empty"
"""Cases with a rank without samples. verl has no such batch."""
ALONE = "failing,one-beyond-the-budget,openrlhf-1280,dealt-beyond,trl-4554"
"""Cases with a sample longer than the budget, for planners that claim to let it travel alone."""
PACKED = "epoch-2,epoch-4,epoch-6,epoch-7,epoch-10,epoch-11"
"""Epochs with packed rows."""
PEERS = (
    Peer(
        name="odb-ref, one place",
        planner="tests.conformance.ours:plan_here",
        without="",
        note="`plan_all` and `plan_ranks`",
    ),
    Peer(
        name="odb-ref, ranks",
        planner="tests.conformance.ours:plan_there",
        has_ranks=True,
        without="plan_all",
        note="`plan_rank`",
    ),
    Peer(
        name="the model",
        planner="tests.conformance.peers:plan_model",
        without=f"mean,changes,uses-negative,one-rank-empty-refused,{NONSENSE}",
        note="extracted from Coq (`make proofs`): plans, and the online protocol; it knows no sample to run again",
    ),
    _verl("0.9.1", note="`rearrange_micro_batches` with the group, as its engines call it"),
    _verl("0.8.0", note="the same, two releases before"),
    _verl("0.7.1", "plan_verl_actor", "verl-0.7.1-actor", "as its FSDP actor calls it: without the group"),
    Peer(
        name="openrlhf-0.11.2",
        planner="tests.conformance.peers:plan_openrlhf",
        requirements=("openrlhf==0.11.2",),
        has_ranks=True,
        without=f"{TERMS_ALL},plan_all,{NONSENSE}",
        note="its replay buffer's steps; it carries verl's file",
    ),
    Peer(
        name="skyrl-0.3.0",
        planner="tests.conformance.peers:plan_skyrl",
        requirements=("skyrl==0.3.0",),
        has_ranks=True,
        without=f"{TERMS_ALL.replace('oversize,', '')},plan_all,{NONSENSE},{ALONE}",
        note="`TokenBasedBatchIterator`'s steps; a sample beyond the budget travels alone",
    ),
    _packer("skyrl-0.3.0-sft", "plan_skyrl_all", "`first_fit_decreasing`, packs dealt out", "skyrl==0.3.0"),
    _packer(
        "trl-1.16.0",
        "plan_trl",
        '`pack_dataset("bfd")`, packs as a `DistributedSampler` deals them',
        f"trl==1.16.0 {TRL_NEEDS}",
    ),
    _packer(
        "binpacking-2.0.1",
        "plan_binpacking",
        "`to_constant_volume`, packs dealt out; it does not promise to refuse",
        "binpacking==2.0.1",
    ),
    _packer("prtpy-0.8.3", "plan_prtpy", "`first_fit.decreasing`, packs dealt out", "prtpy==0.8.3"),
    Peer(
        name="online-dynamic-batching-0.1.2",
        planner="tests.conformance.peers:plan_odb",
        requirements=("online-dynamic-batching==0.1.2",),
        without=f"{TERMS_ALL.replace('epoch,', '').replace('layout,', '')},plan_all,plan_ranks,{PACKED}",
        note="padded epochs of its loader, a process for each rank; the first group of a round is one sample",
    ),
)


UNASKED = (
    "Not asked: megatron-core 0.16.1, whose `BalancedCPScheduler` puts a sample on several ranks and bounds a sample, not",
    "a micro-batch, and so claims nothing of R13; slime, miles, NeMo-RL and ROLL, which are on no package index.",
)
THREADS = """Cases from public threads, run on the versions that package indexes still have. verl repaired its Megatron actor
before releasing 0.7.1 (#5451), so that case breaks in its FSDP actor, where the same cause was left. slime is on no index:
its cases state what its planner should do."""


def install(peer: Peer) -> Path | None:
    """Installs what is missing. Returns the folder, or None if nothing is needed."""
    if not peer.requirements:
        return None
    folder = BUILT / peer.requirements[0].replace("==", "-")
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        subprocess.run([*command, "--target", str(folder), *peer.requirements], check=True)
    return folder


def list_paths(folder: Path | None) -> dict[str, str]:
    """Returns the environment that finds what was installed."""
    paths = [str(ROOT), *([str(folder)] if folder else [])]
    return {"PYTHONPATH": os.pathsep.join(paths), "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}


def ask(peer: Peer, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | list_paths(install(peer))
    command = [sys.executable, "-m", "odb_ref.conformance", "run", "--planner", peer.planner]
    command += ["--ranks"] * peer.has_ranks + (["--without", peer.without] if peer.without else [])
    return capture([*command, *arguments], cwd=ROOT, env=environment, timeout=1800)


def main(arguments: Sequence[str]) -> int:
    """Writes the page, asks one planner, or tries the page's commands."""
    if arguments == ["--again"]:
        return int(not all([show_again(*cell) for cell in RED.findall(PAGE.read_text(encoding="utf-8"))]))
    if arguments:
        name, *text = arguments
        (peer,) = [peer for peer in PEERS if peer.name == name]
        case = text[0].partition("-failing-")[0] if text else ""  # the kit derives the failing cases from it
        done = ask(peer, ["--only", case])
        sys.stdout.write(done.stdout + done.stderr)
        return done.returncode
    found = {}
    for peer in PEERS:
        sys.stderr.write(f"{peer.name}\n")
        path = BUILT / f"{peer.name.replace(' ', '-')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        done = ask(peer, ["--json", str(path)])
        if done.returncode not in (0, 1):
            sys.exit(done.stdout + done.stderr)
        found[peer.name] = json.loads(path.read_text())
        says = [verdict["says"] for verdict in found[peer.name]]
        missing = [text for text in says if "No module named" in text or "No such file" in text]
        if missing:  # which would count as a refusal
            sys.exit(f"{peer.name}: {missing[0]}")
    PAGE.write_text(render(found), encoding="utf-8")
    return 0


def show_again(name: str, rule: str, command: str, case: str) -> bool:
    """Returns True if the command of a red cell reports that the case breaks the rule."""
    done = capture([sys.executable, *command.split()[1:]], cwd=ROOT, timeout=1800)
    broken = [line for line in done.stdout.splitlines() if line.startswith(f"{case}: ")]
    is_shown = done.returncode == 1 and any(rule in line.split(": ")[1].split(", ") for line in broken)
    sys.stdout.write(f"{'shown' if is_shown else 'NOT SHOWN'}: {name} {rule}: {command}\n")
    sys.stdout.flush()
    return is_shown


def render(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    names = [name for name in RULES if name not in ("EXACT", "RESTORE", "REPORT", "ORDER")]
    lines = [
        "# Scoreboard",
        "",
        "Planners of samples of known lengths, judged by [the kit](../howto/conformance.md): `make conformance` installs",
        "them and writes this page. A cell counts the cases that break the property, of those that judge it; an empty cell",
        "means that the planner does not claim the property. A planner is judged only by what it claims, including cases",
        "in which ranks have fewer samples than micro-batches. Plans that break nothing get two scores: *count* over the",
        "least, and *wait* over its lower bound.",
        "",
        "| planner | " + " | ".join(names) + " | count | wait |",
        "|---|" + "--:|" * (len(names) + 2),
    ]
    for peer in PEERS:
        cells = [_count(found[peer.name], name) for name in names]
        lines.append(f"| {peer.name} | " + " | ".join([*cells, *_score(found[peer.name])]) + " |")
    lines += ["", *(f"- *{peer.name}*: {peer.note}." for peer in PEERS), "", *UNASKED, "", "## What is broken", ""]
    lines += ["A command for each cell that is not 0, and its first message. Cases from a thread have its name.", ""]
    lines += ["| planner | property | command | says |", "|---|---|---|---|"]
    for peer in PEERS:
        for name in names:
            broken = [verdict for verdict in found[peer.name] if name in verdict["faults"]]
            if broken:
                first = min(broken, key=lambda verdict: not verdict["from"].startswith("http"))
                command = f"`python -m tests.conformance.scoreboard {peer.name} {first['id']}`"
                link = f"[thread]({first['from']}) " if first["from"].startswith("http") else ""
                says = first["says"].replace("|", "/").replace("\n", " ")[:120]
                lines.append(f"| {peer.name} | {name} | {command} | {link}{says} |")
    lines += ["", "## Threads", "", THREADS, "", "| case | breaks on | keeps all |", "|---|---|---|"]
    cases = {
        verdict["id"]: verdict["from"] for verdict in found["odb-ref, ranks"] if verdict["from"].startswith("http")
    }
    for case, link in cases.items():
        if "-failing-" in case or case.endswith("-fits"):
            continue
        verdicts = {peer.name: verdict for peer in PEERS for verdict in found[peer.name] if verdict["id"] == case}
        broken = [f"{name} ({', '.join(verdict['faults'])})" for name, verdict in verdicts.items() if verdict["faults"]]
        kept = [name for name, verdict in verdicts.items() if verdict["judged"] and not verdict["faults"]]
        lines.append(f"| [{case}]({link}) | {'; '.join(broken)} | {'; '.join(kept)} |")
    return "\n".join(lines) + "\n"


def _count(verdicts: Sequence[Mapping[str, Any]], name: str) -> str:
    judged = sum(name in verdict["judged"] or name in verdict["faults"] for verdict in verdicts)
    broken = sum(name in verdict["faults"] for verdict in verdicts)
    return f"**{broken}** of {judged}" if broken else f"0 of {judged}" if judged else ""


def _score(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    kept = [verdict for verdict in verdicts if verdict["excess"] is not None]
    return [f"{sum(verdict[name] for verdict in kept) / len(kept):.3f}" if kept else "" for name in ("excess", "wait")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
