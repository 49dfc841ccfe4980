"""Presets of GPUs, models, strategies and number formats. In `data/presets.toml` each constant has its source and its range.

A model is the name of a preset, or the ``config.json`` of any other model.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

from odb_ref.core.errors import UsageError

Section = Mapping[str, object]

_ALIASES: Final = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
}
_UNGATED: Final = ("gpt2", "gpt_neox", "gptj", "opt", "phi", "bloom", "mpt", "falcon", "starcoder2")
"""Model types whose feed-forward layers have two matrices instead of three."""
_WIDENING: Final = 4
_LARGEST: Final = 10**12
_MAY_BE_0: Final = (
    "each", "update", "n_shared_experts", "shared_expert_intermediate_size", "q_lora_rank", "first_k_dense_replace",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number, the range in which it lies nine times out of ten, and the source of both."""

    value: float
    low: float
    high: float
    source: str
    date: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The sizes of a transformer on which its costs depend."""

    name: str
    source: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    feed_forward: int
    """The width of a feed-forward layer, or of each of its experts."""
    matrices: int
    """The matrices of a feed-forward layer: 3 if it has a gate."""
    experts: int
    """The experts of a layer, with those that all tokens share; 1 without a mixture."""
    routed: int
    """The experts that a token uses."""
    is_tied: bool
    """True if the embedding is also the last matrix."""
    value_width: int
    """The width of a head's values, and of what it gives."""
    attention_weights: int
    """The weights of a layer's attention."""
    dense_layers: int
    """The first layers, which have a feed-forward part of ``dense_width`` instead of experts."""
    dense_width: int

    @property
    def attention_width(self) -> int:
        """The width of all heads: the mean of that of their queries and of that of their values."""
        return self.heads * (self.head_width + self.value_width) // 2

    @property
    def expert(self) -> int:
        """The weights of a layer's feed-forward part, or of each expert."""
        return self.matrices * self.hidden * self.feed_forward

    @property
    def layer_parameters(self) -> int:
        """All weights of a layer, without biases."""
        return self.attention_weights + self.experts * self.expert + 2 * self.hidden

    @property
    def dense(self) -> int:
        """The weights of the feed-forward parts of all dense layers."""
        return self.dense_layers * self.matrices * self.hidden * self.dense_width

    @property
    def parameters(self) -> int:
        """All weights, without biases."""
        embeddings = self.vocabulary * self.hidden * (1 if self.is_tied else 2)
        replaced = self.dense - self.dense_layers * self.experts * self.expert
        return self.layers * self.layer_parameters + replaced + embeddings + self.hidden

    @property
    def met(self) -> int:
        """The weights of experts that a token is multiplied with; 0 without a mixture."""
        return (self.layers - self.dense_layers) * self.routed * self.expert if self.experts > 1 else 0

    @property
    def active(self) -> int:
        """The weights a token is multiplied with: without the embedding, which is looked up, or the experts not used."""
        common = self.layers * (self.attention_weights + (self.expert if self.experts == 1 else 0)) + self.dense
        return common + self.met + self.vocabulary * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """What is sharded, and how often the parameters are sent."""

    name: str
    sharded: frozenset[str]
    each: int
    """How often the parameters are sent in each micro-batch."""
    update: int
    """How often the parameters are sent in each update."""


@cache
def read_presets() -> Mapping[str, Mapping[str, Section]]:
    """Returns the contents of the file: by kind, by the preset's name, by the constant's name."""
    text = (resources.files("odb_sim") / "data" / "presets.toml").read_text(encoding="utf-8")
    presets: Mapping[str, Mapping[str, Section]] = tomllib.loads(text)
    return presets


def list_names(kind: str) -> list[str]:
    """Returns the names of the presets of a kind, in the order of the file."""
    return list(read_presets()[kind])


def _find(kind: str, name: str) -> Section:
    presets = read_presets()[kind]
    if name not in presets:
        near = "".join(f"; did you mean {match}?" for match in get_close_matches(name.lower(), presets, 1))
        raise UsageError(f"--{kind} {name}: unknown; choose from {', '.join(presets)}{near}")
    return presets[name]


def load_constants(kind: str, name: str) -> dict[str, Constant]:
    """Returns the constants of a preset. Raises: UsageError naming the presets there are, when none has that name."""
    return _read_constants(_find(kind, name))


