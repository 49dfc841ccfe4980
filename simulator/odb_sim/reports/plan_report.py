"""The output of `odb-ref plan`: one paragraph, one table, the commands to train with, and the page that holds them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from odb_ref.core.batching.updates import PADDING_SHARE
from odb_sim.engine.cautions import ALIKE, say_amount, say_count
from odb_sim.engine.metrics import describe_update
from odb_sim.reports.charts import Bars, Series
from odb_sim.reports.document import PageSource
from odb_sim.reports.page import Page
from odb_sim.reports.run_report import describe_range, describe_seconds, draw_run, split_percent
from odb_sim.studies.plan import RunPlan, Way

HEADER: Final = ["way", "speed-up", "band", "time", "time's band", "GPU-hours", "USD", "USD's band", "padding"]

_LITTLE: Final = 1.05
"""Below this speed-up the answer explains why it is small."""


def build_rows(plan: RunPlan) -> list[list[str]]:
    """Returns a row for each way to train: its time and cost, with bands."""
    rows = []
    for way in plan.ways:
        seconds, band = plan.compute_seconds(way), plan.band(way)
        rows.append(
            [
                way.name,
                f"{plan.compute_speedup(way):.2f}",
                "-" if way is plan.ways[1] else plan.band_speedup(way).describe(plan.compute_speedup(way)),
                describe_seconds(seconds),
                describe_range(seconds * band.low, seconds * band.high),
                say_amount(plan.compute_gpu_hours(way)),
                say_amount(plan.compute_money(way)),
                _describe_money(plan, way),
                f"{way.summary.padding_ratio:.1%}",
            ]
        )
    return rows


def _describe_money(plan: RunPlan, way: Way) -> str:
    money, band = plan.compute_money(way), plan.band_money(way)
    return f"{say_amount(money * band.low)} to {say_amount(money * band.high)}"


def describe_plan(plan: RunPlan) -> str:
    """Returns the answer as a paragraph."""
    wanted, job, best = plan.wanted, plan.wanted.job, plan.ways[0]
    seconds, band, price = plan.compute_seconds(best), plan.band(best), job.constants["price_usd"]
    fixed, packed = plan.ways[1], plan.ways[2]
    duration = f"{wanted.epochs:g} epochs" if wanted.tokens is None else f"{wanted.tokens:,} tokens"
    fits, (least, most) = job.compute_memory(job.values).tokens, job.compute_token_range()
    memory = (
        f"About {fits:,} padded tokens fit beside {job.model.parameters / 1e9:.1f} billion weights "
        f"({least:,} to {most:,}); up to the low end no budget is notably faster than {best.what.budget_tokens:,}."
        if wanted.memory_tokens is None
        else f"{wanted.memory_tokens:,} padded tokens fit by --memory-tokens, taken to be measured with activations "
        f"{job.activations} (by the model of memory {least:,} to {most:,} fit)."
    )
    parts = [
        f"{duration.removesuffix('s') if duration == '1 epochs' else duration} of {wanted.lengths.name} "
        f"({say_amount(wanted.samples)} samples) with {job.model.name} on {say_count(job.gpus, 'GPU', 'GPUs')} "
        f"({job.strategy.name}, activations {job.activations}) take {describe_seconds(seconds)} "
        f"({describe_range(seconds * band.low, seconds * band.high)} nine times of ten): "
        f"{say_amount(plan.compute_gpu_hours(best))} GPU-hours, {say_amount(plan.compute_money(best))} USD "
        f"({_describe_money(plan, best)}) at {price.value:g} USD a GPU-hour"
        f"{f', a list price of {price.date}' if price.date else ''}.",
        f"Set a token budget of {best.what.budget_tokens:,}"
        + (f" and a window of {best.what.window_samples:,}" if wanted.global_batch is None else "")
        + f"; an update holds {describe_update(best.summary)} in the mean.",
        f"That is {plan.compute_speedup(best):.2f} times ({plan.band_speedup(best).describe(plan.compute_speedup(best))}) as "
        f"fast as {fixed.name} ({describe_update(fixed.summary)}), and packed rows, which need {packed.needs}, would be "
        f"{plan.compute_speedup(packed):.2f} times.",
        _describe_little(plan),
        memory,
        band.explain("the width of the time's range") + "." if band.shares else "",
    ]
    return " ".join(part for part in parts if part)


def _describe_little(plan: RunPlan) -> str:
    """Returns why online batches bring little, or an empty string if they bring enough."""
    best, fixed, packed = plan.ways[:3]
    gained = plan.compute_speedup(best)
    if gained >= _LITTLE:
        return ""
    if (tokens := plan.wanted.lengths.tokens).std() < ALIKE * tokens.mean():
        return "So they bring little here: all samples are about as long."
    more = ["fewer GPUs"] if plan.wanted.job.gpus > 1 else []
    more += ["a larger global batch", *(["packed rows"] if plan.compute_speedup(packed) >= _LITTLE * gained else [])]
    share = fixed.summary.samples_per_update / plan.wanted.job.gpus
    return (
        f"So they bring little here: of an update a rank has {share:,.1f} samples, which fixed batches train on in "
        f"{fixed.summary.steps_per_update:,.1f} micro-batches, and online ones in {best.summary.steps_per_update:,.1f}. "
        f"More would come of {' or '.join(filter(None, (', '.join(more[:-1]), more[-1])))}."
    )


def list_commands(plan: RunPlan, data: str, source: str) -> list[str]:
    """Returns the commands to train and to simulate the run. ``source`` is what makes lengths.csv, if the data are not used."""
    data, count = ("lengths.csv", [source]) if source else (shlex.quote(data), [])
    wanted, job, best = plan.wanted, plan.wanted.job, plan.ways[0].what
    if wanted.global_batch is None:
        batching, options = f", batching=Batching(window={best.window_samples})", f" --window {best.window_samples}"
    else:
        batching, options = f", update_samples={wanted.global_batch}", f" --global-batch {wanted.global_batch}"
        if (share := best.padding_share) != PADDING_SHARE:
            batching, options = (
                f"{batching}, batching=Batching(padding_share={share})",
                f"{options} --padding-share {share}",
            )
    options += f" --seed {wanted.seed}" if wanted.seed else ""
    return [
        f"loader = ODBDataLoader(dataset, token_budget={best.budget_tokens}{batching}, "
        "collate_fn=collate, num_workers=4, shuffle=True)",
        f"torchrun --nnodes {job.gpus // job.node_ranks} --nproc-per-node {job.node_ranks} train.py",
        *count,
        f"odb-ref simulate {data} --ranks {job.gpus} --token-budget {best.budget_tokens}{options}"
        " --cost-model planned.json  # as --write-costs of this command writes it",
    ]


def write_plan_report(path: Path, plan: RunPlan, commands: Sequence[str], source: PageSource) -> None:
    """Writes the page of a plan, with the ``commands`` that carry it out."""
    wanted, job, best, fixed = plan.wanted, plan.wanted.job, plan.ways[0], plan.ways[1]
    seconds, band, speedup = plan.compute_seconds(best), plan.band(best), plan.compute_speedup(best)
    page = Page(
        f"odb-ref plan: {job.model.name} on {say_count(job.gpus, 'GPU', 'GPUs')}, {wanted.lengths.name}",
        f"Training takes **{describe_seconds(seconds)}** and {say_amount(plan.compute_money(best))} USD, {speedup:.2f} times "
        "as fast as with fixed batches",
        band=f"Nine times of ten {describe_range(seconds * band.low, seconds * band.high)}, "
        f"{_describe_money(plan, best)} USD, {plan.band_speedup(best).describe(speedup)} times as fast.",
        lead=describe_plan(plan),
        cautions=plan.cautions,
    )
    page.add_tiles(
        [
            (say_amount(plan.compute_gpu_hours(best)), "", "GPU-hours", ""),
            (f"{best.what.budget_tokens:,}", "tokens", "budget of a batch", "token_budget"),
            (*split_percent(best.summary.padding_ratio), "padding", "padding_ratio"),
            (*split_percent(fixed.summary.padding_ratio), f"{fixed.name}: padding", "padding_ratio"),
        ]
    )
    page.add_heading("To train so")
    page.add_code(commands)
    page.add_heading("Ways to train")
    page.add_table(HEADER, build_rows(plan), chosen=0)
    page.add_text("What each needs: " + "; ".join(f"{way.name}: {way.needs}" for way in plan.ways) + ".")
    page.add_heading("What the band is made of")
    shares = list(band.shares)[:6]
    if shares:
        bars = [Series(name="share", colour="odb", values=[100 * share for _, share in shares])]
        page.add_chart(
            Bars(names=[name for name, _ in shares], series=bars, digits=0),
            f"Percent of the squared width of the time's band. To narrow it: {band.remedy}.",
        )
    page.add_maps([(wanted.lengths.name, [draw_run(way.what, way.name) for way in (best, fixed)])])
    page.add_heading("What it rests on")
    if wanted.cost_model is not None:
        gpu, rows = wanted.costs.gpu, wanted.costs.step_table.rows
        said = (
            f"a table of the seconds of {len(rows)} sizes of micro-batches"
            if rows
            else f"a micro-batch {gpu.fixed_s:.4g} s, a token {gpu.per_token_s:.4g} s, a token squared "
            f"{gpu.per_token2_s:.4g} s, at least {gpu.floor_s:.4g} s"
        )
        page.add_text(f"Times are those of --cost-model: {said}. What stands here is for memory and price.")
    page.add_table(
        ["constant", "value", "from", "to", "source"],
        [
            [name, *(f"{number:.4g}" for number in (item.value, item.low, item.high)), item.source]
            for name, item in job.constants.items()
        ],
    )
    page.write(path, source)
