"""Experiments: data, models and the runs that show what the method does and does not do."""
