"""Documents: what is translated in each format, and how it is written back. One file per format."""
