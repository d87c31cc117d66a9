"""Studies of the statements the methods rest on. Each module is a command that writes one JSON and one PNG."""
