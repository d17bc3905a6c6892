"""The `hermetic` command: one thin function per capability.

The one thing to know: nothing heavy is imported before a command runs, so `--help` is instant, and the base install works
without torch. A command whose extra is missing says which one to install.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from hermetic import __version__
from hermetic.options import (
    DTYPES,
    LOG_FORMATS,
    MODES,
    ON_DISCONNECT,
    TRANSPORTS,
    VERIFY,
    WORKER_ENVIRONMENT,
    OptionError,
    ServeOptions,
    format_size,
    parse_size,
)

if TYPE_CHECKING:
    from hermetic.model.info import ModelInfo

app = typer.Typer(
    help="LLM inference in which a request only ever attends to its own KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What `hermetic[serve]` brings: the modules whose absence means that the extra was not installed.
_SERVE_MODULES = frozenset({
    "torch", "numpy", "numba", "transformers", "safetensors", "gguf", "sentencepiece", "huggingface_hub", "fastapi",
    "starlette", "uvicorn", "uvloop", "httptools", "zmq",
})  # fmt: skip
_PROOF_MODULES = frozenset({"z3"})

_DEFAULT = ServeOptions()


def main() -> None:
    """The entry point. Errors that a person can mend are one line on standard error and exit code 2."""
    try:
        app()
    except OptionError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        extra = "serve" if missing in _SERVE_MODULES else "proof" if missing in _PROOF_MODULES else ""
        if not extra:
            raise
        _fail(f"this command needs {missing}, which is not installed: pip install 'hermetic[{extra}]'")


def _own_fault(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> NoReturn:
    """An error that nobody foresaw. Python would end with 1, which `audit`, `prove` and others use for what they found."""
    traceback.print_exception(kind, error, trace)
    if issubclass(kind, KeyboardInterrupt):
        raise SystemExit(130)
    print(
        "error: this is a fault of hermetic itself; it says nothing about what it looked at", file=sys.stderr
    )
    raise SystemExit(2)


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hermetic {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """LLM inference in which a request only ever attends to its own KV cache."""
    sys.excepthook = _own_fault


def _mib(size: int) -> str:
    return f"{size // 1024**2}MiB"


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise OptionError(f"{option} is {value!r}; it must be one of {', '.join(allowed)}")
    return value


@app.command()
def serve(
    model: Annotated[
        str, typer.Option(help="A Hugging Face directory or id, a .gguf file, or smollm2.")
    ] = _DEFAULT.model,
    mode: Annotated[
        str, typer.Option(help="disaggregated: prefill and decode apart. unified: one worker does both.")
    ] = _DEFAULT.mode,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need --api-keys.")
    ] = _DEFAULT.host,
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = _DEFAULT.port,
    context_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and answer to offer. Default: what the pools and the model allow.", min=1
        ),
    ] = None,
    prefill_kv: Annotated[
        str, typer.Option(help="Memory of the prefill worker's KV pool, like 256MiB.")
    ] = _mib(_DEFAULT.prefill_kv),
    decode_kv: Annotated[
        str, typer.Option(help="Memory of the decode (or unified) worker's KV pool.")
    ] = _mib(_DEFAULT.decode_kv),
    page_size: Annotated[int, typer.Option(help="Tokens in a KV page.", min=1)] = _DEFAULT.page_size,
    verify: Annotated[
        str,
        typer.Option(
            help="tags: identity at every step. landing: also bytes when they arrive. read: also bytes at every read."
        ),
    ] = _DEFAULT.verify,
    dtype: Annotated[str, typer.Option(help="bf16, or float32 to compare with references.")] = _DEFAULT.dtype,
    api_keys: Annotated[
        str | None, typer.Option(help="TOML file of tenants and the hashes of their keys.")
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="The model's name in the API. Default: --model.")
    ] = None,
    max_batch: Annotated[
        int, typer.Option(help="Sequences in one decode step at most.", min=1)
    ] = _DEFAULT.max_batch,
    chunk: Annotated[
        int, typer.Option(help="Prompt tokens computed in one step at most.", min=1)
    ] = _DEFAULT.chunk,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads of each worker. Default: the cores there are, shared out.", min=1),
    ] = None,
    prefill_workers: Annotated[
        int, typer.Option(help="Prefill workers, each with its own pool.", min=1)
    ] = _DEFAULT.prefill_workers,
    decode_workers: Annotated[
        int, typer.Option(help="Decode (or unified) workers, each with its own pool.", min=1)
    ] = _DEFAULT.decode_workers,
    transport: Annotated[
        str, typer.Option(help="How pages move: shm, mooncake or nixl.")
    ] = _DEFAULT.transport,
    on_disconnect: Annotated[
        str,
        typer.Option(
            help="A client leaves: drain lets its running transfer and first token finish, cancel does not."
        ),
    ] = _DEFAULT.on_disconnect,
    landing_slots: Annotated[
        int, typer.Option(help="Pages in flight from one prefill worker to one decode worker at most.", min=1)
    ] = _DEFAULT.landing_slots,
    drain_deadline: Annotated[
        float, typer.Option(help="Seconds until a transfer that does not end is fenced or quarantined.")
    ] = _DEFAULT.drain_deadline,
    silent_after: Annotated[
        float, typer.Option(help="Seconds without a sign of life after which a worker is left out.")
    ] = _DEFAULT.silent_after,
    transfer_floor: Annotated[
        str, typer.Option(help="Slowest transfer to reckon with, a second, like 50MB.")
    ] = "50MB",
    trip_failures: Annotated[
        int,
        typer.Option(
            help="Integrity failures within --trip-minutes that disable the model. 0: never.", min=0
        ),
    ] = _DEFAULT.trip_failures,
    trip_minutes: Annotated[float, typer.Option(help="See --trip-failures.")] = _DEFAULT.trip_minutes,
    state_file: Annotated[
        str | None, typer.Option(help="File that keeps a disabled model disabled over a restart.")
    ] = None,
    log_format: Annotated[str, typer.Option(help="text or json, one line an event.")] = _DEFAULT.log_format,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Record what the handoff protocol does in FILE, emptied first; see `hermetic prove --conform`. "
            "No tokens stand in it.",
        ),
    ] = None,
) -> None:
    """Serve a model over an OpenAI-compatible API: gateway and workers on this machine."""
    options = ServeOptions(
        model=model,
        mode=_one_of("--mode", mode, MODES),
        host=host,
        port=port,
        context_length=context_length,
        prefill_kv=parse_size(prefill_kv),
        decode_kv=parse_size(decode_kv),
        page_size=page_size,
        verify=_one_of("--verify", verify, VERIFY),
        dtype=_one_of("--dtype", dtype, DTYPES),
        api_keys=api_keys,
        served_name=served_name,
        max_batch=max_batch,
        chunk=chunk,
        threads=threads,
        log_format=_one_of("--log-format", log_format, LOG_FORMATS),
        prefill_workers=prefill_workers,
        decode_workers=decode_workers,
        transport=_one_of("--transport", transport, TRANSPORTS),
        on_disconnect=_one_of("--on-disconnect", on_disconnect, ON_DISCONNECT),
        drain_deadline=drain_deadline,
        silent_after=silent_after,
        landing_slots=landing_slots,
        transfer_floor=parse_size(transfer_floor),
        trip_failures=trip_failures,
        trip_minutes=trip_minutes,
        state_file=state_file,
        trace=trace,
    )
    typer.echo(f"starting {options.mode} workers for {options.model} ...", err=True)
    from hermetic.serve import main as run

    run(options)


_ClusterPath = Annotated[
    Path, typer.Option("--cluster", help="The cluster file, the same on every machine: docs/cluster.md.")
]
_WorkerName = Annotated[
    str | None, typer.Option("--name", help="Which worker of the file. Default: the only one of this role.")
]
_Trace = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Append what the handoff protocol does here to FILE, for `hermetic prove --conform`. No tokens stand in it.",
    ),
]


@app.command()
def gateway(cluster: _ClusterPath) -> None:
    """Serve the API of a cluster whose workers run elsewhere."""
    from hermetic.run_gateway import main as run

    run(cluster)


@app.command()
def prefill(cluster: _ClusterPath, name: _WorkerName = None, trace: _Trace = None) -> None:
    """Run one prefill worker of a cluster. The first Ctrl-C lets it leave, the second ends it."""
    _worker(cluster, "prefill", name, trace)


@app.command()
def decode(cluster: _ClusterPath, name: _WorkerName = None, trace: _Trace = None) -> None:
    """Run one decode (or unified) worker of a cluster. The first Ctrl-C lets it leave, the second ends it."""
    _worker(cluster, "decode", name, trace)


def _worker(cluster: Path, command: str, name: str | None, trace: str | None) -> None:
    os.environ.update(WORKER_ENVIRONMENT | os.environ)  # before torch is imported, which reads it
    from hermetic.run_worker import main as run

    run(cluster, command, name, trace or "")


@app.command()
def keygen(
    path: Annotated[Path, typer.Argument(help="Where to write the key file.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the keys that are there.")] = False,
) -> None:
    """Make the key file of a cluster. Copy it to every machine of the cluster, and show it to nobody."""
    from hermetic import keys

    made = keys.ClusterKeys.make()
    keys.write(path, made, force)
    print(f"wrote {path} (mode 0600), key id {made.secret.key_id}; name it in the cluster file: keys = ...")


_Url = Annotated[str, typer.Option("--url", help="The gateway.", envvar="HERMETIC_URL")]
_OperatorKey = Annotated[
    str | None,
    typer.Option(
        "--operator-key", help="An operator's key; better in the environment.", envvar="HERMETIC_OPERATOR_KEY"
    ),
]
_URL = "http://127.0.0.1:8000"


@app.command()
def status(
    address: Annotated[str | None, typer.Argument(metavar="[URL]", help="The gateway; or --url.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    url: _Url = _URL,
    operator_key: _OperatorKey = None,
) -> None:
    """List the workers of a running gateway: state, address, capacities, pages."""
    from hermetic import operate

    raise typer.Exit(operate.status(address or url, operator_key, as_json))


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="The worker's name, as `hermetic status` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take requests again.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when it has nothing left, or at once.")
    ] = True,
    url: _Url = _URL,
    operator_key: _OperatorKey = None,
) -> None:
    """Give a worker nothing new, and wait until it has finished what it has."""
    from hermetic import operate

    raise typer.Exit(operate.drain(url, operator_key, worker, undo, wait))


@app.command()
def disable(
    reason: Annotated[str, typer.Option(help="What clients are told.")] = "disabled by the operator",
    url: _Url = _URL,
    operator_key: _OperatorKey = None,
) -> None:
    """Take the model away now: every new request gets 400 with the reason, until `hermetic enable`."""
    from hermetic import operate

    raise typer.Exit(operate.disable(url, operator_key, reason))


@app.command()
def enable(url: _Url = _URL, operator_key: _OperatorKey = None) -> None:
    """Serve again after `hermetic disable`, or after integrity failures disabled the model."""
    from hermetic import operate

    raise typer.Exit(operate.enable(url, operator_key))


@app.command()
def context(
    tokens: Annotated[
        str, typer.Argument(help="The most tokens to advertise, or auto: what the pools hold.")
    ],
    url: _Url = _URL,
    operator_key: _OperatorKey = None,
) -> None:
    """Cap the advertised context of a running gateway, so that workers can be changed one by one."""
    from hermetic import operate

    if tokens != "auto" and not (tokens.isascii() and tokens.isdigit() and int(tokens) >= 2):
        raise OptionError(f"context is {tokens!r}; it must be a number of tokens, at least 2, or auto")
    raise typer.Exit(operate.context(url, operator_key, None if tokens == "auto" else int(tokens)))


@app.command()
def chat(
    message: Annotated[list[str] | None, typer.Argument(help="Ask this once and exit.")] = None,
    url: Annotated[str, typer.Option(help="The server.", envvar="HERMETIC_URL")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="The model. Default: the first that the server names.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The API key.", envvar="HERMETIC_API_KEY")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is the likeliest answer.")] = 0.0,
    max_tokens: Annotated[int | None, typer.Option(help="Default: what the context leaves.")] = None,
) -> None:
    """Talk to a server. Reads one message from standard input if that is not a terminal."""
    from hermetic import chat as client

    options = client.ChatOptions(url, model, api_key, system, temperature, max_tokens)
    raise typer.Exit(client.main(options, message or ()))


@app.command()
def info(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face directory or id, a .gguf file, or smollm2.")
    ] = "smollm2",
    kv: Annotated[list[str] | None, typer.Option(help="Memory for KV, like 256MiB; may be repeated.")] = None,
) -> None:
    """Show a model's layers, its KV bytes a token, and how many tokens a given memory holds."""
    sizes = [parse_size(size) for size in kv or ("256MiB", "512MiB", "1GiB", "4GiB")]
    from hermetic.model.errors import ModelError
    from hermetic.model.info import describe
    from hermetic.model.source import locate

    try:
        described = describe(locate(model))
    except ModelError as error:
        raise OptionError(str(error)) from error
    _show_info(described, sizes)


