"""`hermetic check`: read a deployment before it takes traffic. Imports nothing of the engine."""
