"""The section Workbench: from a file of labelled cases to two compared experiments."""

from fastapi import APIRouter
from sqlalchemy import func, select

from rayrl.studio.context import Context
from rayrl.studio.pages.shell import Section
from rayrl.studio.pages.workbench import case, comparing, create, experiment, lists, sessions, skills
from rayrl.workbench import tables

router = APIRouter(include_in_schema=False)
for part in (lists, create, skills, experiment, case, comparing, sessions):
    router.include_router(part.router)


def running(ctx: Context) -> int:
    """Experiments at work."""
    query = select(func.count()).select_from(tables.experiments).where(tables.experiments.c.state == "running")
    with ctx.bench.store.read() as connection:
        return int(connection.execute(query).scalar() or 0)


SECTION = Section("workbench", "/workbench", router, badge=running)
