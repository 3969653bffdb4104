"""Training: `config` says what, `step` does one step, `loop` runs them all, `checkpoint` keeps them safe."""
