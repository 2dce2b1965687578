"""Learners: supervised fine-tuning, policy gradient with a frozen reference, advantage estimators, checkpoints."""
