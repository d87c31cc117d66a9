"""Models by name or path, the adapters on them, and the names of their tensors."""
