"""The section Runs: rollout runs, their episodes step by step, and what two runs differ in."""

from fastapi import APIRouter

from rayrl.studio.pages.runs import lists, replay, versus
from rayrl.studio.pages.shell import Section

router = APIRouter(include_in_schema=False)
for part in (versus, replay, lists):
    router.include_router(part.router)


SECTION = Section("runs", "/runs", router)
