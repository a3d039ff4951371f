"""Memory of one device: arenas, leases, dtypes, budgets. The only home of ``torch.cuda`` and NVML."""
