"""Claims of papers, each with the smallest honest experiment: one file a claim in the folders here."""
