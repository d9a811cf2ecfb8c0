"""Model folders and files of other projects: one table per family maps their config and weight names to ours."""
