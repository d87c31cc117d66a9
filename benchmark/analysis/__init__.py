"""Studies of the statements the methods rest on. Each module is a command that writes one JSON and one PNG."""


def short(value, digits: int = 6):
    """Floats to ``digits`` significant digits, all the way down lists and dictionaries."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {k: short(v, digits) for k, v in value.items()}
    return [short(v, digits) for v in value] if isinstance(value, (list, tuple)) else value