def _show_info(model: ModelInfo, sizes: list[int]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    facts = Table(title=model.name, title_justify="left", show_header=False, box=None)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in (
        ("architecture", model.architecture),
        ("file", model.file),
        ("parameters", f"{model.parameters:,}"),
        ("layers", f"{model.layers}"),
        ("hidden size", f"{model.hidden:,}"),
        ("heads", f"{model.heads} query, {model.kv_heads} KV, {model.head_dim} wide"),
        ("vocabulary", f"{model.vocab:,}"),
        ("window", f"{model.window:,} tokens"),
        ("RoPE", model.rope),
        ("KV of a token", f"{model.kv_bytes_bf16:,} bytes in bf16, {model.kv_bytes_float32:,} in float32"),
    ):
        facts.add_row(f"[bold]{name}[/bold]", escape(value))
    console.print(facts)
    held = Table(title="Tokens that a KV pool holds", title_justify="left")
    held.add_column("memory")
    held.add_column("bf16", justify="right")
    held.add_column("float32", justify="right")
    for size in sizes:
        held.add_row(format_size(size), f"{model.tokens_in(size):,}", f"{model.tokens_in(size, 'float32'):,}")
    console.print(held)
    console.print(
        "Whole pages of 16 tokens, with their seals: what a server of this model will say that it measured.",
        soft_wrap=True,
    )


@app.command()
def audit(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL...",
            help="http(s)://HOST:PORT, sglang-pd://PREFILL,DECODE?bootstrap_port=8998 or vllm-pd://PREFILL,DECODE.",
        ),
    ],
    model: Annotated[str | None, typer.Option(help="Default: the first that the server names.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Better in the environment.", envvar="HERMETIC_AUDIT_KEY")
    ] = None,
    second_key: Annotated[
        str | None,
        typer.Option(
            help="Another customer's key, to test between the two.", envvar="HERMETIC_AUDIT_SECOND_KEY"
        ),
    ] = None,
    profile: Annotated[
        str, typer.Option(help="quick (minutes), standard (some 20 minutes) or soak (hours).")
    ] = "quick",
    scenario: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this one; repeat. A name that is none lists them all."),
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Time for all of it, like 90s, 5m or 2h.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed asks the same.")] = 1,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="End at the first finding.")] = False,
    ca: Annotated[Path | None, typer.Option(help="Certificates to trust, PEM.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="One self-contained HTML file.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Everything as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="A pipeline's test report.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Ask a running endpoint whether it ever answers with somebody else's data.

    Exit code 0: nothing found, with the bound that this supports. 1: a finding. 2: it could not run, or not to its end."""
    from hermetic.audit import command
    from hermetic.audit.run import AuditOptions
    from hermetic.audit.target import TargetOptions

    options = AuditOptions(
        urls=tuple(urls),
        target=TargetOptions(model, api_key, second_key, None if ca is None else str(ca)),
        profile=profile,
        scenarios=tuple(scenario or ()),
        budget=None if budget is None else command.seconds(budget),
        seed=seed,
        fail_fast=fail_fast,
    )
    raise typer.Exit(command.main(options, command.Outputs(report, json, junit, quiet)))


@app.command()
def drill(
    scenario: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="What the audits play; repeat. Default: what shows it soonest."),
    ] = None,
    budget: Annotated[str, typer.Option(help="Time for each of the two audits, like 90s or 5m.")] = "120s",
    seed: Annotated[int, typer.Option(help="The same seed asks the same.")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Show the incident: the audit of a server that has its fault and no walls, beside that of the server as shipped.

    Both run on this machine, one after the other, for some minutes.

    Exit code 0: the leak is found, and the shipped server refuses. 1: not so. 2: it could not be run. 130: interrupted."""
    os.environ.update(WORKER_ENVIRONMENT | os.environ)  # before torch is imported, which reads it
    from hermetic.audit import command
    from hermetic.lab.drill import SCENARIOS, DrillOptions
    from hermetic.lab.drill import main as run

    raise typer.Exit(run(DrillOptions(tuple(scenario or SCENARIOS), command.seconds(budget), seed, quiet)))


# The groups of options in `hermetic check --help`.
_REPORT, _RULES, _ASKING, _WATCHING = (
    "The report",
    "Which rules, and what they are told",
    "How nodes are asked",
    "Again and again",
)


@app.command()
def check(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE...",
            help="URLs of nodes, logs, saved answers, metrics, manifests, folders of these, - or a quoted command line; NAME=SOURCE says whose it is.",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="text (the default), json, sarif or github.", rich_help_panel=_REPORT),
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", help="Only these rules, or families (CAP,VER).", rich_help_panel=_RULES),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", help="Not these rules or families.", rich_help_panel=_RULES),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail on what is not known, too.", rich_help_panel=_RULES)
    ] = False,
    has_patch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NUMBER",
            help="A fix that this deployment's build has, whatever its version says; repeat.",
            rich_help_panel=_RULES,
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="An earlier --format json: what has changed since?", rich_help_panel=_RULES
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A TOML file with a table `check` (docs/check.md)."),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(help="Time for one node, like 4s (the default).", rich_help_panel=_ASKING),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Better in the environment.", envvar="HERMETIC_CHECK_KEY", rich_help_panel=_ASKING),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="Certificates to trust, PEM.", rich_help_panel=_ASKING)
    ] = None,
    watch: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Check again every 60s, 5m, ...", rich_help_panel=_WATCHING),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="With --watch: what was found, at /metrics of this port.",
            min=0,
            max=65535,
            rich_help_panel=_WATCHING,
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Where that port listens.", rich_help_panel=_WATCHING)
    ] = "127.0.0.1",
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also what passed.", rich_help_panel=_REPORT)
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="CODE",
            help="What a rule means, why, and what to do; a family (CAP) or `all` is listed.",
            rich_help_panel=_REPORT,
        ),
    ] = None,
) -> None:
    """Read a deployment of Hermetic, SGLang or vLLM before it takes traffic: does what it advertises fit what it holds?

    Exit code 0: clean, as far as it could be told. 1: findings (with --strict also what is not known). 2: a source could not be read, or an option
    cannot be meant.

    Families of rules: CAP capacity, VER versions, REL release, DET detection, PAIR pairs, VLLM, PRX proxies, EXP exposure, COV coverage, HRM Hermetic,
    SRC sources. `--explain CAP` lists one, `--explain CAP001` says all of a rule."""
    from hermetic.check import command

    asked = command.Asked(
        sources=tuple(sources or ()),
        format=format,
        select=tuple(select or ()),
        ignore=tuple(ignore or ()),
        strict=strict,
        patches=tuple(has_patch or ()),
        baseline=baseline,
        config=config,
        timeout=timeout,
        api_key=api_key,
        ca=None if ca is None else str(ca),
        watch=watch,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        verbose=verbose,
        explain=explain,
    )
    raise typer.Exit(command.main(asked))


