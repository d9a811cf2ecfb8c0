"""Metrics: translation, classification, tagging, similarity, perplexity, word error rate."""
