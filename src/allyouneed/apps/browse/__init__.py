"""A text browser over a folder of pages, for models that look things up (WebGPT: Nakano et al. 2021)."""
