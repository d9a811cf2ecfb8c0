"""Tasks that learn what people prefer: a reward model (preference.py), tuning by comparisons (dpo.py) or by a reward
model (ppo.py)."""

from allyouneed.tasks.feedback import dpo, ppo, preference

__all__ = ["dpo", "ppo", "preference"]
