"""Which layers are stored or computed in e4m3, read from the quantization_config of config.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.worker.models.errors import UnknownQuantizationError

_PATTERN = "re:"


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """Matrices of the layers are e4m3 with a scale for each output; activations are rounded token by token.

    Embeddings and the output layer are never part of it.
    """

    is_stored: bool
    """The checkpoint has them so, with tensors `weight_scale`. Else they are rounded when loaded."""
    ignored: tuple[str, ...] = ()
    """Names of matrices that stay as they are, or patterns of names after `re:`."""

    def covers(self, names: Sequence[str]) -> bool:
        """Whether matrices that are multiplied as one, named without `.weight`, are e4m3.

        Raises UnknownQuantizationError if only some are.
        """
        found = {not any(_matches(pattern, name) for pattern in self.ignored) for name in names}
        if len(found) > 1:
            raise UnknownQuantizationError(f"of {', '.join(names)} some are quantized and some ignored")
        return found.pop()


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(_PATTERN):
        return re.match(pattern.removeprefix(_PATTERN), name) is not None
    return name == pattern


def read_quantization(values: dict[str, Any]) -> Fp8Weights | None:
    """What the checkpoint of this config.json stores; None for plain weights.

    Known are checkpoints of compressed-tensors in the format `float-quantized`: e4m3 weights with one scale for each
    output, activations rounded token by token. Raises UnknownQuantizationError, which names the setting, for all else.
    """
    config = values.get("quantization_config") or values.get("compression_config")
    if not config:
        return None
    if not isinstance(config, dict):
        raise UnknownQuantizationError(f"quantization_config is not an object: {config!r}")
    _expect("quant_method", config.get("quant_method"), "compressed-tensors")
    _expect("format", config.get("format"), "float-quantized")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise UnknownQuantizationError("quantization_config.config_groups does not hold exactly one group")
    [group] = groups.values()
    if not isinstance(group, dict):
        raise UnknownQuantizationError(f"a group of quantization_config is not an object: {group!r}")
    _expect("targets", group.get("targets"), ["Linear"])
    _expect_e4m3("weights", group.get("weights"), strategy="channel", dynamic=False)
    _expect_e4m3("input_activations", group.get("input_activations"), strategy="token", dynamic=True)
    if group.get("output_activations") is not None:
        raise UnknownQuantizationError("quantization_config.output_activations is set")
    if config.get("kv_cache_scheme") is not None:
        scheme = config["kv_cache_scheme"]
        _expect_e4m3("kv_cache_scheme", scheme, strategy=_get(scheme, "strategy"), dynamic=False)
    ignored = config.get("ignore") or []
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise UnknownQuantizationError(f"quantization_config.ignore is not a list of names: {ignored!r}")
    for name in ignored:
        if name.startswith(_PATTERN):
            _compile(name.removeprefix(_PATTERN))
    return Fp8Weights(is_stored=True, ignored=tuple(ignored))


def _compile(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UnknownQuantizationError(f"quantization_config.ignore has a bad pattern {pattern!r}: {error}") from error


def _expect_e4m3(name: str, scheme: Any, *, strategy: Any, dynamic: bool) -> None:
    _expect(f"{name}.num_bits", _get(scheme, "num_bits"), 8)
    _expect(f"{name}.type", _get(scheme, "type"), "float")
    _expect(f"{name}.strategy", _get(scheme, "strategy"), strategy)
    _expect(f"{name}.dynamic", _get(scheme, "dynamic"), dynamic)
    _expect(f"{name}.symmetric", True if _get(scheme, "symmetric") is None else _get(scheme, "symmetric"), True)


def _get(scheme: Any, key: str) -> Any:
    return scheme.get(key) if isinstance(scheme, dict) else None


def _expect(name: str, found: Any, known: Any) -> None:
    if found != known:
        raise UnknownQuantizationError(f"quantization_config.{name} is {found!r}; only {known!r} is computed here")
