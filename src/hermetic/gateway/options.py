"""What an operator may set about the gateway's part of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

ON_DISCONNECT = ("drain", "cancel")


@dataclass(frozen=True)
class ClusterOptions:
    """Times in seconds. Whoever builds it from a command or a file checks the values there."""

    # Without a sign of life after which a worker is taken for unreachable. A quiet one beats every second, and a step
    # that takes longer holds its beat back: well above the longest step.
    silent_seconds: float = 30.0
    on_disconnect: str = "drain"  # a client left: let its transfer and first token finish, or cancel at once
    max_reruns: int = 3  # times that one choice is run again after a lost worker or a broken transfer
    trip_failures: int = (
        3  # integrity failures within `trip_seconds` that disable the model; 0: never by itself
    )
    trip_seconds: float = 600.0
    state_file: str | None = None  # keeps "disabled" over a restart
    context: int | None = None  # cap of the advertised context, below what the workers' pools hold
    max_open: int = 512  # requests being served or waiting at once; one more gets 429
    deadline: float = 1800.0  # from taking a request to its end
