"""One worker's engine: scheduler (who computes next), batch (the arrays of a step), runner (the step itself)."""
