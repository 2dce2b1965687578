"""Names and versions of the protocol. A server or client that disagrees about one of these must not be talked to."""

from __future__ import annotations

ENVIRONMENT_VERSION = "shopsimulator-paper-aligned-v8"
OBSERVATION_VERSION = "shopping-observation-v7"
REWARD_VERSION = "shopsimulator-paper-reward-v2"
PRICE_VERSION = "variant-price-paper-v2"
SEARCH_VERSION = "shopsimulator-multifield-bm25-v3"

SERVER_NAME = "rayrl-shop"
CAPABILITIES = (
    "lease_ttl",
    "heartbeat",
    "heartbeat_many",
    "request_id",
    "idempotent_release",
    "queue_timeout",
    "private_goal",
    "error_codes",
    "metrics",
)
"""What the embedded server does beyond the public protocol; ``/healthz`` lists them and the client goes by them."""

ACTION_LIMITS = {"single_turn": 30, "multi_turn": 40}
"""Actions an episode may use, valid or not, by interaction mode."""

TERMINATION_REASONS = ("action_limit", "generation_length")
"""What a client may end an episode with."""

PAGE_SIZE = 20
MAX_RESULTS = 150
MAX_OPTION_VALUES = 100
MAX_KEY_ATTRIBUTES = 10
