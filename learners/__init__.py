"""Learning algorithms: SFT, advantage estimators, policy-gradient updates, checkpoints."""