@app.command()
def exposure(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG...", help="Access logs, one JSON object a line; gzip too; - is standard input."
        ),
    ],
    pool: Annotated[int, typer.Option(help="Tokens that the smaller pool held at that time.", min=1)],
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Like 2026-11-29T14:00Z.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Up to, not including.")] = None,
    prefill_speed: Annotated[
        float | None, typer.Option(help="Tokens a second that a node reads at best.", min=0.001)
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=NAME",
            help="Which field holds time, id, status, prompt, cached, prefill_prompt, first (seconds to the first token; first=NAME:ms for others), "
            "header, whole, method, path or request; dots for what is nested.",
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="text or json (docs/exposure-schema.json).")] = "text",
    ids: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the request ids there, one a line.")
    ] = None,
    prefill_log: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Log of the prefill half, to compare prompt tokens by request id; may be repeated.",
        ),
    ] = None,
) -> None:
    """After an incident: which past answers fit its signature?

    Exit code 0: none. 1: some. 2: a log could not be read, or no answer could be judged."""
    from hermetic.check import exposed

    raise typer.Exit(
        exposed.main(
            exposed.Asked(
                logs=tuple(logs),
                pool=pool,
                since=since,
                until=until,
                prefill_speed=prefill_speed,
                fields=tuple(field or ()),
                format=format,
                ids=ids,
                prefill_logs=tuple(prefill_log or ()),
            )
        )
    )


