"""From sources to answers: how the next token is chosen, many sources at once, text in and text out."""
