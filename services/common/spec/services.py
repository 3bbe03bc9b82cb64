"""Where services listen, and how engines, transfers of weights and Redis are set up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from services.common.spec.base import Strict


class Endpoint(Strict):
    """Where one service listens."""

    host: str = "127.0.0.1"
    """Name or address that others use."""
    grpc_port: int = Field(ge=1, le=65535)
    """Port of its gRPC server."""
    http_port: int = Field(ge=1, le=65535)
    """Port of /livez, /readyz, /metrics and /statusz."""
    bind: str = "127.0.0.1"
    """Interface to listen on; only loopback unless told otherwise."""

    @property
    def grpc(self) -> str:
        """host:port of the gRPC server."""
        return f"{self.host}:{self.grpc_port}"

    @property
    def http(self) -> str:
        """host:port of the HTTP server."""
        return f"{self.host}:{self.http_port}"


class DeviceEndpoint(Endpoint):
    """Where a process that computes on GPUs listens, and on which."""

    gpus: list[Annotated[int, Field(ge=0)]] = []
    """CUDA devices that `flotilla up` lets the process see; trainer and engine use the first. None named leaves all
    visible, or none where vLLM is installed for the CPU."""

    @field_validator("gpus")
    @classmethod
    def _each_once(cls, value: list[int]) -> list[int]:
        if len(set(value)) < len(value):
            raise ValueError(f"{value} names a GPU twice")  # CUDA would show the process none
        return value


def _default_endpoint(offset: int) -> Endpoint:
    return Endpoint(grpc_port=7700 + offset, http_port=7800 + offset)


def _default_device_endpoint(offset: int) -> DeviceEndpoint:
    return DeviceEndpoint(grpc_port=7700 + offset, http_port=7800 + offset)


class ServicesSpec(Strict):
    """Where the services listen."""

    buffer: Endpoint = _default_endpoint(0)
    """The buffer, with the run registry."""
    reward: Endpoint = _default_endpoint(1)
    """The reward service."""
    rollout_gateway: Endpoint = _default_endpoint(2)
    """The gateway."""
    trainer: DeviceEndpoint = _default_device_endpoint(3)
    """Rank 0 of the trainer, which serves TrainerService."""
    trainer_ranks: list[DeviceEndpoint] = []
    """The other ranks of the trainer, from rank 1 on."""
    trainer_meeting_port: int = Field(default=7705, ge=1, le=65535)
    """Where the ranks meet, on the host of rank 0; torchrun brings its own."""
    weight_sync: Endpoint = _default_endpoint(4)
    """The coordinator."""
    weight_agents: list[DeviceEndpoint] = Field(default=[_default_device_endpoint(10)], validate_default=True)
    """One for each trainer rank."""
    engines: list[DeviceEndpoint] = [_default_device_endpoint(20)]
    """One for each engine."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        """Naming one field of an endpoint keeps the defaults of the others."""
        if not isinstance(value, dict):
            return value
        defaults = {name: field.default for name, field in cls.model_fields.items()}
        return {
            name: defaults[name].model_dump() | given
            if isinstance(given, dict) and isinstance(defaults.get(name), Endpoint)
            else given
            for name, given in value.items()
        }

    @field_validator("weight_agents")
    @classmethod
    def _one_for_each_rank(cls, value: list[DeviceEndpoint], info: ValidationInfo) -> list[DeviceEndpoint]:
        ranks = 1 + len(info.data.get("trainer_ranks", []))
        if len(value) != ranks:
            raise ValueError(f"there are {len(value)}, and the trainer has {ranks} ranks: give one for each")
        return value

    @field_validator("engines")
    @classmethod
    def _some_engine(cls, value: list[DeviceEndpoint]) -> list[DeviceEndpoint]:
        if not value:
            raise ValueError("give at least one engine")
        return value

    @property
    def trainers(self) -> list[DeviceEndpoint]:
        """All ranks of the trainer."""
        return [self.trainer, *self.trainer_ranks]


class EngineSpec(Strict):
    """The vLLM engines."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameters and activations in the engine."""
    max_model_len: int = Field(default=4096, ge=16)
    """Longest prompt and response together."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Samples that run at once inside vLLM; more wait there."""
    kv_cache_gib: float = Field(default=0, ge=0)
    """Size of the KV cache, in GiB; 0 takes 1 on CPU, and on a GPU what gpu_memory_utilization leaves.

    Set it where the engine shares its GPU: vLLM's own measurement fails if others free memory meanwhile."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of a GPU's memory that vLLM takes, weights included; weights on their way need space beside it."""
    enforce_eager: bool = True
    """Off compiles the model first: slower start, faster tokens."""
    num_threads: int = Field(default=0, ge=0)
    """CPU threads of one engine; 0 leaves it to torch."""
    server_concurrency: int = Field(default=512, ge=1)
    """Samples that the gateway gives one engine at once."""


class WeightSyncSpec(Strict):
    """How weights travel to the engines."""

    quantization: Literal["fp8_block_128", "none"] = "fp8_block_128"
    """`fp8_block_128` sends linear layers as e4m3 with 128x128 scales; `none` sends every tensor as it is."""
    bucket_bytes: int = Field(default=256 << 20, ge=1 << 16)
    """Tensors travel together up to this size."""
    session_timeout_s: float = Field(default=120, gt=0)
    """A transfer that takes longer is cut short and tried again."""


class RedisSpec(Strict):
    """The Redis that holds the ledger."""

    host: str = "127.0.0.1"
    """Name or address."""
    port: int = Field(default=7790, ge=1, le=65535)
    """Port."""
    maxmemory_mb: int = Field(default=2048, ge=64)
    """Limit of the Redis that `flotilla up` starts; it never evicts."""
    username: str = ""
    """ACL user; empty is the default user."""
    password_file: Path = Path()
    """File with the password; none is sent unless given."""
    tls: bool = False
    """Connect with TLS, and check the server's certificate."""
    tls_ca_file: Path = Path()
    """Certificates (PEM) that sign the server's; the system's unless given."""