def load_software() -> dict[str, Constant]:
    """Returns the constants that apply to all hardware and models."""
    return _read_constants(read_presets()["software"])


def _read_constants(section: Section) -> dict[str, Constant]:
    found = {}
    for name, item in section.items():
        if isinstance(item, Mapping):
            value = float(item["value"])
            low, high = float(item.get("low", value)), float(item.get("high", value))
            found[name] = Constant(
                value=value, low=low, high=high, source=str(item["source"]), date=str(item.get("date", ""))
            )
    return found


def load_strategy(name: str) -> Strategy:
    """Returns the strategy called ``name``.

    Raises: UsageError naming the strategies there are, when none has that name.
    """
    section = _find("strategy", name)
    sharded = section["sharded"]
    return Strategy(
        name=name,
        sharded=frozenset(map(str, sharded)) if isinstance(sharded, list) else frozenset(),
        each=_read_whole(section, name, "each"),
        update=_read_whole(section, name, "update"),
    )


def load_model(name: str) -> Model:
    """Returns the sizes of a model: a preset's, or those in a ``config.json``, given as the file or its folder.

    Raises: UsageError, naming the file and the key, when it describes no model.
    """
    path = Path(name)
    if name not in read_presets()["model"] and path.exists():
        path = path / "config.json" if path.is_dir() else path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"{path}: not the config.json of a model: {reason}") from error
        if not isinstance(data, dict):
            raise UsageError(f"{path}: not the config.json of a model: not an object")
        # Models of images and text keep the sizes of their text model separately.
        text = data.get("text_config", data)
        return _build_model(str(path), str(path), text if isinstance(text, dict) else data)
    return _build_model(name, "presets.toml", _find("model", name))


def _build_model(name: str, source: str, config: Section) -> Model:
    hidden, layers, heads = (
        _read_whole(config, name, next((key for key in keys if key in config), wanted))
        for wanted, keys in _ALIASES.items()
    )
    is_ungated = config.get("model_type") in _UNGATED or "n_embd" in config or "d_model" in config
    experts = next((key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), None)
    width, held, met = "intermediate_size", 1, 1
    if experts is not None:
        held, met = _read_whole(config, name, experts), _read_whole(config, name, "num_experts_per_tok")
        width = "moe_intermediate_size" if "moe_intermediate_size" in config else width
    feed_forward = _read_whole(config, name, width, _WIDENING * hidden if is_ungated else None)
    if experts is not None:
        # Every token also uses the shared ones, which may be given as one that is as wide as several.
        shared = _read_whole(config, name, "n_shared_experts", 0)
        shared += _read_whole(config, name, "shared_expert_intermediate_size", 0) // feed_forward
        held, met = held + shared, met + shared
    kv_heads = _read_whole(config, name, "num_key_value_heads", heads)
    head_width = value_width = _read_whole(config, name, "head_dim", max(1, hidden // heads))
    attention = 2 * hidden * head_width * (heads + kv_heads)
    if config.get("kv_lora_rank"):  # keys and values, and often queries, are made of a narrow vector
        rank, rotated, plain = (
            _read_whole(config, name, key) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
        )
        head_width, value_width = plain + rotated, _read_whole(config, name, "v_head_dim")
        narrow = _read_whole(config, name, "q_lora_rank", 0)
        attention = (hidden + heads * head_width) * narrow if narrow else hidden * heads * head_width
        attention += hidden * (rank + rotated) + heads * (rank * (plain + value_width) + value_width * hidden)
    return Model(
        name=name,
        source=str(config.get("source", source)),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        vocabulary=_read_whole(config, name, "vocab_size"),
        feed_forward=feed_forward,
        matrices=2 if is_ungated else 3,
        experts=held,
        routed=met,
        is_tied=bool(config.get("tie_word_embeddings", is_ungated)),
        value_width=value_width,
        attention_weights=attention,
        dense_layers=0 if experts is None else min(layers, _read_whole(config, name, "first_k_dense_replace", 0)),
        dense_width=_read_whole(config, name, "intermediate_size", feed_forward),
    )


def _read_whole(config: Section, name: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not 0 <= value <= _LARGEST
        or (value == 0 and key not in _MAY_BE_0)
    ):
        raise UsageError(f"{name}: {key} is {value!r:.40}, expected a whole number from 1 to {_LARGEST:.0e}")
    return value
