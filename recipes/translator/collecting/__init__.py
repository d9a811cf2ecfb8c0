"""Where the text of collect.py comes from, and which of it is used."""
