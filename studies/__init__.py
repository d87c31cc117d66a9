"""Studies: speed, memory and theory, measured beside the product; not in the wheel."""
