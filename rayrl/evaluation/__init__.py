"""From traces to evidence: rows, statistics, summaries, comparison."""
