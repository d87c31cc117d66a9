"""What saves work, each tried against the plain way before it is used: states of frozen layers, joint passes."""
