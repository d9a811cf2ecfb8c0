"""A recipe: everything a training run depends on, in one YAML file."""
