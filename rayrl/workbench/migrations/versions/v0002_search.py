"""An index that holds all the search over cases looks at, so that it reads no whole rows."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the index."""
    op.execute("CREATE INDEX cases_by_text ON evaluation_cases (dataset_id, ordinal, case_id, query)")


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP INDEX cases_by_text")
