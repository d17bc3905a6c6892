"""Pages of keys and values: what they are (geometry), whose they are (lineage, seals), who holds them (pool, slots).

No I/O and nothing of the model in here: the same objects run in production, in tests and under the explorer.
"""
