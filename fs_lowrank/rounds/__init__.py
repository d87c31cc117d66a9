"""What every engine shares: a round, the workspace of a process, and the records."""
