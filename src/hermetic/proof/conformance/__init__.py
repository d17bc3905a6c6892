"""Is this recording a behaviour of the protocol? Reading it, following both halves of every ticket, one order of all."""
