"""``edgespec verifier``: the daemon that serves the target model."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Annotated

import typer

from edgespec.cli import options, tls_options
from edgespec.cli.running import FAILED, reported, say, set_up_logging, trace_to
from edgespec.cli.serving import serve
from edgespec.config import VerifierConfig

KEYS = {
    "model": "model",
    "name": "name",
    "engine": "engine",
    "engine_flags": "engine_flags",
    "host": "host",
    "port": "port",
    "dtype": "dtype",
    "device": "device",
    "quantize": "quantize",
    "canonical": "canonical",
    "cuda_graphs": "cuda_graphs",
    "tensor_parallel_size": "tensor_parallel.size",
    "pipeline_stages": "pipeline.stages",
    "stage_delay_ms": "pipeline.delay_ms",
    "max_sessions": "limits.max_sessions",
    "max_model_len": "max_model_len",
    "kv_budget": "limits.kv_budget",
    "gpu_memory_utilization": "limits.gpu_memory_utilization",
    "server_drafts": "server_drafts",
    "keys": "keys",
    **tls_options.VERIFIER_TLS_KEYS,
    "insecure": "insecure",
    "drain_s": "drain_s",
    "pass_ms": "pacing.pass_ms",
    "trace": "trace",
    "metrics_port": "metrics_port",
    "metrics_host": "metrics_host",
    "log_level": "log_level",
    "log_format": "log_format",
}
WITH_PARENT = "--with-parent"
"""Ends the verifier with the process that holds the other end of its standard input."""
WithParent = Annotated[
    bool, typer.Option(WITH_PARENT, hidden=True, help="Stop when standard input ends")
]
ServerDrafts = Annotated[
    bool | None,
    typer.Option(
        "--server-drafts/--no-server-drafts",
        help="Guess from the text itself where a device sends no draft (default: on)",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        envvar="EDGESPEC_MODEL",
        help="bundled, a folder, a Hub id, toy (default: bundled)",
    ),
]
Engine = Annotated[
    str | None,
    typer.Option("--engine", help="native, or vllm: several GPUs or hosts (default: native)"),
]
EngineFlags = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- FLAGS]", help="vLLM's own flags", show_default=False),
]
Name = Annotated[
    str | None, typer.Option("--name", help="What devices ask for (default: the model's)")
]
Host = Annotated[
    str | None,
    typer.Option("--host", help="Address to listen at (default: 127.0.0.1, this machine)"),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port", "-p", envvar="EDGESPEC_PORT", help="Port to listen at, 0: any (default: 7420)"
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="auto (float32 on a CPU), float32, bfloat16, float16"),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="auto (a GPU if there is one), cpu, cuda, cuda:N"),
]
Quantize = Annotated[
    str | None,
    typer.Option("--quantize", help="Round the weights to int8 or int4, on a CPU (default: no)"),
]
Canonical = Annotated[
    bool | None,
    typer.Option(
        "--canonical/--no-canonical",
        help="Same bits under every schedule (default: on CPUs)",
    ),
]
CudaGraphs = Annotated[
    bool | None,
    typer.Option(
        "--cuda-graphs/--no-cuda-graphs",
        help="Record small passes on a GPU and repeat them (default: on)",
    ),
]
TensorParallelSize = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel-size",
        metavar="N",
        help="Share the model among N processes of this host, a GPU each (default: 1)",
    ),
]
PipelineStages = Annotated[
    int | None,
    typer.Option(
        "--pipeline-stages",
        metavar="N",
        help="Experimental: lay the model's layers on N processes of this host (default: 1)",
    ),
]
StageDelayMs = Annotated[
    float | None,
    typer.Option(
        "--stage-delay-ms", help="With them: emulate slow links, time of each, one way (default: 0)"
    ),
]
MaxSessions = Annotated[
    int | None, typer.Option("--max-sessions", help="Sessions at a time (default: 64)")
]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", help="Context in tokens (default: the model's)")
]
KvBudget = Annotated[
    str | None,
    typer.Option(
        "--kv-budget",
        help="Memory of cached keys and values: 4GiB, 25%, auto (default: 65,536 tokens)",
    ),
]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization",
        help="Or: share of the GPU for weights, passes and cache together, such as 0.9",
    ),
]
PassMs = Annotated[
    float | None, typer.Option("--pass-ms", help="Emulate a slower target: time of a pass")
]
ServiceKeys = Annotated[
    str | None,
    typer.Option(
        "--keys",
        metavar="FILE",
        help="Let in who shows one of these keys (`edgespec keys`)",
        rich_help_panel=tls_options.SERVICE,
    ),
]
Insecure = Annotated[
    bool | None,
    typer.Option(
        "--insecure/--no-insecure",
        help="Listen beyond this machine without TLS",
        rich_help_panel=tls_options.SERVICE,
    ),
]
DrainS = Annotated[
    float | None,
    typer.Option(
        "--drain-s",
        help="How long streams may go on after SIGTERM (default: 30)",
        rich_help_panel=tls_options.SERVICE,
    ),
]


def verifier(
    context: typer.Context,
    engine_flags: EngineFlags = None,
    model: Model = None,
    name: Name = None,
    engine: Engine = None,
    tensor_parallel_size: TensorParallelSize = None,
    pipeline_stages: PipelineStages = None,
    stage_delay_ms: StageDelayMs = None,
    host: Host = None,
    port: Port = None,
    dtype: Dtype = None,
    device: Device = None,
    quantize: Quantize = None,
    canonical: Canonical = None,
    cuda_graphs: CudaGraphs = None,
    max_sessions: MaxSessions = None,
    max_model_len: MaxModelLen = None,
    kv_budget: KvBudget = None,
    gpu_memory_utilization: GpuMemoryUtilization = None,
    server_drafts: ServerDrafts = None,
    keys: ServiceKeys = None,
    tls_cert: tls_options.TlsCert = None,
    tls_key: tls_options.TlsKey = None,
    client_ca: tls_options.ClientCa = None,
    insecure: Insecure = None,
    drain_s: DrainS = None,
    pass_ms: PassMs = None,
    metrics_port: options.MetricsPort = None,
    metrics_host: options.MetricsHost = None,
    trace: options.Trace = None,
    log_level: options.LogLevel = None,
    log_format: options.LogFormat = None,
    config: options.Config = None,
    print_config: options.PrintConfig = False,
    with_parent: WithParent = False,
) -> None:
    """Serve a target model to devices, until Ctrl-C or SIGTERM.

    Prints one line when it is ready. To stop, it takes no new streams, lets the running ones go on
    for --drain-s seconds and tells the rest, who come back when a verifier does; a second Ctrl-C
    ends at once. SIGHUP reads keys and certificates again. Without TLS it listens on this machine
    alone.

    [dim]edgespec verifier --model Qwen/Qwen3-8B[/]

    [dim]edgespec verifier --model Qwen/Qwen3-32B --tensor-parallel-size 4[/]

    [dim]edgespec verifier --host 0.0.0.0 --tls-cert s.pem --tls-key s.key --keys keys.yaml[/]

    [dim]edgespec verifier --engine vllm --model M --tensor-parallel-size 4 -- --max-num-seqs 99[/]
    """
    with reported():
        settings = options.configured(VerifierConfig, context, KEYS)
        set_up_logging(settings.log_level, settings.log_format)
        with trace_to(settings.trace, settings.trace_tokens) as tracer:
            failure = asyncio.run(serve(settings, tracer, with_parent))
        _leave(failure)


def _leave(failure: str | None) -> None:
    """After a failure: end the process, and wait for no thread that may hang in the target."""
    if failure is None:
        return
    say(f"error: the verifier failed: {failure}")
    logging.shutdown()
    os._exit(FAILED)
