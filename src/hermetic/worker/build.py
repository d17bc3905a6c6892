"""From options to a worker: sizes first (they can refuse to start), then weights, kernels and pool."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import msgspec

from hermetic.kv.geometry import Geometry
from hermetic.kv.lineage import Hasher, Secret
from hermetic.kv.pool import Pool
from hermetic.kv.seals import SealKey
from hermetic.model.config import ModelConfig
from hermetic.options import OptionError, format_size
from hermetic.transport.choose import open_transport
from hermetic.worker.core import Parts, Send, Worker, numeric_mode
from hermetic.worker.link import BEAT_SECONDS
from hermetic.worker.messages import WorkerInfo
from hermetic.worker.wire import CurveKeys, host_id, new_incarnation

MOST_SECONDS = 86_400.0
VERIFY = ("tags", "landing", "read")
Progress = Callable[[float, str], None]


class WorkerConfig(msgspec.Struct, frozen=True):
    """Everything a worker process is told at start. Holds secrets: it travels on standard input only."""

    name: str
    role: str
    model: str
    dtype: str
    kv_bytes: int
    page_size: int
    verify: str
    context_length: int | None
    chunk: int
    max_batch: int
    threads: int
    host: str  # the control port's address, and the transport's; nothing else is bound
    secret: bytes
    keys: CurveKeys
    log_format: str
    port: int = 0  # of the control channel; 0 takes a free one
    advertise: str = ""  # the address that others dial, when it is not `host`
    gateways: tuple[
        str, ...
    ] = ()  # where this worker announces itself: tcp://HOST:PORT of their control ports
    transport: str = "shm"
    source: str = ""  # where this worker's data come from, when it is not `advertise` or `host`; "any" if that is not known
    slots: int = 64  # landing slots for each peer
    drain_seconds: float = 30.0  # how long decode waits for *drained* before it fences or quarantines
    silent_seconds: float = 30.0  # without a sign of life after which the other end is taken for lost
    transfer_floor: int = 50_000_000  # bytes a second of the slowest link that is accepted
    trace: str = ""  # file that the protocol's events are appended to; "" for none
    supervised: bool = True  # standard input is the parent's: its end is ours


class Sizes(msgspec.Struct, frozen=True):
    """What a worker's memory comes to."""

    geometry: Geometry
    pages: int
    window: int


def sizes(config: WorkerConfig, model: ModelConfig) -> Sizes:
    """Measure the pool against what was asked. Raises OptionError with both numbers and what would fit."""
    check_numbers(config)
    dtype = "f32" if config.dtype == "float32" else "bf16"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.kv_bytes > memory:
        raise OptionError(
            f"{_option(config.role)} {format_size(config.kv_bytes)} is more than this machine's memory of {format_size(memory)}"
        )
    geometry = Geometry.attention(config.page_size, model.layers, model.kv_heads, model.head_dim, dtype)
    pages, option = config.kv_bytes // geometry.stride, _option(config.role)
    if pages < 1:
        raise OptionError(
            f"{option} {format_size(config.kv_bytes)} does not hold one page: a page of {config.page_size} tokens of this "
            f"model takes {format_size(geometry.stride)}; give at least that, or a smaller --page-size"
        )
    window = model.window
    if config.context_length is not None:
        if config.context_length < 2:
            raise OptionError(
                f"--context-length {config.context_length}: a prompt and an answer need at least 2 tokens"
            )
        if config.context_length > model.window:
            raise OptionError(
                f"--context-length {config.context_length} is more than the model's window of {model.window} tokens; "
                f"{model.window} would fit"
            )
        held = pages * config.page_size
        if config.context_length > held:
            needed = geometry.pages_for(config.context_length) * geometry.stride
            raise OptionError(
                f"--context-length {config.context_length} does not fit the {config.role} pool: {option} "
                f"{format_size(config.kv_bytes)} holds {held} tokens ({pages} pages of {config.page_size}). "
                f"--context-length {held} would fit, or {option} {needed} (bytes) for {config.context_length} tokens"
            )
        window = config.context_length
    if window < 2 or pages * config.page_size < 2:
        raise OptionError(
            f"{option} {format_size(config.kv_bytes)} holds {pages * config.page_size} token; two are needed"
        )
    check_bounds(config, geometry)
    return Sizes(geometry, pages, window)


def check_numbers(config: WorkerConfig) -> None:
    """What is wrong whatever the model is. Raises OptionError."""
    if config.page_size < 1 or config.page_size > 512:
        raise OptionError(f"--page-size {config.page_size}: a page holds 1 to 512 tokens")
    if config.slots < 1:
        raise OptionError(f"--landing-slots {config.slots}: a peer needs at least one")
    if config.transfer_floor < 1 or config.drain_seconds <= 0 or config.silent_seconds <= 0:
        raise OptionError("--transfer-floor, --drain-deadline and --silent-after must be more than 0")
    if max(config.silent_seconds, config.drain_seconds) > MOST_SECONDS:
        raise OptionError(f"--silent-after and --drain-deadline are at most {MOST_SECONDS:g} s, a day")
    if config.silent_seconds < 2 * BEAT_SECONDS:
        raise OptionError(
            f"--silent-after {config.silent_seconds:g} s: signs of life come every {BEAT_SECONDS:g} s; give at least "
            f"{2 * BEAT_SECONDS:g}"
        )


