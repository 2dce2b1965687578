"""Skills: what they are, where they come from, which of them an episode gets."""
