"""Studies: `compare` sets optimizers side by side, `sweep` tunes them, `summary` counts, `report` shows."""