def write_seconds(config: WorkerConfig) -> float:
    """How long all that one peer has in flight may take to arrive, and how long a transport waits for it."""
    return config.drain_seconds / 2


def check_bounds(config: WorkerConfig, geometry: Geometry) -> None:
    """Everything that one peer can have in flight must arrive well within the drain deadline, or slow would look like lost.

    Raises OptionError with the numbers and what would do."""
    flight = config.slots * geometry.stride
    seconds = flight / config.transfer_floor
    if seconds > write_seconds(config):
        fits = int(write_seconds(config) * config.transfer_floor / geometry.stride)
        raise OptionError(
            f"--drain-deadline {config.drain_seconds:g} s is too short: {config.slots} landing slots of "
            f"{format_size(geometry.stride)} are {format_size(flight)} in flight, {seconds:.1f} s at --transfer-floor "
            f"{format_size(config.transfer_floor)} a second, and twice that must fit. "
            f"--drain-deadline {math.ceil(2 * seconds)} would do"
            + (f", or --landing-slots {fits}" if fits else "")
        )


def _option(role: str) -> str:
    return "--prefill-kv" if role == "prefill" else "--decode-kv"


def build(
    config: WorkerConfig,
    send: Send,
    progress: Progress,
    address: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> Worker:
    """Load and compile everything. `address` is where the control port can be dialled; `clock` is monotonic, in seconds.

    Raises OptionError, ModelError or TransportError for what the user can mend."""
    import numba
    import torch

    from hermetic.engine.batch import Rows
    from hermetic.engine.engine import Engine, Role
    from hermetic.engine.runner import Runner
    from hermetic.kernels.numba_cpu import NumbaKernels
    from hermetic.model import sampling
    from hermetic.model.decoder import Decoder
    from hermetic.model.source import locate
    from hermetic.model.weights import read_config
    from hermetic.worker.decode import DecodeWorker
    from hermetic.worker.prefill import PrefillWorker

    torch.set_num_threads(config.threads)
    numba.set_num_threads(min(config.threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    transport = (
        open_transport(config.transport, config.host, write_seconds(config))
        if config.role != "unified"
        else None
    )
    source = locate(config.model)
    measured = sizes(config, read_config(source))
    decoder = Decoder.load(
        source,
        config.dtype,
        lambda fraction, text: progress(0.8 * fraction, text.replace("ready", "weights are ready")),
        config.chunk + config.max_batch,
    )
    geometry, secret, model = measured.geometry, Secret(config.secret), decoder.config
    pool = Pool(geometry, measured.pages)
    key = SealKey(secret, geometry)
    kernels = NumbaKernels(geometry, key, model.heads, model.head_dim**-0.5, geometry.components[0].dtype)  # type: ignore[arg-type]
    progress(0.8, "compiling attention kernels")
    kernels.warm()
    sampling.warm_up()
    max_tokens = min(measured.window, pool.count * geometry.page_size)
    rows = Rows(config.max_batch, geometry.pages_for(max_tokens))
    runner = Runner(decoder, kernels, pool, rows, verify_reads=config.verify == "read")
    hasher = Hasher(secret)
    engine = Engine(runner, hasher, key, Role(config.role), max_tokens, model.eos_token_ids, config.chunk)
    info = WorkerInfo(
        worker=config.name,
        role=config.role,
        incarnation=new_incarnation(),
        pid=os.getpid(),
        host=host_id(),
        address=address,
        source="" if config.source == "any" else config.source or config.advertise or config.host,
        transport=config.transport if config.role != "unified" else "",
        slots=config.slots if config.role == "decode" else 0,
        model=decoder.fingerprint,
        numeric=numeric_mode(config.dtype),
        position=f"{model.rope.kind} {model.rope.scaling!r} {','.join(repr(f) for f in model.rope.inv_freq)}",
        geometry=geometry,
        key_id=secret.key_id,
        pages=pool.count,
        page_size=geometry.page_size,
        max_tokens=max_tokens,
        window=model.window,
        vocab=model.vocab,
        max_batch=config.max_batch,
        verify=config.verify,
        eos=tuple(model.eos_token_ids),
    )
    parts = Parts(info, engine, hasher, clock)
    progress(1.0, "ready")
    if transport is None:
        return Worker(parts, send)
    if engine.role is Role.PREFILL:
        return PrefillWorker(parts, send, transport)
    return DecodeWorker(parts, send, transport, config.verify != "tags", config.slots, config.drain_seconds)
