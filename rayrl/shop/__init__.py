"""The embedded shop environment server: catalogue, search, page state machine, reward, leases, HTTP."""
