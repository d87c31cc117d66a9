"""Processes, locks, files and command-line shells, shared by the engines, ``benchmark`` and ``hpo``."""
