"""Tasks: objective, labels and metrics. Defining a task registers it; a recipe that names it imports it."""
