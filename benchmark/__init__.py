"""Benchmarks and analyses of fs_lowrank: suites in, results and reports out. Uses only its public API."""
