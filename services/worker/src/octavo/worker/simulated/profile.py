"""What a simulated worker is told of the model and the device that it stands for: YAML or JSON."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from octavo.worker.models.errors import ModelLoadError

_PROFILES = files("octavo.worker.simulated") / "profiles"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelShape(_Part):
    """A dense decoder of the Llama family."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    weight_bytes: PositiveInt
    """Of one weight, and of one activation."""
    kv_bytes: PositiveInt
    """Of one number of K or V."""
    max_model_len: PositiveInt
    """Positions that the model was trained for."""
    eos_token_ids: tuple[int, ...]

    @property
    def layer_params(self) -> int:
        """Weights of one layer's matrices."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_bytes


class Device(_Part):
    """One GPU, as its kernels run on it."""

    bytes_per_s: PositiveFloat
    """Of memory, at the best."""
    flops_per_s: PositiveFloat
    """Of matrix products, at the best."""
    prefill_attention_flops_per_s: PositiveFloat
    corner: float = Field(ge=1)
    """How round the corner of the roofline is: a product takes (m^c + f^c)^(1/c) where memory alone takes m and
    arithmetic alone f. Infinity would be the larger of both."""
    product_launch_us: float = Field(ge=0)
    """Ramp and tail of a matrix product, of which a layer has four."""
    attention_launch_us: float = Field(ge=0)
    """The same of attention, for decodes and for prefills apart."""
    other_launch_us: float = Field(ge=0)
    """The same of what else there is, four launches a layer."""
    single_row_overlaps: bool
    """In a step of one row launches hide behind the reading of weights, those of attention excepted."""
    step_us: float = Field(ge=0)
    """From the end of a step to the beginning of the next, and what else a step has once."""
    host_link_bytes_per_s: PositiveFloat
    """To host memory and back, each way."""


class Limits(_Part):
    """What a worker offers if its settings leave it open."""

    kv_cache_bytes: PositiveInt
    host_cache_bytes: int = Field(ge=0)
    max_num_seqs: PositiveInt
    max_num_batched_tokens: PositiveInt


class Profile(_Part):
    """A model on a device."""

    model: ModelShape
    device: Device
    limits: Limits

    @classmethod
    def load(cls, name: str) -> Self:
        """A profile of this package by its name, or a file by its path. Raises ModelLoadError."""
        built_in = _PROFILES / f"{name}.yaml"
        is_path = "/" in name or name.endswith((".yaml", ".yml", ".json"))
        try:
            if not is_path and not built_in.is_file():
                raise ModelLoadError(
                    f"there is no profile {name}; there are {', '.join(profile_names())}, and files by their path"
                )
            text = (Path(name) if is_path else built_in).read_text(encoding="utf-8")
            return cls.model_validate(yaml.safe_load(text))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ModelLoadError(f"profile {name} cannot be read: {error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the file"
            raise ModelLoadError(f"profile {name}: {field}: {first['msg']}") from error


def profile_names() -> list[str]:
    """Profiles that come with the package."""
    return sorted(file.name.removesuffix(".yaml") for file in _PROFILES.iterdir() if file.name.endswith(".yaml"))
