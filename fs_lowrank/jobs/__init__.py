"""The workshop: crews that take work from a store, pools that are handed it, locks, files written whole, shells."""
