"""What a person sees while workers start: a bar for each, then one line with what was measured."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hermetic.gateway.backend import Capacity


class StartProgress:
    """Bars on a terminal; a plain line for each step elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.fields[worker]:<12}"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
            console=self._console, transient=True, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, object] = {}
        self._said: set[tuple[str, str]] = set()

    def __enter__(self) -> StartProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def update(self, worker: str, fraction: float, text: str) -> None:
        """One worker got further: fraction 0..1 and what it does."""
        if worker not in self._tasks:
            self._tasks[worker] = self._bars.add_task(text, total=1.0, worker=worker)
        self._bars.update(self._tasks[worker], completed=fraction, description=text)  # type: ignore[arg-type]
        stage = "reading weights" if text.startswith("layer ") else text
        if not self._console.is_terminal and (worker, stage) not in self._said:
            self._said.add((worker, stage))
            self._console.print(f"{worker}: {stage}", highlight=False)

    def say(self, text: str) -> None:
        """One line for the person who started this."""
        self._bars.stop()
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def ready(self, url: str, capacity: Capacity, keys: bool) -> None:
        """The one line to read, and one to paste."""
        self._bars.stop()
        pools = ", ".join(f"{worker} {tokens:,} tokens" for worker, tokens in capacity.pools.items())
        details = capacity.details
        self._console.print(
            f"[bold green]ready[/] {url}  model {capacity.model}, context {capacity.max_model_len:,} tokens "
            f"(measured: {pools}; model window {capacity.window:,}), pages of {capacity.page_size}, "
            f"verify {details.get('verify')}, {details.get('mode')}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        body = (
            f'{{"model": "{capacity.model}", "temperature": 0, '
            '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
        )
        key = "-H 'Authorization: Bearer KEY' " if keys else ""
        self._console.print(
            f"try: curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
