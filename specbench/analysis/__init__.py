"""Pure functions of trials: estimates, intervals, comparisons. No torch, no I/O, no rich."""
