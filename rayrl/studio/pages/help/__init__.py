"""The section Help: overview, glossary and questions in both languages, and the documentation."""

from rayrl.studio.pages.help.views import router
from rayrl.studio.pages.shell import Section

SECTION = Section("help", "/help", router)
