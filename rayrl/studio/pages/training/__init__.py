"""The section Training: how a retrieval policy learned, what it is worth on unseen questions, one question walked."""

from rayrl.studio.pages.shell import Section
from rayrl.studio.pages.training.views import router

SECTION = Section("training", "/training", router)
