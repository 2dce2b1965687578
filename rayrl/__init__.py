"""rayrl: roll out tool-using, retrieval-augmented agents, learn from their traces, prove what got better.

Nothing in this package imports Ray: every piece of logic runs and is tested without a cluster. The Ray plumbing lives
in the sibling packages ``actors``, ``learners`` and ``jobs`` (arrows point one way: jobs -> actors, learners -> rayrl).
"""

__version__ = "0.1.0"
