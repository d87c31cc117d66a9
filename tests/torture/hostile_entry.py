"""The module that the entry point of the hostile package names; importing it registers the method."""

from .hostile import made

Hostile = made()
