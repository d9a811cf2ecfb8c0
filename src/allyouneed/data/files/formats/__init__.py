"""Formats of files: archives, encodings, and tables that are not text."""
