"""The cost of a training job, given its model, GPUs and strategy: seconds of a micro-batch and of communication, and memory.

The model has P weights, of which a token uses A, and L layers of attention width d:

==============  ========================================================================================================
a token         6 A operations, forward and backward; 2 A more where activations are computed again; those of a mixture's
                experts at a share of the usual speed; and what its layers and logits hold crosses the GPU's memory
                several times, which small models spend much of their time on
a pair          of a token and one of its row: 6 L d operations, causal (and 2 L d more); a row of n has n squared of them
sent            the parameters, as often as the strategy says, at what a GPU sends in a ring over all ranks; what cannot
                be hidden behind computation adds to it, a micro-batch is not shorter than what is sent in it, and what is
                sent once an update is hidden only as far as its last backward pass lasts
an update       the optimizer reads and writes the states of a rank's share once
a token's       what each layer keeps for the backward pass (or, where that is computed again, its input, and one layer
memory          whole), and the logits; beside the states, DDP's copy of the gradients, and a layer's weights where these
                are sharded
==============  ========================================================================================================

No further overlap is modelled, and no pipeline, tensor or expert parallelism. `data/presets.toml` has the sources of the
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, exp, hypot, log, log2

from odb_ref.core.errors import UsageError
from odb_sim.inputs.costs import CollectiveCost, Costs, GpuCost
from odb_sim.inputs.presets import Constant, Model, Strategy, load_constants, load_model, load_software, load_strategy

Values = Mapping[str, float]
"""A value for each constant, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The use of a GPU's memory, in bytes, and the padded tokens of a micro-batch that fit into the rest."""

    usable: float
    states: float
    """A rank's share of weights, gradients and optimizer states, and the gathered layers."""
    token: float
    """The bytes of each padded token."""

    @property
    def tokens(self) -> int:
        """The padded tokens of a micro-batch that fit, or 0 if not even the states fit."""
        return max(0, int((self.usable - self.states) / self.token))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A model on a number of GPUs, each a data-parallel rank."""

    model: Model
    strategy: Strategy
    gpus: int
    node_gpus: int = 8
    """GPUs that share a node, and its faster links."""
    recomputes: bool = False
    """True if activations are computed again in the backward pass instead of being kept."""
    constants: Mapping[str, Constant] = field(repr=False)

    @property
    def values(self) -> dict[str, float]:
        """The value of each constant."""
        return {name: constant.value for name, constant in self.constants.items()}

    @property
    def activations(self) -> str:
        """What becomes of activations until the backward pass, for messages."""
        return "computed again" if self.recomputes else "kept"

    @property
    def node_ranks(self) -> int:
        """The ranks of each node. torchrun starts the same number on all, so 12 GPUs on nodes of 8 are two nodes of 6."""
        return max(count for count in range(1, self.node_gpus + 1) if self.gpus % count == 0)

    def compute_bandwidth(self, values: Values) -> float:
        """Returns the bytes per second of a rank in a ring over all ranks. All GPUs of a node send to other nodes at once."""
        link, network = values["link_bytes_s"], values["network_bytes_s"]
        if self.gpus > self.node_ranks:
            link = min(link, self.node_ranks * network)
        return values["link_share"] * link

    def price(self, values: Values) -> Costs:
        """Returns the cost models with these ``values`` of the constants. Loader and exchange have the default costs."""
        model, strategy, ranks = self.model, self.strategy, self.gpus
        again = 2 * values["recompute"] if self.recomputes else 0.0
        peak = values["peak_flops"] * values["peak_share"] / values["model_error"]
        layer, logits = self._count_held(values)
        moved_s = (
            values["passes"] * (layer * model.layers + logits) * values["model_error"] / values["bandwidth_bytes_s"]
        )
        work = model.active + model.met * (1 / values["expert_share"] - 1)
        token_s = (6 + again) * (work / (peak * values["efficiency"]) + moved_s / 6)
        pair_s = (6 + again) * model.layers * model.attention_width / (peak * values["attention"])
        once_s = values["gradient_bytes"] * model.parameters / self.compute_bandwidth(values)
        open_share = 1 - min(1.0, values["hidden_share"])
        share = 1 / ranks if "states" in strategy.sharded else 1.0
        optimizer_s = 2 * values["state_bytes"] * model.parameters * share / values["bandwidth_bytes_s"]
        messages_s = model.layers * ceil(log2(ranks)) * values["message_s"]
        each_s = strategy.each * (once_s * (ranks - 1) / ranks + messages_s)
        return Costs(
            gpu=GpuCost(
                fixed_s=open_share * each_s,
                per_token_s=token_s,
                per_token2_s=pair_s,
                floor_s=max(each_s, model.layers * values["launch_s"]),
            ),
            collective=CollectiveCost(
                fixed_s=optimizer_s,
                latency_s=values["message_s"],
                transfer_s=open_share * strategy.update / 2 * once_s,
                hidden_s=(1 - open_share) * strategy.update / 2 * once_s,
                each_step=strategy.each > 0,
            ),
        )

    def _count_held(self, values: Values) -> tuple[float, float]:
        """Returns the bytes of a token that a layer holds for the backward pass, and those of its logits."""
        model, weight = self.model, values["weight_bytes"]
        attention, kv = model.attention_width, model.kv_heads * model.head_width
        # A layer keeps the inputs of norms and matrices, queries and keys before and after rotation, and the gate's outputs;
        # also, as in most models with gates, the two norms in float32. Each expert has an input and an output of its own.
        is_gated = model.matrices > 2
        kept = weight * ((2 + 2 * model.routed) * model.hidden + 3 * attention + 3 * kv) + 8 * model.hidden * is_gated
        kept += weight * (4 if is_gated else 2) * model.routed * model.feed_forward
        return kept, values["logit_bytes"] * model.vocabulary

    def compute_memory(self, values: Values) -> Memory:
        """Returns the use of memory with these ``values`` of the constants."""
        model, strategy = self.model, self.strategy
        weight, gradient = values["weight_bytes"], values["gradient_bytes"]
        bytes_of = {"weights": weight, "gradients": gradient, "states": values["state_bytes"] - weight - gradient}
        states = sum(
            size * model.parameters / (self.gpus if name in strategy.sharded else 1) for name, size in bytes_of.items()
        )
        if not strategy.sharded and self.gpus > 1:  # DDP's buckets are a second copy of the gradients
            states += gradient * model.parameters
        if "weights" in strategy.sharded:  # one layer in use, the next being gathered, and the gradients of one
            layer = max(model.layer_parameters, model.vocabulary * model.hidden)
            states += (2 * weight + gradient) * layer * min(1, self.gpus - 1)
        kept, logits = self._count_held(values)
        layers = weight * model.hidden * model.layers + kept if self.recomputes else kept * model.layers
        token = values["activation_share"] * layers + logits
        return Memory(usable=values["usable_share"] * values["memory_bytes"], states=states, token=token)

    def compute_token_range(self) -> tuple[int, int]:
        """Returns the range in which the padded tokens that fit lie nine times out of ten. Fewer than the first are safe."""
        usual, downs, ups = self.compute_memory(self.values).tokens, [0.0], [0.0]
        for name, constant in self.constants.items():
            ends = [
                log(max(1, self.compute_memory(self.values | {name: end}).tokens) / max(1, usual))
                for end in (constant.low, constant.high)
            ]
            downs.append(min(0.0, *ends))
            ups.append(max(0.0, *ends))
        return int(usual * exp(-hypot(*downs))), int(usual * exp(hypot(*ups)))


def build_job(
    *,
    gpu: str,
    model: str,
    strategy: str,
    gpus: int,
    precision: str = "bf16",
    recomputes: bool = False,
    node_gpus: int = 8,
    price_usd: float | None = None,
) -> TrainingJob:
    """Returns the job described by the presets of these names. ``price_usd`` is the user's own, in dollars per GPU and hour.

    Raises: UsageError when there is no such preset, a number is not valid, or the states alone do not fit.
    """
    if gpus < 1 or node_gpus < 1:
        raise UsageError(f"--gpus and --node-gpus must be at least 1, got {gpus} and {node_gpus}")
    if price_usd is not None and not 0 <= price_usd < 1e6:
        raise UsageError(f"--price must be at least 0, in dollars for a GPU hour, got {price_usd}")
    constants = load_constants("gpu", gpu) | load_constants("precision", precision) | load_software()
    if price_usd is not None:
        constants["price_usd"] = Constant(value=price_usd, low=price_usd, high=price_usd, source="yours")
    job = TrainingJob(
        model=load_model(model),
        strategy=load_strategy(strategy),
        gpus=gpus,
        node_gpus=node_gpus,
        recomputes=recomputes,
        constants=constants,
    )
    memory = job.compute_memory(job.values)
    if not memory.tokens:
        raise UsageError(
            f"{job.model.name} with {strategy} needs {memory.states / 1e9:,.0f} GB of each of {gpus:,} GPUs for "
            f"weights, gradients and states alone; {memory.usable / 1e9:,.0f} GB of a {gpu} can be used: use more GPUs or "
            "another --strategy"
        )
    return job
