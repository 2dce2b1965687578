"""The section Skills: banks, what each chunk was measured to do, what speaks for and against it, what changed."""

from rayrl.studio.pages.shell import Section
from rayrl.studio.pages.skills.views import router

SECTION = Section("skills", "/skills", router)
