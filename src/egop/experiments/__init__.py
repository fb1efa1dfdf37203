"""Experiments: data, models, the training loop and the runs that show what the method does and does not do."""