@app.command()
def prove(
    scope: Annotated[str, typer.Option(help="How much to search: small, default or large.")] = "default",
    requests: Annotated[int | None, typer.Option(help="Change the scope: requests.", min=1)] = None,
    prompt_pages: Annotated[int | None, typer.Option(help="Pages of the first prompt.", min=1)] = None,
    pages: Annotated[int | None, typer.Option(help="Pages of each worker.", min=1)] = None,
    slots: Annotated[int | None, typer.Option(help="Landing slots of each pair.", min=1)] = None,
    prefill_workers: Annotated[int | None, typer.Option(help="Prefill workers.", min=1)] = None,
    decode_workers: Annotated[int | None, typer.Option(help="Decode workers.", min=1)] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N", help="How often the adversary may do it in one run, like crash=1; repeat."
        ),
    ] = None,
    at_most: Annotated[
        int | None, typer.Option(help="Faults of all kinds together in one run.", min=0)
    ] = None,
    induction: Annotated[
        bool, typer.Option(help="Prove the abstract protocol, and tie the code to it.")
    ] = True,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Play a saved counterexample again.")
    ] = None,
    as_test: Annotated[bool, typer.Option("--as-test", help="Print it as a pytest test.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Draw every step of a long counterexample.")] = False,
    conform: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Is this recording (--trace) a behaviour of the protocol?"),
    ] = None,
    mutant: Annotated[
        str, typer.Option(metavar="NAME", help="Put a fault of the field in, and find it.")
    ] = "",
    mutants: Annotated[bool, typer.Option("--mutants", help="Every mutant, and what catches it.")] = False,
    write_docs: Annotated[
        bool, typer.Option("--write-docs", help="With --mutants or --growth: into docs/proof.md.")
    ] = False,
    growth: Annotated[
        bool, typer.Option("--growth", help="How the number of states grows with each bound.")
    ] = False,
    processes: Annotated[int, typer.Option(help="Processes that search.", min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Of random walks (--scope large).")] = 0,
    seconds: Annotated[float, typer.Option(help="Of random walks, for each part.")] = 120.0,
    json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where a counterexample is saved; of a whole scope that holds, the figures."
        ),
    ] = None,
) -> None:
    """Check the protocol: every state of the production machines in a scope, an induction for any size, recordings.

    Exit code 0: all holds. 1: there is a counterexample, drawn and saved. 2: it could not be run.
    """
    from hermetic.proof import prove as proof
    from hermetic.proof.options import ProveOptions, Sizes

    sizes = Sizes(
        requests,
        prompt_pages,
        pages,
        slots,
        prefill_workers,
        decode_workers,
        at_most,
        _counts("--fault", fault or []),
    )
    options = ProveOptions(
        scope=scope,
        sizes=sizes,
        induction=induction,
        processes=processes,
        seed=seed,
        seconds=seconds,
        replay=replay,
        as_test=as_test,
        full=full,
        conform=conform,
        mutant=mutant,
        mutants=mutants,
        write_docs=write_docs,
        growth=growth,
        json=json,
    )
    raise typer.Exit(proof.main(options))


