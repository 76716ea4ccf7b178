"""The training step: loss, assignment, optimizers, and the whole step in one CUDA graph. See docs/training-step.md.

Checked in float64 on the CPU against Ultralytics; what was run on a GPU, and what was not, stands there too.
"""
