"""Inference: choosing tokens, decoding many requests at once, and predictors that take and return text."""
