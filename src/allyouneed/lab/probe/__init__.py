"""Tasks that separate architectures, one loop that trains a model on any of them, and what controls must show."""
