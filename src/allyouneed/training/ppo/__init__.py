"""PPO: tuner.py has its equations and the Python interface, run.py the runs of `allyouneed train`."""

from allyouneed.training.ppo.tuner import PPOOptions, PPOStep, PPOTuner, advantages, ppo, surrogate, token_rewards

__all__ = ["PPOOptions", "PPOStep", "PPOTuner", "advantages", "ppo", "surrogate", "token_rewards"]
