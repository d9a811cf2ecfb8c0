"""From files to batches: readers, filters, tokenizers, a store built once, and packed rows out of it."""
