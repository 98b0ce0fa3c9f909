"""What the commands share that prove the kernels: budgets, draws, workers, and records kept."""
