"""Training pairs that augment the prepared files: see ../augment.py."""
