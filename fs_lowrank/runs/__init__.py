"""The files of a run: records, checkpoints, the saved adapter, plots."""
