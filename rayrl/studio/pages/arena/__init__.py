"""The section Arena: versions against each other, with the interval of every difference."""

from rayrl.studio.pages.arena.views import router
from rayrl.studio.pages.shell import Section

SECTION = Section("arena", "/arena", router)
