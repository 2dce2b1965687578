"""Models for fault tests: the shipped reader with a log of its calls that survives ``kill -9``."""

import json
import os

from rayrl.workbench.reader import ScriptedReader


class CountingReader(ScriptedReader):
    """Appends one line per call: the case's query."""

    def __init__(self, *, log, **options):
        super().__init__(**options)
        self.log = log

    async def generate(self, messages, tools, *, seed):
        text = str(messages[1]["content"])
        query = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]["query"]
        handle = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, (json.dumps(query) + "\n").encode())
        os.close(handle)
        return await super().generate(messages, tools, seed=seed)
