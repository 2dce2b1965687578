"""The offline judge: scores frozen traces with any ChatModel; never inside the agent loop."""
