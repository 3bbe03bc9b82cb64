"""How vLLM is started: its environment and arguments, on CPU and on CUDA.

With `weight_sync.quantization = "fp8_block_128"` on a GPU that has fp8, the engine holds its linear layers as e4m3 with
128x128 scales. vLLM would look for such weights in the checkpoint, which has others; it starts with dummy ones, since
the first update always comes before the first request. Elsewhere the weights are dequantised on arrival.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.fp8_layers import fp8_modules, plain_modules
from services.common.model_overrides import config_of
from services.common.spec import ModelSpec, RunSpec

STREAM_INTERVAL_TOKENS = 32
"""vLLM hands out tokens of a running request in portions of this size: each portion wakes a task."""
BATCHED_TOKENS = 8192
"""Tokens of one step; where prompts are never split, at least the longest prompt."""
GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 1024, 64), *range(1024, 8193, 128))
"""Steps of how many tokens CUDA graphs may be captured for; between two the larger one is used."""
GRAPH_TOKENS = 4
"""Graphs reach to this many tokens for each sequence. vLLM by itself stops at two, and at 512 tokens: a step that
admits prompts beside a full batch then runs without one, and in rollouts every tenth step or more does."""
CPU_KV_CACHE_GIB = 1
GIB = 1 << 30
FP8_CAPABILITY = 89
"""First CUDA compute capability with fp8 matrix products, times 10."""
BLOCK = 128


def load_llm(spec: RunSpec, worker_extension: str) -> Any:
    """An AsyncLLM with the model loaded, in processes of its own.

    Args:
        spec: The run.
        worker_extension: Dotted name of the class that receives weights in the workers.

    Raises:
        FailedPrecondition: vLLM refuses the model or the settings.
    """
    _set_environment(spec)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    if current_platform.is_cpu():
        _set_cpu_environment()
    arguments = AsyncEngineArgs(
        model=str(spec.model.hf_checkpoint),
        dtype=spec.engine.dtype,
        max_model_len=spec.engine.max_model_len,
        max_num_seqs=spec.engine.max_num_seqs,
        enforce_eager=spec.engine.enforce_eager,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=worker_extension,
        seed=spec.rollout.seed,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        stream_interval=STREAM_INTERVAL_TOKENS,
        hf_config_path=str(write_configs(spec.model)) if spec.model.overrides else None,
        **(_cpu_arguments(spec) if current_platform.is_cpu() else _gpu_arguments(spec, current_platform)),
    )
    try:
        return AsyncLLM.from_engine_args(arguments)
    except ValueError as error:
        raise FailedPrecondition(f"vLLM refuses the model or a field of [engine]: {error}") from error


def write_configs(model: ModelSpec) -> Path:
    """The checkpoint's configs as the run has them, in a directory that lives as long as this process.

    vLLM's own overrides come after it has read the file, too late for a field that has another spelling inside.
    """
    directory = Path(tempfile.mkdtemp(prefix="flotilla-model-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "config.json").write_text(json.dumps(config_of(model.hf_checkpoint, model.overrides)))
    generation = model.hf_checkpoint / "generation_config.json"
    if generation.is_file():
        shutil.copy2(generation, directory)
    return directory


def _set_environment(spec: RunSpec) -> None:
    """What vLLM reads when it is imported."""
    if "VLLM_RPC_BASE_PATH" not in os.environ:  # of sockets, which vLLM leaves where they are
        os.environ["VLLM_RPC_BASE_PATH"] = tempfile.mkdtemp(prefix="flotilla-engine-")
        atexit.register(shutil.rmtree, os.environ["VLLM_RPC_BASE_PATH"], ignore_errors=True)
    # vLLM's processes are spawned: a fork would copy the gRPC server.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Threads that spin while they wait for each other halve the speed where other services want the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if spec.engine.num_threads:
        os.environ["OMP_NUM_THREADS"] = str(spec.engine.num_threads)


def _set_cpu_environment() -> None:
    """What vLLM's processes read when they start."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def _cpu_arguments(spec: RunSpec) -> dict[str, Any]:
    return {
        "kv_cache_memory_bytes": int((spec.engine.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB),
        # vLLM on CPU dies when it splits the prompt of a request that has a seed.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(spec.engine.max_model_len, BATCHED_TOKENS),
    }


def _gpu_arguments(spec: RunSpec, platform: Any) -> dict[str, Any]:
    fp8 = (
        spec.weight_sync.quantization == "fp8_block_128"
        and spec.engine.dtype == "bfloat16"
        and platform.has_device_capability(FP8_CAPABILITY)
    )
    kv_cache = {"kv_cache_memory_bytes": int(spec.engine.kv_cache_gib * GIB)} if spec.engine.kv_cache_gib else {}
    return {
        "gpu_memory_utilization": spec.engine.gpu_memory_utilization,
        **kv_cache,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "cudagraph_capture_sizes": None if spec.engine.enforce_eager else graph_sizes(spec.engine.max_num_seqs),
        **(_fp8_arguments(spec.model.hf_checkpoint) if fp8 else {}),
    }


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of tokens in a step that CUDA graphs are captured for, ascending."""
    most = min(GRAPH_TOKENS * max_num_seqs, BATCHED_TOKENS)
    return [size for size in GRAPH_SIZES if size <= most]


def _fp8_arguments(checkpoint: Path) -> dict[str, Any]:
    return {"load_format": "dummy", "hf_overrides": {"quantization_config": block_fp8_config(checkpoint)}}


def block_fp8_config(checkpoint: Path) -> dict[str, Any]:
    """What vLLM is told of the weights that will come: those that a checkpoint in block fp8 would have.

    Raises:
        InvalidArgument: The model is not of a known family.
    """
    config_file = checkpoint / "config.json"
    config = json.loads(config_file.read_text())
    shapes = _matrices(checkpoint)
    try:
        quantised = fp8_modules(shapes, config.get("model_type"), (BLOCK, BLOCK))
    except ValueError as error:
        raise InvalidArgument(f"{config_file}: {error}") from None
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": plain_modules(shapes, quantised),
    }


def _matrices(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """Shapes of the two-dimensional weights of a checkpoint by module, from its headers alone."""
    from safetensors import safe_open

    found = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        found |= {
            name.removesuffix(".weight"): s for name, s in shapes.items() if len(s) == 2 and name.endswith(".weight")
        }
    return found