def _counts(option: str, given: list[str]) -> dict[str, int]:
    """`name=number` each. Raises OptionError."""
    counts = {}
    for text in given:
        name, _, number = text.partition("=")
        if not (name and number.isascii() and number.isdigit()):
            raise OptionError(f"{option} is {text!r}; it must be a name and a number, like crash=1")
        counts[name] = int(number)
    return counts


_Rate = Annotated[float | None, typer.Option(min=0.0, rich_help_panel="How much goes wrong")]
_Chance = Annotated[float | None, typer.Option(min=0.0, max=1.0, rich_help_panel="How much goes wrong")]


@app.command()
def simulate(
    seed: Annotated[int, typer.Option(help="The first seed; a run is a function of it.")] = 1,
    seeds: Annotated[
        int, typer.Option(help="Runs, each with the next seed; with --mutants: tries of each.", min=1)
    ] = 1,
    requests: Annotated[int, typer.Option(help="Requests of each run.", min=1)] = 50,
    loss: _Chance = None,
    duplicate: _Chance = None,
    late: _Chance = None,
    abort: _Chance = None,
    write_fails: _Chance = None,
    write_doubt: _Chance = None,
    crash: _Rate = None,
    freeze: _Rate = None,
    slow: _Rate = None,
    cut: _Rate = None,
    cut_data: _Rate = None,
    damage_slot: _Rate = None,
    damage_page: _Rate = None,
    drain: _Rate = None,
    leave: _Rate = None,
    disable: _Rate = None,
    gateway: _Rate = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Nothing goes wrong but what is asked for here.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(help="These requests of the plan alone, like 3,17; or none.")
    ] = None,
    faults: Annotated[str | None, typer.Option(help="These planned faults alone, like 0,2; or none.")] = None,
    without: Annotated[str, typer.Option(help="Classes of faults that do not happen, like loss,late.")] = "",
    mutant: Annotated[
        str, typer.Option(metavar="NAME", help="Put a fault of the field in, and find it.")
    ] = "",
    mutants: Annotated[
        bool,
        typer.Option("--mutants", help="Every mutant: median number of seeds until it is found, of 5 tries."),
    ] = False,
    transport: Annotated[str, typer.Option(help="simulated, or mooncake with --wall-clock.")] = "simulated",
    wall_clock: Annotated[
        bool, typer.Option("--wall-clock", help="Real time, for a real transport.")
    ] = False,
    processes: Annotated[int, typer.Option(help="Processes that run seeds.", min=1)] = 2,
    shrink: Annotated[bool, typer.Option(help="Make a failing run as small as possible.")] = True,
    json: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Where a counterexample is saved. Default: hermetic-counterexample.json."
        ),
    ] = "",
    trace: Annotated[
        str, typer.Option(metavar="FILE", help="Record the protocol, for `prove --conform`.")
    ] = "",
) -> None:
    """Run whole deployments on virtual time with faults, and compare every token of every answer.

    Exit code 0: nothing is wrong. 1: there is a counterexample, made small. 2: it could not be run.
    """
    os.environ.update(WORKER_ENVIRONMENT | os.environ)  # before torch is imported, which reads it
    from dataclasses import replace

    from hermetic.proof.simulation.command import main as run
    from hermetic.proof.simulation.options import CLASSES, Narrowed, Rates, SimulateOptions

    given = {name: value for name, value in locals().items() if name in CLASSES and value is not None}
    rates = replace(Rates().quiet() if quiet else Rates(), **given)
    narrowed = Narrowed(
        _numbers("--only", only), _numbers("--faults", faults), tuple(without.split(",")) if without else ()
    )
    options = SimulateOptions(
        seed=seed,
        seeds=seeds,
        requests=requests,
        rates=rates,
        narrowed=narrowed,
        mutant=mutant,
        mutants=mutants,
        transport=transport,
        wall_clock=wall_clock,
        processes=processes,
        json=json,
        shrink=shrink,
        trace=trace,
    )
    raise typer.Exit(run(options))


