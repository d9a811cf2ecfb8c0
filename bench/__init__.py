"""Benchmarks and checks, run as files: `python bench/decode/cpu.py` (README.md). A file that others import is found as
`bench.folder.file`; the script that imports it puts the repository on `sys.path`."""
