"""`hermetic audit`: does this endpoint ever answer with somebody else's data?

Black-box tests of any OpenAI-compatible endpoint. Imports nothing of the engine; needs no torch, no GPU, no access to what is
behind the endpoint.
"""