def _numbers(option: str, given: str | None) -> tuple[int, ...] | None:
    """`1,2,3`; `none` for no number at all; None when the option was not given. Raises OptionError."""
    if given is None:
        return None
    parts = [] if given == "none" else given.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise OptionError(f"{option} is {given!r}; it must be numbers, like 3,17, or none")
    return tuple(map(int, parts))


@app.command("hash-key")
def hash_key(
    new: Annotated[
        bool, typer.Option("--new", help="Make a new random key, whatever standard input is.")
    ] = False,
) -> None:
    """Hash an API key for the --api-keys file: one from standard input, or a new random one.

    The line for the file goes to standard output; a new key goes to standard error, once.
    """
    import secrets

    from hermetic.gateway.tenants import hash_key as hashed

    if new or sys.stdin.isatty():
        key = "hk-" + secrets.token_urlsafe(32)
        print(f"the new key, shown only now: {key}", file=sys.stderr)
    else:
        key = sys.stdin.read().strip()
        if len(key) < 16 or not key.isascii() or not key.isprintable() or " " in key:
            raise OptionError(
                f"a key needs at least 16 printable ASCII characters without spaces, this one has {len(key)}; it is only "
                "hashed, so it must be too long to guess: `hermetic hash-key --new` makes one"
            )
    print(f'key_hashes = ["{hashed(key)}"]')


if __name__ == "__main__":
    main()
