"""Shared by the commands that prove the kernels: budgets, draws, workers, records."""
