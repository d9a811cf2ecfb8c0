"""Parts of ../translator_quality.py: test sets, generated numbers and spans, dictionaries, checks, tables."""
