"""The prefill -> decode handoff as pure state machines: events in, actions out; no I/O, no clock.

Theory of operation. One request, one *ticket*, one *attempt*: one machine on each side.

    gateway                decode                            prefill
       |---- submit ---------->| reserves prompt pages + 1      |
       |---- submit ----------------------------------------->| keeps it
       |                       |---- grant ------------------->| may take its pages now
       |                       |<--- started ------------------| holds its pages; wants slots
       |                       |---- credit (slots) ---------->|
       |                       |<--- landed (page -> slot) ----| wrote a batch, while the next chunk is computed
       |                       | copies, verifies, tags        |
       |                       |---- credit ------------------>|
       |                       |<--- complete (counts, state) -|
       |                       |---- ack --------------------->| closes its send leases
       |<--- tokens -----------|                               |

Resources are taken in one order: decode's pages, then prefill's pages, then slots. (Slots come with the first credit,
after *started*, and not with the grant: a request that held slots while it waited for prefill's pages could wait in
a circle with one that holds those pages and waits for slots. One credit is enough to make progress.)

What each side believes of the other: nothing. Decode compares counts with what it reserved, and content with the
lineage it computed; prefill writes only to slot uses that it was granted under this ticket and attempt.

An abort from anywhere ends both halves. Decode keeps granted slots until prefill says *drained* (no write in flight,
none will start) or the peer is fenced; prefill keeps its source pages until its own writes have ended. A ticket that
prefill does not know is answered with *drained* as well, and never started afterwards. The first cause is the one reported.
"""
