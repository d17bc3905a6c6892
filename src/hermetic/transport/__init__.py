"""Moving sealed pages into a peer's landing slots. `base` is the interface, `shm` the transport between processes of one host."""
