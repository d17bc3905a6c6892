"""Is the protocol that runs the protocol that was checked? Explorer, induction, conformance of traces, simulator, mutants.

The top of the arrows: it imports everything below and is imported by the command line alone. What is explored and simulated
are the production objects; what stands in for something else says so where it stands.
"""
