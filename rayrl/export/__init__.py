"""From traces to training data: SFT, DPO, GRPO and slime records, with filters and a quality report."""
