"""The settings of a training run: their names, types, defaults, meaning and limits, a module for each group."""
