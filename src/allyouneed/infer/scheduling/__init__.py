"""Parts of the scheduler: which requests are admitted, how their prompts are read, what happens when blocks run out."""
